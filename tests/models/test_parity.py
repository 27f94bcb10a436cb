"""The real GPTModel on four ranks: logits equal transformers', weights come back bit-equal, and Megatron's own loader
and checkpoints agree with the converter."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dynamo_megatron.convert import compare_weights, hf2mcore

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m"
SIZES = {"vocab": 104, "layers": 4}
WHOLE, TP2, TP2PP2, VPP = {}, {"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}
MOE_TP2, MOE_EP2 = {"tp": 2, "ep": 2, "sequence_parallel": True}, {"ep": 2, "pp": 2}


@pytest.fixture
def folder_of(tiny_model, tmp_path):
    """A family's tiny folder by name: FAMILY[_tied], llama3_rope is Llama with RoPE scaling."""

    def make(name, dtype="float32"):
        family = "llama" if name == "llama3_rope" else name.removesuffix("_tied")
        head = {"head_dim": 24} if family.startswith("qwen3") else {}
        folder = tiny_model(family, tied=name.endswith("_tied"), dtype=dtype, **SIZES, **head)
        if name != "llama3_rope":
            return folder
        scaled = tmp_path / f"llama3_rope-{dtype}"
        if not scaled.exists():
            shutil.copytree(folder, scaled)
            config = json.loads((scaled / "config.json").read_text())
            config["rope_parameters"] |= {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            (scaled / "config.json").write_text(json.dumps(config))
        return scaled

    return make


def run(cases, tmp_path):
    """Runs the cases; "convert" of one asks for both directions. Returns the largest logit difference by folder."""
    for number, case in enumerate(cases):
        if case.pop("convert", False):
            case["mcore"] = str(tmp_path / f"mcore-{number}")
            hf2mcore(Path(case["folder"]), Path(case["mcore"]))
            case["run"] = str(tmp_path / f"run-{number}")
            Path(case["run"]).mkdir()
            settings = {"model": {"path": case["folder"]}, "data": {"source": "none"}, "output_dir": case["run"]}
            (Path(case["run"]) / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    job = [sys.executable, "-P", str(Path(__file__).with_name("parity_job.py")), str(tmp_path / "cases.json")]
    with open(tmp_path / "log", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(job, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=1700).returncode
    assert code == 0, (tmp_path / "log").read_text()[-6000:]
    said = [json.loads(x) for x in (tmp_path / "rank0.log").read_text().splitlines() if x.startswith('{"folder"')]
    assert len(said) == len(cases)
    for case in cases:
        if "run" in case:
            largest, unequal = compare_weights(case["folder"], case["run"])
            assert len(largest) > 20 and not unequal, f"{case['run']}: {unequal}"
    return [(Path(x["folder"]).parent.name, x["parallel"], x["gap"]) for x in said]


def case(folder, parallel, dtype="float32", **more):
    return {"folder": str(folder), "parallel": parallel, "dtype": dtype, **more}


def test_a_sample(folder_of, tmp_path):
    run(
        [
            case(folder_of("llama3_rope"), WHOLE, logits=True),
            case(folder_of("qwen2_tied"), TP2, logits=True),
            case(folder_of("qwen2_tied"), VPP, convert=True),
            case(folder_of("qwen3_moe"), MOE_TP2, logits=True),
            case(folder_of("qwen3_moe", "bfloat16"), MOE_EP2, "bfloat16", convert=True),
        ],
        tmp_path,
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_family(folder_of, tmp_path):
    cases = []
    for name in ("llama", "llama3_rope", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied", "qwen3_moe", "qwen3_moe_tied"):
        mixture = "moe" in name
        cases.append(case(folder_of(name), WHOLE, logits=True))
        cases.append(case(folder_of(name), MOE_TP2 if mixture else TP2, logits=True, convert=True))
        for dtype in ("float32", "bfloat16"):
            layouts = [MOE_EP2, TP2PP2 | {"sequence_parallel": True}] if mixture else [TP2PP2, VPP]
            cases += [case(folder_of(name, dtype), layout, dtype, convert=True) for layout in layouts]
    if SMOLLM2.is_dir():
        cases.append(case(SMOLLM2, WHOLE, logits=True))
        cases.append(case(SMOLLM2, {"pp": 2}, "bfloat16", convert=True))
    for folder, parallel, gap in run(cases, tmp_path):
        print(folder, parallel, "bit-equal there and back" if gap is None else f"logits within {gap:.1e}")
