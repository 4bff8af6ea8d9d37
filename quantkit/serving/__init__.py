"""Plug-ins that run inside other engines: they load quantkit's folders there, and multiply with quantkit's kernels.

`vllm_plugin` is the entry point for vLLM; it registers `vllm_config`, which makes a `vllm_linear` for each packed
linear. `shards` knows no engine: it packs the share of a linear that one rank of an engine multiplies with. `damage`
compares a folder with its recorded hashes while an engine reads it. Nothing of an engine is patched.
"""
