"""config.json -> ModelSpec: what is read, and everything else refused by name."""

import json
import math
from dataclasses import replace

import pytest
from config_files import refusal, write
from transformers import AutoConfig

from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.models.server_layout import check_served

WINDOW = {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}
QWEN2 = PUBLISHED["Qwen2.5-1.5B"]["config"] | WINDOW | {"max_position_embeddings": 32768}  # the instruct model's
QWEN3_MOE = PUBLISHED["Qwen3-30B-A3B"]["config"] | WINDOW
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {k: v for k, v in QWEN2.items() if k not in WINDOW}
LLAMA |= {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "rope_scaling": LLAMA3_ROPE}


def test_the_fields_of_a_spec(tmp_path):
    spec = load_model_config(write(tmp_path, QWEN2))
    assert (spec.num_layers, spec.hidden_size, spec.ffn_hidden_size) == (28, 1536, 8960)
    assert (spec.num_attention_heads, spec.num_query_groups, spec.kv_channels) == (12, 2, 128)
    assert (spec.vocab_size, spec.max_positions, spec.norm_eps, spec.rope_theta) == (151936, 32768, 1e-6, 1e6)
    assert spec.tied and spec.qkv_bias and not spec.qk_norm and spec.rope_scaling == ()
    assert [replace(spec, vocab_size=129).padded_vocab(tp) for tp in (1, 2, 4, 8)] == [144, 160, 192, 256]
    spec = load_model_config(write(tmp_path, QWEN3_MOE))
    assert spec.kv_channels == 128 != spec.hidden_size // spec.num_attention_heads
    assert spec.qk_norm and not spec.qkv_bias
    assert (spec.num_experts, spec.router_topk, spec.moe_ffn_hidden_size, spec.norm_topk_prob) == (128, 8, 768, True)
    assert list(spec.experts_of(3, 8)) == list(range(48, 64))


@pytest.mark.parametrize("config", [QWEN2, LLAMA, QWEN3_MOE], ids=["qwen2", "llama", "qwen3_moe"])
def test_a_file_that_transformers_5_rewrites_reads_the_same(tmp_path, config):
    old = load_model_config(write(tmp_path, config))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "new")
    assert "rope_parameters" in json.loads((tmp_path / "new/config.json").read_text())
    assert load_model_config(tmp_path / "new") == old


MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
TWO_ROPES = {kind: {"rope_theta": 1e6, "rope_type": "default"} for kind in ("full_attention", "sliding_attention")}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, []),
        (MISTRAL | {"sliding_window": 4096}, [4096] * 28),
        # transformers' Mistral reads the window alone, whatever a Qwen's fields beside it have
        (MISTRAL | {"sliding_window": 9, "use_sliding_window": False, "max_window_layers": 28}, [9] * 28),
        (QWEN2 | {"use_sliding_window": True}, [0] * 21 + [32768] * 7),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, [32768] * 28),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 28}, []),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None}, []),
        (LLAMA | {"model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": None}, ([4096] * 3 + [0]) * 7),
    ],
)
def test_the_windows_of_a_config_are_those_that_transformers_applies(tmp_path, config, windows):
    config = {key: value for key, value in config.items() if key != "mlp_bias"}
    assert load_model_config(write(tmp_path, config)).dimensions()["windows"] == windows
    theirs = AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 28)
    assert [(theirs.sliding_window or 0) * (kind == "sliding_attention") for kind in kinds] == (windows or [0] * 28)


