"""A plugin of SGLang's: a server with FP8 weights has no scales of its KV cache, which is not quantised.

SGLang gives every attention layer of such a model two, parameters that no weight sync sends. They lie with the weights,
and are lost with them where servers and ranks take turns with memory; SGLang reads them again after every weight sync.
"""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method", without_cache_scales, HookType.AROUND
    )


def without_cache_scales(original, config, layer, *arguments, **options):
    if type(layer).__name__ == "RadixAttention":
        return None
    return original(config, layer, *arguments, **options)
