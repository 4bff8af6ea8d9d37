"""Plug-ins that run inside other engines: they load quantkit's folders there, and multiply with quantkit's kernels.

`vllm_plugin` is the entry point for vLLM; it registers `vllm_quantization`, which makes a `vllm_layer` for each packed
linear, and `vllm_experts` for the experts of a layer. `sglang_plugin` and `sglang_quantization` do the same for
SGLang's linears. The other modules know no engine: `engine_config` finds the scheme of each layer, `engine_method` and
`experts_method` load it, `shards` packs the share that one rank multiplies with. `damage` compares a folder with its
recorded hashes while an engine reads it. Nothing of an engine is patched.
"""