def test_gemma_270m(tmp_path):
    config = PUBLISHED["gemma-3-270m"]["config"]
    spec = load_model_config(write(tmp_path, config))
    assert (spec.kv_channels, spec.attention_scale, spec.embedding_scale) == (256, 1 / 16, 640**0.5)
    assert (spec.rope_theta, spec.local_rope_theta, spec.windows.count(512), spec.tied) == (1e6, 1e4, 15, True)
    older = {k: v for k, v in config.items() if k != "layer_types"} | {"sliding_window_pattern": 6}  # as the 1B's
    assert load_model_config(write(tmp_path, older)) == spec


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("phi3", {"rms_norm_eps": None}, "rms_norm_eps: missing"),
        ("phi3", {"rope_scaling": LONGROPE}, "rope_type: 'longrope'"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor: 0.75"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv: 8.0"),
        ("glm4", {"attention_bias": None}, "attention_bias: missing"),
        ("glm4", {"partial_rotary_factor": 1.0}, "partial_rotary_factor: 1.0 is not supported, only 0.5"),
        ("glm4", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type: 'linear'"),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers: [1, 1, 0] is not a list"),
        ("smollm3", {"no_rope_layers": [2] * 28}, "no_rope_layers: [2, 2"),
        ("smollm3", {"rope_theta": None}, "rope_theta"),
        ("smollm3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type: 'yarn'"),
        ("granite", {"logits_scaling": 0}, "logits_scaling: 0"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling: 8.0 is not supported"),
        ("olmo3", {"rope_theta": 1e6}, "rope_theta: a model with 1000000.0 cannot be served"),
        ("olmo3", {"rope_theta": None, "rope_parameters": TWO_ROPES}, "write the values of rope_parameters' full_att"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation: 'gelu'"),
        ("gemma3_text", {"hidden_act": "silu"}, "hidden_act: 'silu'"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window: missing"),
        ("olmo3", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "rope_scaling, which has a rope_type"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_type: 'linear'"),
        ("gemma3_text", {"rope_parameters": TWO_ROPES}, "rope_theta: given beside rope_parameters"),
        ("gemma3_text", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, "is not a set with rope_theta"),
    ],
)
def test_what_a_family_does_not_do(tmp_path, family, changes, named):
    plain = {k: v for k, v in LLAMA.items() if k not in ("rope_scaling", "mlp_bias")} | {"model_type": family}
    plain |= {"olmo3": {"rope_theta": 5e5}, "gemma3_text": PUBLISHED["gemma-3-270m"]["config"]}.get(family, {})
    if family == "gemma3_text":
        del plain["hidden_act"]
    assert load_model_config(write(tmp_path, plain)).family == family
    assert named in refusal(load_model_config, write(tmp_path, plain | changes))


def test_the_family_cannot_be_another_than_the_files(tmp_path):
    message = refusal(load_model_config, write(tmp_path, LLAMA), "qwen3")
    assert "model_type 'llama' is of family llama, model.family is 'qwen3'" in message


README_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # Qwen2.5's
NEW_STYLE = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
NEW_STYLE["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}


def test_yarn(tmp_path):
    spec = load_model_config(write(tmp_path, QWEN2 | {"rope_scaling": README_YARN}))
    assert spec.rope_theta == 1e6
    full = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    full |= {"beta_slow": 1.0, "beta_fast": 32.0, "truncate": True}
    assert dict(spec.rope_scaling) == full
    new = NEW_STYLE | {"rope_parameters": {"rope_theta": 1e6, **full, "attention_factor": 0.1 * math.log(4) + 1}}
    assert load_model_config(write(tmp_path, new)) == spec
    assert json.loads(json.dumps(spec.dimensions())) == spec.dimensions()


YARN_FIELDS = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # What was trained as another model without a word: the two sets were merged.
        ({"rope_scaling": README_YARN}, "rope_scaling: contradicts rope_parameters"),
        ({"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "'mrope'"),
        ({"rope_theta": 0}, "rope_theta: 0 contradicts the 1000000.0 in rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta: 1.0 is not above 1"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor: 0"),
        ({"rope_parameters": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "type 'linear' contradicts"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor: not a parameter of rope_type"),
        ({"rope_parameters": YARN_FIELDS | {"factor": 0.5}}, "factor: 0.5"),
        ({"rope_parameters": YARN_FIELDS | {"factor": None}}, "factor: null"),
        ({"rope_parameters": YARN_FIELDS | {"beta_fast": 0.5}}, "beta_fast: 0.5 is not above beta_slow 1.0"),
        ({"rope_parameters": YARN_FIELDS | {"mscale": 1.0}}, "mscale: not a parameter of rope_type 'yarn'"),
        ({"rope_parameters": YARN_FIELDS | {"attention_factor": 1.0}}, "attention_factor: 1.0 is not the 1.13863"),
        ({"original_max_position_embeddings": 4096}, "original_max_position_embeddings: 4096 is not supported"),
    ],
)
def test_rope_parameters_that_are_refused(tmp_path, changes, named):
    assert named in refusal(load_model_config, write(tmp_path, NEW_STYLE | changes))


def test_what_sglang_would_ignore_is_not_served(tmp_path):
    check_served(load_model_config(write(tmp_path, QWEN2 | {"rope_scaling": README_YARN})), 32768)
    olmo2 = {k: v for k, v in LLAMA.items() if k not in ("rope_scaling", "mlp_bias")} | {"model_type": "olmo2"}
    check_served(load_model_config(write(tmp_path, olmo2)), 32768)
    assert "head_dim" in refusal(check_served, load_model_config(write(tmp_path, olmo2 | {"head_dim": 64})), 9)
    windowed = load_model_config(write(tmp_path, MISTRAL | {"sliding_window": 4096}))
    check_served(windowed, 4096)
    assert "set model.max_length to 4096 or less" in refusal(check_served, windowed, 4097)
    check_served(load_model_config(write(tmp_path, PUBLISHED["gemma-3-270m"]["config"])), 32768)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (QWEN2 | {"model_type": "qwen2_moe"}, ["model_type", "qwen2_moe", "llama, mistral, qwen2"]),
        ({k: v for k, v in QWEN2.items() if k != "model_type"}, ["model_type", "None"]),
        (QWEN2 | {"architectures": ["Qwen2ForRewardModel"]}, ["architectures", "Qwen2ForRewardModel"]),
        (QWEN2 | {"attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        (QWEN2 | {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, ["auto_map"]),
        ({k: v for k, v in QWEN2.items() if k != "num_key_value_heads"}, ["num_key_value_heads", "missing"]),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, ["sliding_window", "missing"]),
        (MISTRAL | {"sliding_window": 4096, "layer_types": ["full_attention"] * 28}, ["layer_types"]),
        (QWEN3_MOE | {"use_sliding_window": True, "max_window_layers": 48}, ["use_sliding_window"]),
        (QWEN2 | {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (QWEN2 | {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers", "-1"]),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 28}, ["layer_types", "use_sliding_window"]),
        (QWEN2 | {"layer_types": ["full_attention", "chunked_attention"] * 14}, ["layer_types", "chunked_attention"]),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        (LLAMA | {"sliding_window": 4096}, ["sliding_window"]),
        (LLAMA | {"attention_bias": True}, ["attention_bias"]),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, ["high_freq_factor", "4.0"]),
        (QWEN2 | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
        (QWEN2 | {"hidden_size": "1536"}, ["hidden_size", "1536"]),
        (QWEN2 | {"rms_norm_eps": -1.0}, ["rms_norm_eps"]),
        (QWEN2 | {"tie_word_embeddings": "no"}, ["tie_word_embeddings"]),
        (QWEN2 | {"num_key_value_heads": 5}, ["num_key_value_heads", "5", "12"]),
        (QWEN2 | {"hidden_size": 1537}, ["hidden_size", "head_dim"]),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, ["mlp_only_layers", "[0]"]),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, ["decoder_sparse_step", "2"]),
        (QWEN3_MOE | {"num_experts": None}, ["num_local_experts", "missing"]),
        ("{", ["JSON"]),
        ("[]", ["JSON object"]),
    ],
)
def test_what_cannot_be_mapped_is_named(tmp_path, config, named):
    message = refusal(load_model_config, write(tmp_path, config))
    assert str(tmp_path / "config.json") in message
    assert all(word in message for word in named), message


def test_missing_folder_and_file(tmp_path):
    assert "no such folder" in refusal(load_model_config, tmp_path / "nowhere")
    assert "config.json" in refusal(load_model_config, tmp_path)


@pytest.mark.parametrize(
    ("config", "layout", "said"),
    [
        (QWEN2, {"tp": 2, "pp": 4, "vpp": 7}, None),
        (QWEN2, {"tp": 4}, "parallel.tp: 4 does not divide the 2 (key/value heads); use one of 1, 2"),
        (QWEN2, {"pp": 3}, "parallel.pp: 3 does not divide the 28 layers; use one of 1, 2, 4, 7, 14, 28, or "),
        (QWEN2, {"pp": 3}, "parallel.last_stage_layers=10"),
        (QWEN2, {"pp": 3, "last_stage_layers": 8, "vpp": 2}, None),
        (
            QWEN2,
            {"pp": 3, "last_stage_layers": 9},
            "9 leaves 19 of 28 layers for 2 equal stages of 1 equal chunks; use",
        ),
        (QWEN2, {"pp": 4, "last_stage_layers": 1, "vpp": 3}, "vpp: 3 does not divide the 1 layers of a stage"),
        (QWEN2, {"pp": 4, "vpp": 2}, "parallel.vpp: 2 does not divide the 7 layers of a stage; use one of 1, 7"),
        (QWEN2, {"ep": 2}, "has no experts"),
        (QWEN3_MOE | {"moe_intermediate_size": 7, "intermediate_size": 7}, {"tp": 4, "pp": 2, "ep": 8}, None),
        (QWEN3_MOE, {"ep": 3}, "parallel.ep: 3 does not divide the 128 experts; use one of 1, 2, 4"),
    ],
)
def test_check_parallel(tmp_path, config, layout, said):
    spec, parallel = load_model_config(write(tmp_path, config)), ParallelConfig(**layout)
    if said is None:
        return spec.check_parallel(parallel)
    assert said in refusal(spec.check_parallel, parallel)
