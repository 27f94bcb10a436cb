"""Whatever config.json has for RoPE: transformers' frequencies, or a refusal in one line."""

import json
import random

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.spec import scaled_frequencies

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
TYPES = ["default", "linear", "llama3", "yarn", "dynamic", "longrope", "mrope", None]
VALUES = {
    "rope_theta": [0, None, 500, 1e4, 1e6],
    "partial_rotary_factor": [None, 0, 0.5, 1.0],
    "factor": [None, 0.5, 1, 2, 4.0],
    "original_max_position_embeddings": [None, 0, 32, 128],
    "low_freq_factor": [0, 0.5, 1.0, 4],
    "high_freq_factor": [1.0, 4, 8.0],
    "beta_fast": [None, 0, 0.5, 4.0, 32],
    "beta_slow": [None, 0, 0.5, 2],
    "truncate": [None, True, False],
    "attention_factor": [None, 0.5, 1.0, 1.2],
    "mscale": [None, 0, 0.7, 1.0],
    "mscale_all_dim": [None, 0, 1.0, 1.5],
    "mrope_section": [[2, 3, 3]],
}
# What a rope_type needs, so that many of the drawn configs are accepted.
LIKELY = {
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
    "yarn": ["factor"],
}


def drawn_config(draw):
    def part():
        kind = draw.choice(TYPES + 3 * ["linear", "llama3", "yarn"])
        names = LIKELY.get(kind, []) + draw.sample(list(VALUES), draw.randrange(4))
        parameters = {name: draw.choice(VALUES[name]) for name in names}
        return parameters | {draw.choice(["rope_type", "type"]): kind}

    keys = draw.choice([[], ["rope_scaling"], ["rope_parameters"], ["rope_scaling", "rope_parameters"]])
    config = LLAMA | {key: part() for key in keys}
    if draw.random() < 0.5:
        config["rope_theta"] = draw.choice(VALUES["rope_theta"])
    return config


def test_transformers_frequencies_or_a_refusal(tmp_path):
    draw, accepted = random.Random(0), []
    for _ in range(1000):
        config = drawn_config(draw)
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            spec = load_model_config(tmp_path)
        except ValueError as error:
            assert "\n" not in str(error)
            continue
        theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
        if spec.rope_scaling:
            frequencies, factor = scaled_frequencies(spec)
        else:
            frequencies, factor = spec.rope_theta ** -(torch.arange(0, 16, 2) / 16), 1.0
        torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0, msg=str(config))
        assert abs(factor - theirs.attention_scaling) < 1e-6, config
        accepted.append(dict(spec.rope_scaling).get("rope_type"))
    assert min(accepted.count(kind) for kind in (None, "linear", "llama3", "yarn")) > 10
