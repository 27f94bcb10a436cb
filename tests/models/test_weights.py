import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dynamo_megatron.models import SafetensorsFolder, load_model_config, load_weights, named_huggingface_tensors
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


def test_megatron_against_transformers(tiny_model, tmp_path):
    """Two ranks run the real GPTModel: logits equal transformers' at tp 1 and 2, weights come back bit-equal."""
    folders = []
    for family in ("llama", "qwen2", "qwen3"):
        for tied in (False, True):
            arguments = {"head_dim": 24} if family == "qwen3" else {}
            folders.append(tiny_model(family, tied=tied, vocab=104, **arguments))
    scaled = shutil.copytree(folders[0], tmp_path / "llama3_rope")
    config = json.loads((scaled / "config.json").read_text())
    config["rope_parameters"] |= {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (scaled / "config.json").write_text(json.dumps(config))
    job = [sys.executable, "-P", str(Path(__file__).with_name("parity_job.py")), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*job, *map(str, [*folders, scaled])],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=(tmp_path / f"rank{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    assert len(re.findall("PARITY", logs[0])) == 7 * 3, logs[0]
