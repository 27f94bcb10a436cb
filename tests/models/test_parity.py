"""The real GPTModel on four ranks: logits equal transformers', weights come back bit-equal, and Megatron's own loader
and checkpoints agree with the converter."""

from pathlib import Path

import pytest
import yaml
from rank_cases import run_cases

from dynamo_megatron.checkpoint.convert import hf2mcore, mcore2hf
from dynamo_megatron.checkpoint.inspection import differences, inspect
from dynamo_megatron.models import FAMILIES

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m"
BOUNDS = {"logits": 1e-5, "gradients": 5e-6}
SIZES = {"vocab": 104, "layers": 4}
WHOLE, TP2, CP2, TP2PP2, VPP = {}, {"tp": 2}, {"cp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}
MOE_TP2, MOE_EP2 = {"tp": 2, "ep": 2}, {"ep": 2, "pp": 2}

YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 8, "original_max_position_embeddings": 32}
WHOLE_YARN = {"factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}
# What config.json has in place of rope_parameters; the sequences have three times the original length or 1.5 times.
ROPES = {
    "default": {"rope_theta": 500.0, "rope_scaling": None},
    "yarn": {"rope_theta": 1000.0, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn_all": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "beta_fast": 3.0, "beta_slow": 0.5, **WHOLE_YARN}
    },
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
}


@pytest.fixture
def folder_of(model_of):
    """A family's tiny folder by name: FAMILY[_tied][@WINDOW][+ROPE]. The sequences are six times as long as the windows
    or four times."""

    def make(name, dtype="float32"):
        family, _, rope = name.partition("+")
        family, _, window = family.partition("@")
        kind = family.removesuffix("_tied")
        fields = dict(ROPES[rope] if rope else {})
        if window:
            fields["sliding_window"] = int(window)
        if kind.startswith("qwen3"):
            fields["head_dim"] = 24
        if window and kind.startswith("qwen"):
            fields |= {"use_sliding_window": True, "max_window_layers": 2}
        return model_of(kind, tied=family.endswith("_tied"), dtype=dtype, fields=fields, **SIZES)

    return make


def run(cases, tmp_path):
    """Runs the cases; "convert" of one asks for both directions."""
    for number, case in enumerate(cases):
        if case.pop("convert", False):
            case["mcore"] = str(tmp_path / f"mcore-{number}")
            hf2mcore(Path(case["folder"]), Path(case["mcore"]))
            case["run"] = str(tmp_path / f"run-{number}")
            Path(case["run"]).mkdir()
            settings = {"model": {"path": case["folder"]}, "data": {"source": "none"}, "output_dir": case["run"]}
            (Path(case["run"]) / "config.yaml").write_text(yaml.safe_dump(settings))
        config = {"model": {"path": case.get("mcore", case["folder"]), "dtype": case.pop("dtype")}}
        config |= {"data": {"source": "none"}, "output_dir": "none", "parallel": case.pop("parallel")}
        case |= {"config": config, "ranks": 4}
    found = run_cases(str(Path(__file__).with_name("parity_job.py")), cases, tmp_path, timeout=1700)
    for case, ranks in zip(cases, found, strict=True):
        print(case["folder"], case["config"]["parallel"], ranks[0])
        assert all(gap <= BOUNDS[name] for gaps in ranks for name, gap in gaps.items()), (case, ranks)
        if "run" in case:
            back = Path(case["run"]) / "back"
            mcore2hf(case["run"], back)
            assert list(differences(inspect(Path(case["folder"])), inspect(back))) == [], case["run"]


def case(folder, parallel, dtype="float32", **more):
    return {"folder": str(folder), "parallel": parallel, "dtype": dtype, **more}


def test_a_sample(folder_of, tmp_path):
    run(
        [
            case(folder_of("llama+llama3"), CP2, logits=True),
            case(folder_of("qwen2+yarn"), TP2, logits=True, convert=True),
            case(folder_of("mistral@8+yarn_all"), WHOLE, logits=True, gradients=True),
            case(folder_of("qwen2_tied"), VPP, convert=True),
            case(folder_of("qwen3@12"), CP2, logits=True),
            case(folder_of("olmo3"), CP2, logits=True),
            case(folder_of("gemma3_text_tied"), TP2, logits=True, convert=True),
            case(folder_of("qwen3_moe"), MOE_TP2, logits=True),
            case(folder_of("qwen3_moe", "bfloat16"), MOE_EP2, "bfloat16", convert=True),
        ],
        tmp_path,
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_family_and_every_rope(folder_of, tmp_path):
    cases = []
    for family in FAMILIES:
        mixture = family.endswith("moe")
        for name in (family, f"{family}_tied"):
            cases.append(case(folder_of(name), MOE_TP2 if mixture else TP2, logits=True))
        staged = MOE_EP2 if mixture else TP2PP2
        cases.append(case(folder_of(family), staged, convert=True))
    cases += [case(folder_of(f"qwen3+{rope}"), layout, logits=True) for rope in ROPES for layout in (WHOLE, CP2)]
    cases.append(case(folder_of("qwen3_moe+yarn"), CP2, logits=True))
    for name in (*FAMILIES, "mistral@12+yarn", "phi3@8", "qwen2@12", "qwen3@8+llama3"):
        cases += [case(folder_of(name), WHOLE, logits=True, gradients=True), case(folder_of(name), CP2, logits=True)]
    if SMOLLM2.is_dir():
        cases.append(case(SMOLLM2, WHOLE, logits=True))
    run(cases, tmp_path)
