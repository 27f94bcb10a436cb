"""Block-wise FP8 against a reference in float64, the tensors that a server gets, and what it could not take."""

import numpy as np
import pytest
import torch
from config_files import published_spec

from dynamo_megatron.models import FAMILIES, load_model_config
from dynamo_megatron.models.fp8 import (
    check_fp8_shapes,
    dequantize,
    dequantized,
    is_quantized,
    quantize,
    quantize_tensors,
    sent_bytes,
)
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.models.server_layout import server_shard

SHAPES = [(256, 384), (130, 257), (1, 1)]
# The format by its definition, in float64.
CODES = np.arange(127)  # of float8_e4m3's finite values from 0 up: 4 bits of exponent (bias 7), 3 of mantissa
VALUES = np.where(
    CODES < 8, (CODES % 8) / 8 * 2.0**-6, (1 + (CODES % 8) / 8) * 2.0 ** (np.maximum(CODES // 8, 1) - 7.0)
)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2
TINY = 2.0**-126  # the smallest normal float32


def reference(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes without the sign, scales), by block: float64 quotients, rounded to float32 as a float32 division is, and
    then to the nearest value, in the middle to the even one."""
    rows, columns = weight.shape
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
    codes = np.zeros(weight.shape, np.uint8)
    for i, j in np.ndindex(scales.shape):
        part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        block = np.abs(weight[part])
        scales[i, j] = max(np.float32(block.max() / 448.0), np.float32(TINY))
        quotient = (block / np.float64(scales[i, j])).astype(np.float32).astype(np.float64)
        above = np.searchsorted(MIDDLES, quotient)  # middles that are below it
        tie = (above < 126) & (MIDDLES[np.minimum(above, 125)] == quotient)
        codes[part] = above + (tie & (above % 2 == 1))
    return codes, scales


def random_weight(shape, dtype, seed=0):
    """Of blocks and rows of very different size, with a block of zeros where there are several."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator) ** 4
    if shape[0] > 128:
        weight[:128, :128] = 0
        weight[128:] *= 1e-4
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_scales_are_the_references(shape, dtype):
    weight = random_weight(shape, dtype)
    values, scales = quantize(weight)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert values.shape == weight.shape and scales.shape == tuple(-(-size // 128) for size in shape)
    assert values.is_contiguous() and scales.is_contiguous()
    codes, expected = reference(weight.double().numpy())
    assert (scales.numpy() == expected).all()
    found = values.view(torch.uint8).numpy()
    assert (found & 127 == codes).all()
    signs = (found & 128 != 0) == (weight.double().numpy() < 0)
    assert (signs | (codes == 0)).all()
    # The weight again: half of the last of four bits, or of the smallest value.
    error = (dequantize(values, scales, torch.float64) - weight.double()).abs()
    spread = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert (error <= torch.maximum(weight.double().abs() / 16, spread * 2.0**-10) * (1 + 1e-5)).all()


@pytest.fixture(scope="module")
def spec_of(make_tiny_model, tmp_path_factory):
    """spec_of(family): a model of two server ranks' whole blocks, each shape another one."""

    def made(family):
        folder = tmp_path_factory.mktemp("models") / family
        sizes = {"hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 128, "ffn": 256, "layers": 1}
        experts = {"num_experts": 2, "moe_intermediate_size": 256} if family == "qwen3_moe" else {}
        return load_model_config(make_tiny_model(folder, family, fields=experts, **sizes))

    return made


LINEAR = {f"{part}_proj" for part in ("q", "k", "v", "o", "qkv", "gate", "up", "gate_up", "down")}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_linear_weights_are_sent_with_their_scales(spec_of, family):
    shapes = huggingface_shapes(spec_of(family))
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    weights = {n for n in shapes if n.endswith(".weight") and n.split(".")[-2] in LINEAR}
    assert {n for n in shapes if is_quantized(n)} == weights
    sent = quantize_tensors(tensors)
    assert sent.keys() == shapes.keys() | {f"{name}_scale_inv" for name in weights}
    for name in weights:
        assert sent[name].dtype == torch.float8_e4m3fn and sent[f"{name}_scale_inv"].dtype == torch.float32
    assert all(sent[name] is tensors[name] for name in shapes.keys() - weights)
    expected = {n: b for name, shape in shapes.items() for n, b in sent_bytes(name, shape, 2, "fp8").items()}
    assert [(name, tensor.nbytes) for name, tensor in sent.items()] == list(expected.items())
    assert sent_bytes(min(weights), (3, 5), 2, None) == {min(weights): 30}
    again = dict(dequantized(sent))
    assert list(again) == list(shapes)
    assert all(torch.equal(again[name], tensors[name]) for name in shapes)  # 1 is 448 x (1 / 448), rounded


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "phi3"])
def test_a_part_of_a_server_rank_has_whole_blocks_of_the_tensor(spec_of, family):
    """Quantised as a whole and cut, a weight is what it would be cut and quantised."""
    spec, tp = spec_of(family), 2
    check_fp8_shapes(spec, tp)
    for name, shape in huggingface_shapes(spec).items():
        if not is_quantized(name):
            continue
        weight = random_weight(shape, torch.bfloat16, seed=len(name))
        values, scales = quantize(weight)
        for rank in range(tp):
            part = quantize(server_shard(spec, name, weight, rank, tp).contiguous())
            assert torch.equal(server_shard(spec, name, values.view(torch.uint8), rank, tp), part[0].view(torch.uint8))
            assert torch.equal(server_shard(spec, f"{name}_scale_inv", scales, rank, tp), part[1])


@pytest.mark.parametrize(
    ("name", "tp", "says"),
    [("Qwen2.5-Math-7B", 8, "an MLP width of 2368"), ("Qwen3-30B-A3B", 4, "an MLP width of 192")],
)
def test_widths_of_broken_blocks_are_refused(name, tp, says):
    spec = published_spec(name)
    with pytest.raises(ValueError, match=f"rollout.quantization: fp8 .*rollout.tp {tp} .*{says}; use another") as error:
        check_fp8_shapes(spec, tp)
    assert "\n" not in str(error.value)


def test_what_sglang_runs_as_transformers_modules_is_not_quantised(spec_of):
    with pytest.raises(ValueError, match="SGLang has no smollm3 model of its own"):
        check_fp8_shapes(spec_of("smollm3"), 1)
