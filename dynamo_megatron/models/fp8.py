"""Block-wise FP8 weights in the form in which SGLang 0.5.23 loads them. Pure functions.

Of the layers' linear weights, those of experts included, `NAME.weight` becomes float8_e4m3, and `NAME.weight_scale_inv`
has a float32 scale for each block of 128 x 128 values of the whole Hugging Face tensor; value times scale is the
weight. With `check_fp8_shapes` every server rank's part, and every part of a fused parameter, begins with a block.
(SGLang: layers/quantization/fp8.py.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import ROUTER_BIAS
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime.late import torch

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3
SCALE = "_scale_inv"
QUANTIZED_BYTES = 1 + 4 / BLOCK**2  # of an element, its share of the scale included
_LINEAR = re.compile(r"\.(?:[qkvo]|qkv|gate|up|gate_up|down)_proj\.weight$")


def is_quantized(name: str) -> bool:
    """Whether a Hugging Face tensor is one of the layers' linear weights."""
    return _LINEAR.search(name) is not None


def sent_bytes(name: str, shape: Sequence[int], itemsize: int, quantization: str | None) -> dict[str, int]:
    """The tensors as which a server gets a Hugging Face tensor of this shape, in order, and their bytes.

    `itemsize`: bytes of a value that is not quantised. `quantization`: rollout.quantization.
    """
    if name.endswith(ROUTER_BIAS):
        itemsize = 4  # whatever the others have
    if quantization is None or not is_quantized(name):
        return {name: math.prod(shape) * itemsize}
    return {name: math.prod(shape), name + SCALE: 4 * math.prod(-(-size // BLOCK) for size in shape)}


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] of any float dtype as float8_e4m3 [out, in] and float32 scales [out, in] / 128, rounded up.

    A block's scale is its largest absolute value / 448, but at least the smallest normal float32, which keeps a block
    of zeros from a division by 0. Blocks at the last row or column may be smaller.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax((1, 3), keepdim=True).float()
    scales = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scales).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return values[:rows, :columns].contiguous(), scales[:, 0, :, 0].contiguous()


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The weight that `quantize` made `values` and `scales` of: the float32 products, rounded to `dtype` (None:
    bfloat16)."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return values.float().mul_(spread).to(dtype or torch.bfloat16)


def quantize_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face tensors by name as servers with FP8 weights get them, in the order of `sent_bytes`."""
    sent: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_quantized(name):
            sent[name], sent[name + SCALE] = quantize(tensor)
        else:
            sent[name] = tensor
    return sent


def dequantized(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what a server gets, with each quantised weight as SGLang's weights checker hashes it: in
    bfloat16, its scales in it (utils/weight_checker.py). One weight at a time is held."""
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scales = tensors.get(name + SCALE)
        yield name, tensor if scales is None else dequantize(tensor, scales)


def check_fp8_shapes(spec: ModelSpec, tp_size: int) -> None:
    """Raises ValueError where SGLang's FP8 linears cannot take the model over `tp_size` server ranks: their inputs, the
    parts of fused outputs, and what a rank has of either need whole blocks."""
    if not spec.served.fused:
        raise InputError(f"rollout.quantization: SGLang has no {spec.family} model of its own, and fp8 needs one")
    size = spec.kv_channels
    widths = {
        "a hidden size": spec.hidden_size,
        "queries": spec.num_attention_heads * size / tp_size,
        "keys": max(1, spec.num_query_groups / tp_size) * size,
        "an MLP width": (spec.moe_ffn_hidden_size or spec.ffn_hidden_size) / tp_size,
    }
    wrong = [f"{what} of {width:g}" for what, width in widths.items() if width % BLOCK]
    if wrong:
        raise InputError(
            f"rollout.quantization: fp8 has blocks of {BLOCK} values, and with rollout.tp {tp_size} a server rank has "
            f"{', '.join(wrong)}; use another rollout.tp, or leave rollout.quantization out"
        )
