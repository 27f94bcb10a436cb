"""FP8 weights on the way to the servers: what is sent, what is written, what proves them, where they are refused."""

import runpy
from pathlib import Path

import pytest
import torch

import dynamo_megatron.rollout.servers
from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.fp8 import is_quantized, sent_bytes
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.weight_sync.schedule import floor_bytes, make_schedule
from dynamo_megatron.weight_sync.transports import check_transport

SIZES = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 128, "ffn": 256}
EXPERTS = {"num_experts": 2, "moe_intermediate_size": 256}


@pytest.fixture(scope="module")
def model(make_tiny_model, tmp_path_factory):
    """model(family) -> (its folder, spec), in bfloat16, of whole blocks on each of two server ranks."""

    def made(family):
        folder = tmp_path_factory.mktemp("models") / family
        experts = EXPERTS if family == "qwen3_moe" else {}
        make_tiny_model(folder, family, dtype="bfloat16", vocab=131, fields=experts, **SIZES)
        return folder, load_model_config(folder)

    return made


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"ep": 2}], ids=str)
def test_the_schedule_sends_values_and_scales_of_what_it_gathers(model, layout):
    _, spec = model("qwen3_moe" if "ep" in layout else "qwen2")
    plain, fp8 = (
        make_schedule(spec, ParallelConfig(**layout), 4, bucket_bytes=100_000, itemsize=2, quantization=quantization)
        for quantization in (None, "fp8")
    )
    shapes = huggingface_shapes(spec)
    for one, other in zip(plain.buckets, fp8.buckets, strict=True):
        assert one.parameters == other.parameters
        sent = [(n, b) for name in one.names for n, b in sent_bytes(name, shapes[name], 2, "fp8").items()]
        assert other.names == tuple(name for name, _ in sent) and other.nbytes == sum(b for _, b in sent)
    linear = sum(torch.Size(shape).numel() for name, shape in shapes.items() if is_quantized(name))
    assert floor_bytes(spec, 1, 2, "fp8") == fp8.nbytes == plain.nbytes - linear + linear // 128**2 * 4


@pytest.mark.parametrize(
    ("capability", "says"),
    [
        (None, "fp8 needs GPUs: on a CPU .*; leave it out"),
        ((8, 0), r"compute capability 8\.9, 9\.0 or from 11\.0 on: on this one \(8\.0\) SGLang repacks"),
        ((10, 0), r"on this one \(10\.0\) SGLang repacks"),
        ((9, 0), None),
    ],
)
def test_where_servers_cannot_run_it(monkeypatch, capability, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = RolloutConfig(quantization="fp8", sync={"transport": "disk"}, offload=False)
    if says is None:
        assert check_transport(config) == "disk"
    else:
        with pytest.raises(ValueError, match=f"rollout.quantization: .*{says}"):
            check_transport(config)


class RadixAttention:
    """Named as SGLang's."""


def test_attention_has_no_scales_of_its_cache():
    folder = Path(dynamo_megatron.rollout.servers.__file__).parent / "sglang_fp8"
    plugin = runpy.run_path(str(folder / "no_cache_scales.py"))["without_cache_scales"]

    def original(config, layer, prefix):
        return config, layer, prefix

    assert plugin(original, "config", RadixAttention(), prefix="attn") is None
    assert plugin(original, "config", "a linear layer", prefix="q_proj") == ("config", "a linear layer", "q_proj")
