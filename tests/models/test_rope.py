"""Whatever config.json has for RoPE: transformers' frequencies, or a refusal in one line."""

import random

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dynamo_megatron.models import FAMILIES
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
VALUES = {
    "rope_theta": [0, None, 500, 1e6],
    "partial_rotary_factor": [None, 0, 0.5, 1.0],
    "factor": [None, 0.5, 1, 4.0],
    "original_max_position_embeddings": [None, 0, 32, 128],
    "low_freq_factor": [0, 0.5, 4],
    "high_freq_factor": [1.0, 4, 8.0],
    "beta_fast": [None, 0, 4.0, 32],
    "beta_slow": [None, 0, 0.5, 2],
    "truncate": [None, True, False],
    "attention_factor": [None, 1.0, 1.2],
}
# What a rope_type needs, so that many of the drawn configs are accepted.
LIKELY = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"], "yarn": ["factor"]}


def drawn_config(draw):
    def part():
        kind = draw.choice([None, "default", "dynamic", *LIKELY, *LIKELY, *LIKELY])
        names = LIKELY.get(kind, []) + draw.sample(list(VALUES), draw.randrange(4))
        return {name: draw.choice(VALUES[name]) for name in names} | {draw.choice(["rope_type", "type"]): kind}

    keys = draw.choice([[], ["rope_scaling"], ["rope_parameters"], ["rope_scaling", "rope_parameters"]])
    config = LLAMA | {key: part() for key in keys}
    return config | ({"rope_theta": draw.choice(VALUES["rope_theta"])} if draw.random() < 0.5 else {})


def test_transformers_frequencies_or_a_refusal():
    draw, accepted = random.Random(0), []
    for _ in range(800):
        config = drawn_config(draw)
        try:
            spec = FAMILIES["llama"].read(config)
        except ValueError as error:
            assert "\n" not in str(error)
            continue
        theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
        frequencies, factor = spec.rope_theta ** -(torch.arange(0, 16, 2) / 16), 1.0
        if spec.rope_scaling:
            frequencies, factor = scaled_frequencies(spec)
        torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0, msg=str(config))
        assert abs(factor - theirs.attention_scaling) < 1e-6, config
        accepted.append(dict(spec.rope_scaling).get("rope_type"))
    assert min(accepted.count(kind) for kind in (None, *LIKELY)) > 5
