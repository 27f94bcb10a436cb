import pytest
import torch
from safetensors.torch import load_file
from whole_tensors import named_huggingface_tensors

from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder
from dynamo_megatron.checkpoint.weights import load_weights
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.mapping import huggingface_names, to_megatron

LAYER_1 = "decoder.layers.0."  # the stage's first layer is the model's second


def make_stage(parameters):
    """A module with the given {dotted name: shape}, filled with NaN."""
    stage = torch.nn.Module()
    for name, shape in parameters.items():
        *path, leaf = name.split(".")
        inner = stage
        for part in path:
            if part not in dict(inner.named_children()):
                inner.add_module(part, torch.nn.Module())
            inner = inner.get_submodule(part)
        inner.register_parameter(leaf, torch.nn.Parameter(torch.full(shape, float("nan"))))
    return stage


def last_stage(spec, rename=()):
    """{name: shape} of the last layer, the final norm and the head, unsharded."""
    names = {LAYER_1 + part: f"decoder.layers.1.{part}" for part in spec.layer_names}
    names |= {name: name for name in ("decoder.final_layernorm.weight", "output_layer.weight")}
    return {dict(rename).get(local, local): name for local, name in names.items()}


@pytest.fixture
def opened(tiny_model):
    folder = tiny_model("qwen2", dtype="bfloat16", tied=True)
    spec = load_model_config(folder)
    with SafetensorsFolder(folder, spec) as files:
        yield spec, files, load_file(folder / "model.safetensors")


def shapes(spec, source, names):
    return {
        local: to_megatron(spec, name, [source[part] for part in huggingface_names(spec, name)], 0, 1).shape
        for local, name in names.items()
    }


def test_last_stage_of_a_tied_model(opened):
    """The head is a copy of the embedding, which this stage must be given but must not give back."""
    spec, files, source = opened
    stage = make_stage(shapes(spec, source, last_stage(spec)))
    load_weights(stage, spec, files, layer_offset=1)
    assert torch.equal(stage.get_parameter("output_layer.weight"), source["model.embed_tokens.weight"].float())
    back = dict(named_huggingface_tensors(stage, spec, layer_offset=1))
    assert back.keys() == {n for n in source if n.startswith("model.layers.1.")} | {"model.norm.weight"}
    assert all(t.dtype == torch.float32 and torch.equal(t, source[n].float()) for n, t in back.items())


def test_transformer_engine_stage(opened):
    spec, files, source = opened
    fused = {
        LAYER_1 + "input_layernorm.weight": LAYER_1 + "self_attention.linear_qkv.layer_norm_weight",
        LAYER_1 + "pre_mlp_layernorm.weight": LAYER_1 + "mlp.linear_fc1.layer_norm_weight",
    }
    stage = make_stage(shapes(spec, source, last_stage(spec, fused)))
    load_weights(stage, spec, files, layer_offset=1)
    norm = stage.get_parameter(LAYER_1 + "mlp.linear_fc1.layer_norm_weight")
    assert torch.equal(norm, source["model.layers.1.post_attention_layernorm.weight"].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update({"value_head.weight": (1, 64)}), r"value_head\.weight: not a parameter"),
        (
            lambda s: s.update({"decoder.final_layernorm.weight": (63,)}),
            r"final_layernorm\.weight: \[63\] in the model",
        ),
        (lambda s: s.pop(LAYER_1 + "self_attention.linear_qkv.bias"), r"layers\.1\.self_attn\..*bias has no parameter"),
        (
            lambda s: s.update({LAYER_1 + "mlp.linear_fc1.layer_norm_weight": (64,)}),
            r"layer_norm_weight: made of .*, which decoder\.layers\.1\.pre_mlp_layernorm\.weight has taken",
        ),
    ],
    ids=["unknown", "shape", "left over", "twice"],
)
def test_a_model_that_does_not_fit_is_named(opened, change, message):
    spec, files, source = opened
    parameters = shapes(spec, source, last_stage(spec))
    change(parameters)
    with pytest.raises(ValueError, match=message):
        load_weights(make_stage(parameters), spec, files, layer_offset=1)
