"""What a model of Megatron-Bridge is refused for, as far as that needs no Bridge."""

import importlib.metadata
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dynamo_megatron.bridge.environment import PINS, check_versions
from dynamo_megatron.checkpoint.folder import METADATA_FILE, write_manifest
from dynamo_megatron.checkpoint.weights import load_bridged, load_folder
from dynamo_megatron.cli import main
from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.start_checks import check_layout
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.bridged import LAYERS, PROBE, differing_field, shrink
from dynamo_megatron.models.fp8 import sent_bytes
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.models.server_layout import check_served

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "norm_topk_prob": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}


def test_a_small_model_keeps_every_switch():
    small = shrink(CONFIG, CONFIG)
    assert small["rope_scaling"] == CONFIG["rope_scaling"] and small["norm_topk_prob"] is True
    assert small["num_hidden_layers"] > small["first_k_dense_replace"] > 0
    assert small["moe_intermediate_size"] < small["hidden_size"] < small["intermediate_size"] < 200
    assert small["num_key_value_heads"] == small["num_attention_heads"] == 4
    assert small["topk_group"] < small["n_group"] and small["n_routed_experts"] % small["n_group"] == 0
    assert small["num_experts_per_tok"] / small["topk_group"] == 2  # as in the whole model
    assert small["num_experts_per_tok"] <= small["topk_group"] * small["n_routed_experts"] // small["n_group"]
    assert small["max_position_embeddings"] < PROBE


def test_a_list_of_kinds_of_layers_is_kept_whole():
    """A constant of Bridge's may agree with its beginning."""
    mixed = {**CONFIG, "layer_types": ["sliding_attention"] * 28 + ["full_attention"] * 33}
    assert shrink(mixed, mixed)["layer_types"] == mixed["layer_types"]
    linear = {**CONFIG, "layer_types": (["linear_attention"] * 9 + ["full_attention"]) * 6 + ["linear_attention"]}
    assert shrink(linear, linear)["layer_types"] == linear["layer_types"][:10]  # each kind once
    uniform = {**CONFIG, "layer_types": ["full_attention"] * 61}
    assert shrink(uniform, uniform)["layer_types"] == ["full_attention"] * LAYERS


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda c: c.get("clip") == 1, "clip: 1"),
        (lambda c: c["rope"].get("limit") == 64, "rope: {'rope_type': 'yarn', 'limit': 64}"),
        (lambda c: c.get("clip") == 1 or c["bias"], "bias: True, clip: 1"),
        (lambda c: True, None),
    ],
)
def test_the_field_that_makes_the_difference_is_named(wrong, found):
    config = {"width": 64, "bias": True, "clip": 1, "rope": {"rope_type": "yarn", "limit": 64}, "torch_dtype": "x"}
    defaults = {"width": 64, "bias": False, "rope": {"rope_type": "yarn", "limit": 4096}}
    assert differing_field(config, defaults, lambda c: not wrong(c)) == found


def toy_model(export=lambda w: w, load=lambda w: w):
    """Two parameters of one module, and Bridge's mappings of the first, or of both where `load` gives a value."""
    model = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(model.weight, torch.nan)
    torch.nn.init.constant_(model.bias, torch.nan)
    parameters = {n: p for n, p in model.named_parameters() if n == "weight" or load(p) is not None}
    model.pg_collection = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0))
    model.units = {n: SimpleNamespace(names=[f"hf.{n}"], parts=[(None, None, p)]) for n, p in parameters.items()}
    model.convert = lambda name, tensors: [load(tensors[f"hf.{name}"])]
    model.export = lambda name: {f"hf.{name}": export(parameters[name])}
    return model


STATE = {"hf.weight": torch.arange(6.0).view(3, 2), "hf.bias": torch.ones(3)}


@pytest.mark.parametrize(
    ("model", "bias", "why"),
    [
        (toy_model(load=lambda w: w.flip(0)), 1.0, "hf.weight: what Bridge writes back is not what it read"),
        (toy_model(export=lambda w: w.transpose(0, -1)), 1.0, "hf.weight: what Bridge writes back is not what it read"),
        (toy_model(load=lambda w: w if w.ndim == 2 else None), 1.0, "parameter bias was not loaded"),
        (toy_model(load=lambda w: w.transpose(0, -1)), 1.0, r"weight: \[3, 2\] in the model, \[2, 3\] from the folder"),
        (toy_model(), torch.nan, "hf.bias: what Bridge writes .* or it holds NaN"),
    ],
)
def test_a_wrong_model_is_refused(model, bias, why):
    with pytest.raises(InputError, match=why):
        load_bridged(model, {**STATE, "hf.bias": torch.full((3,), bias)}.__getitem__)


