"""Names and shapes: Hugging Face's tensors <-> Megatron's parameters, and <-> an SGLang server's."""

from types import SimpleNamespace

import pytest
import torch
from config_files import published_spec
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder
from dynamo_megatron.checkpoint.weights import load_weights
from dynamo_megatron.models import FAMILIES, load_model_config
from dynamo_megatron.models.mapping import (
    expert_number,
    global_name,
    huggingface_names,
    huggingface_shapes,
    is_expert,
    is_sharded,
    layout_of,
    parameter_names,
    to_huggingface,
    to_megatron,
)
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.models.server_layout import check_server_parallel, server_layout

# vocab 104 needs padding to 112, 128 and 128 rows; on four ranks the padding is more than half of the last shard
SIZES = {"heads": 8, "kv_heads": 4, "vocab": 104, "hidden": 32, "ffn": 64, "layers": 2, "head_dim": 8}


@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", True), ("float32", False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_equal_and_uses_every_tensor_once(model_of, family, dtype, tied):
    folder = model_of(family, dtype=dtype, tied=tied, **SIZES)
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tensors_of_published_models_are_transformers(name):
    """Names and shapes of the model that transformers builds from the config."""
    config = PUBLISHED[name]["config"]
    shapes = huggingface_shapes(published_spec(name))
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    theirs = {}
    for tensor, value in state.items():
        stem, _, last = tensor.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not stem.endswith("experts"):
            theirs[tensor] = tuple(value.shape)
            continue
        for expert in range(len(value)):  # in memory they are stacked, on disk they are not
            rows = value.shape[1]
            for part in ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",):
                shape = (rows // 2 if last == "gate_up_proj" else rows, value.shape[2])
                theirs[f"{stem}.{expert}.{part}.weight"] = shape
    if config["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    assert shapes == theirs


@pytest.fixture
def spec(model_of):
    return load_model_config(model_of("qwen2", **SIZES))


def test_vocabulary_is_padded_with_zeros(spec):
    shards = [to_megatron(spec, "output_layer.weight", [torch.ones(104, 32)], rank, 4) for rank in range(4)]
    assert [len(shard) for shard in shards] == [32] * 4
    assert shards[3].sum(dim=1).tolist() == [32.0] * 8 + [0.0] * 24


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("module.module.decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"),
        ("module.decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.1.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.pre_mlp_layernorm.weight"),
    ],
)
def test_a_ranks_own_names(spec, own, name):
    """With wrappers, and TransformerEngine's; the rank's first layer is the model's second."""
    whole = global_name(own, 1)
    assert huggingface_names(spec, whole) == huggingface_names(spec, name) and layout_of(whole) == layout_of(name)


@pytest.mark.parametrize("own", ["mlp.experts.local_experts.1.linear_fc1.weight", "mlp.experts.linear_fc1.weight1"])
def test_an_expert_is_whole_on_its_rank(model_of, own):
    spec = load_model_config(model_of("qwen3_moe", **SIZES))
    name = global_name(f"module.decoder.layers.0.{own}", 1, 2)
    assert name == "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    assert expert_number(name) == expert_number("model.layers.1.mlp.experts.3.up_proj.weight") == 3
    assert is_expert(name) and not is_sharded(name) and is_sharded("decoder.layers.1.self_attention.linear_qkv.weight")
    assert not is_expert("decoder.layers.3.mlp.router.weight")
    gate, up = torch.zeros(48, 32), torch.ones(48, 32)
    for rank in range(2):
        assert torch.equal(to_megatron(spec, name, [gate, up], rank, 2), torch.cat([gate, up]))


