"""What config.json says against what Megatron would build of it, field by field."""

import json
from dataclasses import replace

import pytest

from dynamo_megatron.models import load_model_config

SIZES = {"vocab": 104, "hidden": 32, "ffn": 64}


@pytest.mark.parametrize(
    ("family", "mistake", "said"),
    [
        ("qwen2", {"qkv_bias": False}, "biases of q, k, v: True, Megatron: False"),
        ("qwen3", {"qk_norm": False}, "norms of q, k: True, Megatron: False"),
        ("qwen3", {"vocab_size": 128}, "vocab_size: 104, Megatron: 128"),
        ("qwen3", {"tied": True}, "tie_word_embeddings: False, Megatron: True"),
        ("llama", {"rope_theta": 5e5}, "RoPE frequency 3: 0.001, Megatron: 5.3183e-05"),
        ("llama", {"rope_scaling": (("rope_type", "linear"), ("factor", 2.0))}, "RoPE frequency 0: 1, Megatron: 0.5"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: True, Megatron: False"),
    ],
)
def test_config_differences(tiny_model, family, mistake, said):
    from dynamo_megatron.policy.config_check import config_differences  # Megatron: once the backend is set up

    folder = tiny_model(family, **SIZES)
    config, spec = json.loads((folder / "config.json").read_text()), load_model_config(folder)
    assert config_differences(config, spec) == []
    assert config_differences(config, replace(spec, **mistake)) == [said]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"factor": 2.0}, ["RoPE frequency ", "softmax scale: "]),
        ({"original_max_position_embeddings": 32}, ["RoPE frequency "]),
        ({"truncate": False}, ["RoPE frequency "]),
        ({"attention_factor": 1.0}, ["softmax scale: "]),
    ],
)
def test_differences_of_a_scaled_rope(tiny_model, tmp_path, mistake, said):
    from dynamo_megatron.policy.config_check import config_differences  # Megatron: once the backend is set up

    config = json.loads((tiny_model("llama", **SIZES) / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_model_config(tmp_path)
    assert config_differences(config, spec) == []
    mistaken = {**dict(spec.rope_scaling), **mistake}
    found = config_differences(config, replace(spec, rope_scaling=tuple(mistaken.items())))
    assert len(found) == len(said) and all(line.startswith(start) for line, start in zip(found, said, strict=True))
