"""docs/limits.md: what the page promises as an answer is what the program says."""

import json

import pytest

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.models import load_model_config

KEYS = {
    "model.dtype=float16": "model.dtype: 'float16' needs loss scaling",
    "model.lora.rank=8": "unknown key model.lora",
    "algorithm.advantage.kind=gae": "algorithm.advantage.kind: 'gae' is unknown",
    "model.router_aux_loss_coef=0.01": "model.router_aux_loss_coef: 0.01: the policy loss is normalised over the "
    "mini-batch",
    "algorithm.kl.where=reward": "algorithm.kl.where: Input should be 'loss'",
    "optimizer.kind=muon": "unknown key optimizer.kind",
    "tracking.backends=[comet]": "tracking.backends: 'comet' is unknown; give jsonl",
    "rollout.top_p=0.9": "top_p: training needs 1.0",
    "rollout.top_k=20": "unknown key rollout.top_k",
    "rollout.mode=async": "rollout.mode: Input should be 'sync'",
    "rollout.engine=vllm": "rollout.engine: Input should be 'sglang' or 'recorded'",
    "rollout.quantization=int4": "rollout.quantization: Input should be 'fp8'",
    "rollout.max_turns=4": "unknown key rollout.max_turns",
}
MODELS = {  # what is put into a config.json: the answer
    '{"model_type": "gemma3_text"}': "model_type 'gemma3_text' is not",
    '{"model_type": "qwen2_5_vl"}': "model_type 'qwen2_5_vl' is not",
    '{"rope_scaling": {"rope_type": "longrope", "factor": 4.0}, "rope_parameters": null}': "rope_type: 'longrope' is "
    "not supported",
    '{"partial_rotary_factor": 0.5}': "partial_rotary_factor:",
    '{"use_sliding_window": true, "sliding_window": 64, "max_window_layers": 0, "layer_types": null}': (
        "attention other than full attention in every layer is not supported"
    ),
    '{"hidden_act": "gelu"}': "hidden_act: 'gelu' is not supported",
    '{"quantization_config": {"bits": 4}}': "quantization_config: a quantised checkpoint cannot be trained",
}


@pytest.mark.parametrize("key", KEYS)
def test_keys(key):
    defaults = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o"}
    with pytest.raises(ConfigError) as error:
        compose([], [key], defaults)
    assert KEYS[key] in str(error.value)


@pytest.mark.parametrize("change", MODELS)
def test_models(tiny_model, tmp_path, change):
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | json.loads(change)))
    with pytest.raises(ValueError) as error:
        load_model_config(tmp_path)
    assert MODELS[change] in str(error.value)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
def test_a_bias_in_the_attention(tiny_model, tmp_path, family):
    config = json.loads((tiny_model / "config.json").read_text())
    config |= {"model_type": family.removesuffix("ForCausalLM").lower(), "architectures": [family]}
    config["sliding_window"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(ValueError, match="attention_bias: true is not supported"):
        load_model_config(tmp_path)


def test_weights_that_are_not_safetensors(tiny_model, tmp_path):
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(ValueError, match="save the model as safetensors"),
        open_weights(tmp_path, load_model_config(tmp_path)),
    ):
        pass
