"""A plugin of SGLang's: stands for the products of FP8 layers on a CPU, for which SGLang has none without AMX.

Everything else is SGLang's own: the parameters, the loaders that cut and fuse values and scales, update sessions and
the weights checker. The weights stay as they were loaded, as they do on GPUs of compute capability 9.0, and are
multiplied by their scales into bfloat16; inputs are not quantised.
"""

import torch

METHOD = "sglang.srt.layers.quantization.fp8.Fp8LinearMethod"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{METHOD}.process_weights_after_loading", _keep, HookType.REPLACE)
    HookRegistry.register(f"{METHOD}.apply", _apply, HookType.REPLACE)


def _keep(method, layer) -> None:
    pass


def _apply(method, layer, x, bias=None):
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    weight = block_quant_dequant(layer.weight, layer.weight_scale_inv, method.weight_block_size, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)