@pytest.mark.parametrize(
    ("part", "shape", "said"),
    [
        ("self_attention.linear_qkv.bias", None, r"layers\.0\.self_attn\..*bias does not have one parameter"),
        ("mlp.linear_fc2.weight", (31, 64), r"linear_fc2\.weight: \[31, 64\] in the model"),
        ("mlp.linear_fc1.layer_norm_weight", (32,), "post_attention_layernorm.weight does not have one parameter"),
    ],
    ids=["left over", "shape", "twice"],
)
def test_a_model_that_does_not_fit_its_folder_is_named(model_of, spec, part, shape, said):
    """A layer with one parameter less, of another shape, and under two names."""
    files = SafetensorsFolder(model_of("qwen2", **SIZES), spec)
    parameters = {}
    for name in (f"decoder.layers.0.{part}" for part in spec.layer_names):
        tensors = [files.get(n) for n in huggingface_names(spec, name)]
        parameters[name] = torch.nn.Parameter(to_megatron(spec, name, tensors, 0, 1))
    wrong = f"decoder.layers.0.{part}"
    if shape is None:
        del parameters[wrong]
    else:
        parameters[wrong] = torch.nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=said):
        load_weights(SimpleNamespace(named_parameters=parameters.items), spec, files)


# -- an SGLang server's own parameters ---------------------------------------------------------------------------------
@pytest.fixture
def numbered(model_of):
    """make(family, **options) -> (spec, its tensors, every value another one)."""

    def make(family: str, **options):
        spec = load_model_config(model_of(family, **options))
        tensors, first = {}, 1
        for name, shape in huggingface_shapes(spec).items():
            count = torch.Size(shape).numel()
            tensors[name] = torch.arange(first, first + count, dtype=torch.float64).view(shape)
            first += count
        return spec, tensors

    return make


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_is_on_a_server_rank_in_the_place_of_its_kind(numbered, server_parameters, family, tp):
    spec, tensors = numbered(family, vocab=131, tied=family == "qwen2")
    layout, ranks = server_layout(spec, tp), [server_parameters(spec, tensors, r, tp) for r in range(tp)]
    there = torch.cat([values for rank in ranks for values in rank.values()]).unique()
    assert torch.equal(there[there > 0], torch.cat([t.flatten() for t in tensors.values()]))
    assert ("lm_head.weight" in ranks[0]) == (not spec.tied)
    for rank in ranks:
        assert {name: len(values) for name, values in rank.items()} == layout.sizes
    layer, q = "model.layers.1.self_attn.", spec.num_attention_heads * spec.kv_channels
    names = [name for part in ("q", "k", "v", "qkv") if (name := f"{layer}{part}_proj.weight") in tensors]
    places, qkv = dict.fromkeys(layout.places[name][0] for name in names), [tensors[name] for name in names]
    assert list(places) == ([f"{layer}qkv_proj.weight"] if spec.served.fused else names)
    fused = torch.cat([ranks[-1][place] for place in places]).view(-1, spec.hidden_size)
    assert torch.equal(fused[: q // tp], qkv[0][:q][-q // tp :])
    assert torch.equal(fused[-1], qkv[-1][-1])
    out = tensors[f"{layer}o_proj.weight"]
    assert torch.equal(ranks[-1][f"{layer}o_proj.weight"].view(len(out), -1), out[:, -q // tp :])
    if spec.num_experts:
        experts = ranks[0]["model.layers.0.mlp.experts.w13_weight"].view(spec.num_experts, 2, 64 // tp, -1)
        assert torch.equal(experts[3, 1], tensors["model.layers.0.mlp.experts.3.up_proj.weight"][: 64 // tp])


def test_more_server_ranks_than_key_value_heads_share_them(numbered, server_parameters):
    spec, tensors = numbered("qwen3", heads=8, kv_heads=2, ffn=256)
    k, head = tensors["model.layers.0.self_attn.k_proj.weight"], spec.kv_channels
    for rank in range(4):
        fused = server_parameters(spec, tensors, rank, 4)["model.layers.0.self_attn.qkv_proj.weight"]
        fused = fused.view(-1, spec.hidden_size)
        assert torch.equal(fused[2 * head : 3 * head], k[rank // 2 * head : (rank // 2 + 1) * head])
    check_server_parallel(spec, 4, "cuda")
    for tp, device in ((4, "cpu"), (3, "cuda")):
        with pytest.raises(ValueError, match=rf"rollout\.tp: {tp} server ranks cannot .*checksums=false"):
            check_server_parallel(spec, tp, device)
