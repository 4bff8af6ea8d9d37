"""Plug-ins that run inside other engines: they load quantkit's folders there, and multiply with
quantkit's kernels.

`vllm_plugin` and `sglang_plugin` are the entry points. Modules without an engine's name know none
of its classes. Nothing of an engine is patched.
"""
