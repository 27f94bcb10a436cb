import pytest
import torch
from safetensors.torch import load_file

from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.mapping import (
    expert_number,
    global_name,
    huggingface_names,
    huggingface_shapes,
    is_expert,
    is_sharded,
    parameter_names,
    to_huggingface,
    to_megatron,
)

# vocab 104 needs padding to 112, 128 and 128 rows; on four ranks the padding is more than half of the last shard
SIZES = {"heads": 8, "kv_heads": 4, "vocab": 104, "hidden": 32, "ffn": 64, "layers": 2}
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_equal_and_uses_every_tensor_once(tiny_model, family, dtype, tied):
    folder = tiny_model(family, dtype=dtype, tied=tied, head_dim=8, **SIZES)
    spec, source = load_model_config(folder), load_file(folder / "model.safetensors")
    assert huggingface_shapes(spec) == {name: tuple(tensor.shape) for name, tensor in source.items()}
    for tp in (1, 2, 4):
        back = {}
        for name in parameter_names(spec):
            parts = [source[part] for part in huggingface_names(spec, name)]
            shards = [to_megatron(spec, name, parts, rank, tp) for rank in range(tp)]
            tensors = to_huggingface(spec, name, shards)
            assert not back.keys() & tensors.keys()
            back |= tensors
        assert back.keys() == source.keys()
        for name, tensor in source.items():
            assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), (name, tp)


@pytest.fixture
def spec(tiny_model):
    return load_model_config(tiny_model("qwen2", head_dim=8, **SIZES))


def test_qkv_is_interleaved_by_query_group(spec):
    """Group g holds query heads 2g and 2g + 1, then key head g, then value head g; rank 1 holds groups 2 and 3."""
    q = torch.arange(8).repeat_interleave(8)
    k, v = 100 + torch.arange(4).repeat_interleave(8), 200 + torch.arange(4).repeat_interleave(8)
    shard = to_megatron(spec, "decoder.layers.0.self_attention.linear_qkv.bias", [q, k, v], 1, 2)
    assert shard[::8].tolist() == [4, 5, 102, 202, 6, 7, 103, 203]


def test_gate_and_up_are_cut_apart(spec):
    gate, up = torch.arange(64)[:, None].expand(64, 32), 100 + torch.arange(64)[:, None].expand(64, 32)
    shard = to_megatron(spec, "decoder.layers.1.mlp.linear_fc1.weight", [gate, up], 1, 2)
    assert shard[:, 0].tolist() == [*range(32, 64), *range(132, 164)]


def test_vocabulary_is_padded_with_zeros(spec):
    full = torch.ones(104, 32)
    shards = [to_megatron(spec, "output_layer.weight", [full], rank, 4) for rank in range(4)]
    assert [len(shard) for shard in shards] == [32] * 4
    assert shards[3].sum(dim=1).tolist() == [32.0] * 8 + [0.0] * 24


def test_transformer_engine_names(spec):
    layer = "decoder.layers.1."
    fused = huggingface_names(spec, layer + "self_attention.linear_qkv.layer_norm_weight")
    assert fused == huggingface_names(spec, layer + "input_layernorm.weight")
    fused = huggingface_names(spec, layer + "mlp.linear_fc1.layer_norm_weight")
    assert fused == ("model.layers.1.post_attention_layernorm.weight",)


def test_global_name():
    assert global_name("module.module.decoder.layers.3.mlp.linear_fc2.weight", 8) == (
        "decoder.layers.11.mlp.linear_fc2.weight"
    )
    assert global_name("module.decoder.final_layernorm.weight", 8) == "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    "own", ["mlp.experts.local_experts.1.linear_fc1.weight", "mlp.experts.linear_fc1.weight1"], ids=["local", "grouped"]
)
def test_global_name_of_an_expert(own):
    name = global_name(f"module.decoder.layers.3.{own}", 8, 6)
    assert name == "decoder.layers.11.mlp.experts.local_experts.7.linear_fc1.weight"
    assert expert_number(name) == expert_number("model.layers.11.mlp.experts.7.up_proj.weight") == 7
    assert is_expert(name) and not is_expert("decoder.layers.3.mlp.router.weight")
    assert expert_number("decoder.layers.3.mlp.router.weight") is None


def test_an_expert_is_whole_on_every_tensor_parallel_rank(tiny_model):
    spec = load_model_config(tiny_model("qwen3_moe", head_dim=8, **SIZES))
    name = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    gate, up = torch.zeros(48, 32), torch.ones(48, 32)
    for rank in range(2):
        assert torch.equal(to_megatron(spec, name, [gate, up], rank, 2), torch.cat([gate, up]))
    assert not is_sharded(name) and is_sharded("decoder.layers.1.self_attention.linear_qkv.weight")


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "value_head.weight",
    ],
)
def test_an_unknown_parameter_is_named(spec, name):
    with pytest.raises(ValueError, match=name):
        huggingface_names(spec, name)
