import pytest
import torch

from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.models.server_layout import (
    check_server_parallel,
    server_layout,
    server_parameters,
    server_vocab_rows,
)


@pytest.fixture
def model(make_tiny_model, tmp_path):
    """make(family, **options) -> (spec, its tensors, every value another one)."""

    def make(family: str, **options):
        spec = load_model_config(make_tiny_model(tmp_path / family, family, **options))
        tensors, first = {}, 1
        for name, shape in huggingface_shapes(spec).items():
            count = torch.Size(shape).numel()
            tensors[name] = torch.arange(first, first + count, dtype=torch.float64).view(shape)
            first += count
        return spec, tensors

    return make


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "qwen3_moe"])
def test_every_value_is_on_a_rank_in_the_place_of_its_kind(model, family, tp):
    spec, tensors = model(family, vocab=131, tied=family == "qwen2", expert_ffn=64)
    layout, ranks = server_layout(spec, tp), [server_parameters(spec, tensors, r, tp) for r in range(tp)]
    there = torch.cat([values for rank in ranks for values in rank.values()]).unique()
    assert torch.equal(there[there > 0], torch.cat([t.flatten() for t in tensors.values()]))
    assert ("lm_head.weight" in ranks[0]) == (not spec.tied)
    for rank in ranks:
        assert {name: len(values) for name, values in rank.items()} == layout.sizes
    layer, q = "model.layers.1.self_attn.", spec.num_attention_heads * spec.kv_channels
    fused = ranks[-1][f"{layer}qkv_proj.weight"].view(-1, spec.hidden_size)
    assert torch.equal(fused[: q // tp], tensors[f"{layer}q_proj.weight"][-q // tp :])
    assert torch.equal(fused[-len(fused) + q // tp :][-1], tensors[f"{layer}v_proj.weight"][-1])
    out = tensors[f"{layer}o_proj.weight"]
    assert torch.equal(ranks[-1][f"{layer}o_proj.weight"].view(len(out), -1), out[:, -q // tp :])
    if family == "qwen3_moe":
        experts = ranks[0]["model.layers.0.mlp.experts.w13_weight"].view(spec.num_experts, 2, 64 // tp, -1)
        assert torch.equal(experts[3, 1], tensors["model.layers.0.mlp.experts.3.up_proj.weight"][: 64 // tp])


def test_the_vocabulary_is_padded_with_zeros(model):
    spec, tensors = model("llama", vocab=131)
    assert [server_vocab_rows(spec, tp) for tp in (1, 2, 4, 8)] == [192, 96, 48, 24]
    last = server_parameters(spec, {"lm_head.weight": tensors["lm_head.weight"]}, 1, 2)
    assert last.keys() == {"lm_head.weight"}
    rows = last["lm_head.weight"].view(96, -1)
    assert torch.equal(rows[:35], tensors["lm_head.weight"][96:]) and not rows[35:].any()


def test_more_ranks_than_key_value_heads_share_them(model):
    spec, tensors = model("qwen3", heads=8, kv_heads=2, ffn=256)
    k = tensors["model.layers.0.self_attn.k_proj.weight"]
    name = "model.layers.0.self_attn.qkv_proj.weight"
    for rank in range(4):
        fused = server_parameters(spec, tensors, rank, 4)[name].view(-1, spec.hidden_size)
        head = spec.kv_channels
        assert torch.equal(fused[2 * head : 3 * head], k[rank // 2 * head : (rank // 2 + 1) * head])
    check_server_parallel(spec, 4, "cuda")
    with pytest.raises(ValueError, match=r"rollout\.tp: 4 server ranks cannot be proved .*full_every=null"):
        check_server_parallel(spec, 4, "cpu")
    with pytest.raises(ValueError, match=r"rollout\.tp: 3"):
        check_server_parallel(spec, 3, "cuda")


def test_a_fused_parameter_needs_all_its_parts(model):
    spec, tensors = model("qwen2")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_up_proj.weight: made of .*up_proj.weight too"):
        server_parameters(spec, tensors, 0, 1)
