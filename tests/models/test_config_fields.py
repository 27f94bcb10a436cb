"""Every field of config.json is implemented, known to be harmless, or refused by name."""

import json
import shutil

import pytest
import torch
from config_files import refusal, write
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from dynamo_megatron.models import FAMILIES, load_model_config
from dynamo_megatron.models.config_fields import HARMLESS, HARMLESS_AS
from dynamo_megatron.models.published import PUBLISHED

# Other families -> the field that is named where someone writes model_type llama into the file.
OTHERS = {
    "cohere": "layer_norm_eps",
    "deepseek_v3": "first_k_dense_replace",
    "gemma2": "attn_logit_softcapping",
    "glm4": "attention_bias",
    "gpt_oss": "attention_bias",
    "gemma3_text": "hidden_activation",
    "granite": "attention_multiplier",
    "mixtral": "num_experts_per_tok",
    "olmo3": "sliding_window",
    "phi3": "original_max_position_embeddings",
    "qwen2_moe": "decoder_sparse_step",
    "smollm3": "no_rope_layer_interval",
}


def plain(config):
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_accepted(tmp_path, name):
    config = PUBLISHED[name]["config"]
    load_model_config(write(tmp_path, config))
    # and as transformers 5 writes them, with every field that it knows
    write(tmp_path, plain(AutoConfig.from_pretrained(tmp_path)))
    if config["model_type"] == "olmo3":  # SGLang would read no RoPE from it
        assert "/config.json: rope_parameters, rope_theta, rope_scaling: " in refusal(load_model_config, tmp_path)
    else:
        load_model_config(tmp_path)


@pytest.mark.parametrize("model_type", OTHERS)
def test_another_family_is_refused_whatever_model_family_says(tmp_path, model_type):
    config = plain(CONFIG_MAPPING[model_type]())
    folder = write(tmp_path, config)
    own = {None, model_type} if model_type in FAMILIES else set()
    for family in {None, *FAMILIES} - own:
        message = refusal(load_model_config, folder, family)
        assert f"/config.json: model_type '{model_type}' is " in message and "model.family" in message
    message = refusal(load_model_config, write(tmp_path, config | {"model_type": "llama"}))
    assert f"/config.json: {OTHERS[model_type]}: " in message


VALUES = {
    **dict.fromkeys(("_attn_implementation", "attn_implementation"), "eager"),
    **dict.fromkeys(("dtype", "torch_dtype"), "float32"),
    **dict.fromkeys(("initializer_range", "router_aux_loss_coef"), 0.5),
    **dict.fromkeys(("output_hidden_states", "output_router_logits", "return_dict"), True),
    "cache_implementation": "hybrid",
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "output_attentions": False,
    "problem_type": "regression",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_harmless_fields_leave_the_logits_unchanged(model_of, tmp_path, family):
    """Each with a value that is not the default."""
    folder = model_of(family)
    config = json.loads((folder / "config.json").read_text())
    values = {field: True if isinstance(config.get(field), bool) else 3 for field in HARMLESS} | VALUES
    changed = shutil.copytree(folder, tmp_path / "changed")
    write(changed, HARMLESS_AS | config | {k: v for k, v in values.items() if config.get(k) != v})
    load_model_config(changed)
    tokens = torch.arange(5, 105)[None]
    plain, other = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(tokens) for f in (folder, changed))
    torch.testing.assert_close(other.logits, plain.logits, atol=1e-4, rtol=0)