@pytest.mark.parametrize(("extra", "ends"), [("model.y", "$"), ("model.layers.61.x", "; leave those of multi-")])
def test_a_tensor_without_a_place_is_refused(tmp_path, extra, ends):
    save_file({**STATE, extra: torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = load_model_config(tmp_path, source="bridge")
    with pytest.raises(InputError, match=f"1 tensors have no place in Bridge's model, the first: {extra}{ends}"):
        load_folder([toy_model()], spec, str(tmp_path), SimpleNamespace(gather=lambda value: [value]))


@pytest.fixture
def folder(tmp_path):
    save_file({"lm_head.weight": torch.ones(4, 2), "model.x.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    return tmp_path


def test_names_and_shapes_are_the_folders(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = load_model_config(folder, source="bridge")
    assert huggingface_shapes(spec) == {"lm_head.weight": (4, 2), "model.x.weight": (2,)}
    assert (spec.family, spec.num_experts, spec.tied) == ("bridge:deepseek_v3", 256, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nextn_predict_layers": 1},
        {"quantization_config": 1},
        {"model_type": "unknown"},
        {"attention_dropout": "much"},
        {"partial_rotary_factor": 0.5, "model_type": "llama"},
        {"dual_chunk_attention_config": {"chunk_size": 8}, "model_type": "qwen2"},
    ],
)
def test_what_cannot_be_trained_is_refused(folder, changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(InputError, match=next(iter(changes))):
        load_model_config(folder, source="bridge")


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("mistral", {}, [4096] * 61),  # transformers' default
        ("mistral", {"sliding_window": None, "partial_rotary_factor": 1.0}, []),
        ("qwen2", {"sliding_window": 128}, []),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 60}, [0] * 60 + [128]),
        ("glm4_moe", {"sliding_window": 128, "partial_rotary_factor": 0.5}, []),  # it has none
        ("gpt_oss", {}, [128, 0] * 30 + [128]),
    ],
)
def test_windows_that_sglang_ignores_are_not_served(folder, kind, changes, windows):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": kind, **changes}))
    spec = load_model_config(folder, source="bridge")
    assert spec.dimensions()["windows"] == windows
    if not windows or kind == "gpt_oss":
        return check_served(spec, 9999)
    with pytest.raises(InputError, match="SGLang ignores this model's window"):
        check_served(spec, 9999)


@pytest.mark.parametrize("here", ["0.16.1", "not installed"])
@pytest.mark.parametrize("package", PINS)
def test_another_environment_is_refused(monkeypatch, package, here):
    def version(name):
        if name == package and here == "not installed":
            raise importlib.metadata.PackageNotFoundError
        return here if name == package else PINS[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    why = rf"^model\.source: bridge needs {package} {PINS[package]}, here: {here}; `make bridge` sets up "
    with pytest.raises(InputError, match=why):
        check_versions()


SOURCE = ("model.source=bridge", "model.path=m", "data.source=d", "output_dir=o", "rollout.proof.checksums=false")
UNSUPPORTED = {  # the key that is refused: what is set
    "algorithm.advantage.kind": ["algorithm.advantage.kind=gae"],
    "algorithm.kl.reference": ["algorithm.kl={coef: 0.1, reference: other}"],
    "algorithm.teacher.path": ["algorithm.teacher={path: other}"],
    "model.lora": ["model.lora={rank: 4}"],
    "parallel.cp": ["parallel.cp=2"],
    "parallel.vpp": ["parallel={pp: 2, vpp: 2}"],
    "reward.prime.model": ["reward={functions: [math, prime], prime: {model: other}}"],
    "reward.prime.reference": ["reward={functions: [math, prime], prime: {model: m, reference: other}}"],
    "rollout.quantization": ["rollout.quantization=fp8", "algorithm.rollout_correction={level: token}"],
}
NOT_CONVERTED = "step-000001: a checkpoint of model.source: bridge is not converted; use the Hugging Face folder"
NOT_SUPPORTED = "not supported with model.source: bridge; leave"
REFUSED = [
    *((["train", *SOURCE, *keys], f"{key}: {NOT_SUPPORTED}") for key, keys in UNSUPPORTED.items()),
    (["dpo", *SOURCE, "dpo.reference=other"], f"dpo.reference: {NOT_SUPPORTED}"),
    (["train", *SOURCE[:-1]], "rollout.proof.checksums: how a server holds a model of Bridge's is not known; set it"),
    (["plan", *SOURCE, "--gpu", "h100-80", "--gpus", "8"], "model.source: bridge: memory and time of its models are"),
    (["convert", "mcore2hf", "run", "out"], NOT_CONVERTED),
    (["eval", "--model", "run", "--out", "out", "eval.data=problems.jsonl"], NOT_CONVERTED),
]


@pytest.mark.parametrize(
    ("words", "says"), REFUSED, ids=[f"{words[0]}-{says.split(':')[0]}" for words, says in REFUSED]
)
def test_what_is_not_supported_is_refused_in_one_line(folder, capsys, monkeypatch, words, says):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = {"model": {"path": str(folder), "source": "bridge"}, "data": {"source": "d"}, "output_dir": "o"}
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (folder / "run" / "config.yaml").write_text(json.dumps(config | {"rollout": {"proof": {"checksums": False}}}))
    (folder / "problems.jsonl").write_text(json.dumps({"id": "a", "problem": "1", "answer": "2"}))
    (checkpoint / METADATA_FILE).touch()
    spec = load_model_config(folder, source="bridge")
    write_manifest(checkpoint, {"step": 1, "model": spec.dimensions(), "dtype": "float32", "layout": None})
    monkeypatch.chdir(folder)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2"])
def test_biases_that_no_server_could_take_are_refused(make_tiny_model, tmp_path, family):
    folder = make_tiny_model(tmp_path, family=family)
    given = {"model": {"path": str(folder), "expert_bias_update_rate": 0.001}, "data": {"source": "d"}}
    with pytest.raises(InputError, match=f"model.expert_bias_update_rate: a {family} model has no e_score_correction"):
        check_layout(Config(**given, output_dir="o"), 1)


def test_routers_biases_are_sent_in_float32():
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert sent_bytes(name, (8,), 2, None) == {name: 32}
