"""The mapping at the sizes of published models: every rank of a layout built on the meta device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.models.published import PUBLISHED

LAYOUTS = {
    "Qwen2.5-1.5B": [{"tp": 2, "pp": 4}, {"tp": 2, "pp": 2, "vpp": 7}],
    "Qwen2.5-7B": [{"tp": 4, "pp": 2}, {"tp": 4, "pp": 4, "vpp": 7}],
    "Qwen2.5-14B": [{"tp": 8, "pp": 4}, {"tp": 4, "pp": 2}, {"tp": 8, "pp": 4, "vpp": 3}],
    "Qwen2.5-32B": [{"tp": 8, "pp": 4}, {"tp": 4, "pp": 2}, {"tp": 8, "pp": 4, "vpp": 4}],
    "Qwen2.5-72B": [{"tp": 8, "pp": 8}, {"tp": 8, "pp": 4}, {"tp": 8, "pp": 8, "vpp": 5}],
    "Qwen3-14B": [{"tp": 8, "pp": 4}, {"tp": 4, "pp": 2}],
    "Qwen3-32B": [{"tp": 8, "pp": 4}, {"tp": 4, "pp": 2}, {"tp": 8, "pp": 4, "vpp": 2}],
    "Qwen3-30B-A3B": [{"ep": 8, "pp": 4}, {"tp": 4, "ep": 8, "pp": 2}, {"ep": 8, "pp": 4, "vpp": 3}],
    "Qwen3-235B-A22B": [{"ep": 8, "pp": 2}, {"tp": 4, "ep": 16, "pp": 2}],
}
SAMPLE = [
    ("Qwen2.5-7B", {"tp": 4, "pp": 2}, None),
    ("Qwen2.5-1.5B", {"tp": 2, "pp": 2, "vpp": 7}, None),
    ("Qwen2.5-72B", {"tp": 8, "pp": 8}, [0, 63]),
    ("Qwen3-30B-A3B", {"ep": 8, "pp": 4}, [0, 31]),
]


def folder_of(name, tmp_path, **changes):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]["config"] | changes))
    return folder


# what of meta_job.DEFECTS each is found by
FOUND = {
    "a stage's first layer is the model's": "on no stage, or on two",
    "every rank holds the first experts": "on no rank, or on too many",
    "every rank holds the first shard": "not tiled by 2 shards",
    "the folder has twice the heads": "its shard is",
    "the head has no parameter": "a tensor is in no parameter",
}


def prove(cases, tmp_path, **changes):
    """Runs (name, layout, ranks to build or None for all, perhaps a defect), the configs with `changes`; returns a line
    of each."""
    keys = ("name", "parallel", "ranks", "defect")
    cases = [
        {**dict(zip(keys, case, strict=False)), "folder": str(folder_of(case[0], tmp_path, **changes))}
        for case in cases
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    job = [sys.executable, "-P", str(Path(__file__).with_name("meta_job.py")), str(tmp_path / "cases.json")]
    with open(tmp_path / "log", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(job, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=1700).returncode
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-6000:]
    said = [line for line in text.splitlines() if line.startswith('{"name"')]
    assert len(said) == len(cases)
    return said


def test_a_sample(tmp_path):
    prove(SAMPLE, tmp_path)


@pytest.mark.full
def test_the_proof_finds_a_spoilt_mapping(tmp_path):
    layout = {"tp": 2, "ep": 2, "pp": 2}
    cases = [("Qwen3-30B-A3B", layout, None), *(("Qwen3-30B-A3B", layout, None, defect) for defect in FOUND)]
    lines = prove(cases, tmp_path, num_hidden_layers=4, num_experts=8)
    for line, words in zip(lines[1:], FOUND.values(), strict=True):
        assert words in str(json.loads(line)["found"])


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_rank_of_every_layout(tmp_path):
    print("\n".join(prove([(name, p, None) for name, layouts in LAYOUTS.items() for p in layouts], tmp_path)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tensors_are_transformers(name, tmp_path):
    """Names, shapes and number of parameters of the model that transformers builds from the config."""
    folder = folder_of(name, tmp_path)
    shapes = huggingface_shapes(load_model_config(folder))
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    theirs = {}
    for tensor, value in state.items():
        stem, _, last = tensor.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not stem.endswith("experts"):
            theirs[tensor] = tuple(value.shape)
            continue
        for expert in range(len(value)):  # in memory they are stacked, on disk they are not
            rows = value.shape[1]
            for part in ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",):
                shape = (rows // 2 if last == "gate_up_proj" else rows, value.shape[2])
                theirs[f"{stem}.{expert}.{part}.weight"] = shape
    if PUBLISHED[name]["config"]["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    assert shapes == theirs
    billions = sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9
    assert billions == pytest.approx(PUBLISHED[name]["billion_parameters"], rel=0.01)


def test_what_does_not_divide_is_refused(tmp_path):
    spec = load_model_config(folder_of("Qwen3-235B-A22B", tmp_path))
    with pytest.raises(ValueError, match=r"parallel.pp: 4 does not divide the 94 layers; use one of 1, 2, 47, 94"):
        spec.check_parallel(1, 4, ep=8)
    with pytest.raises(ValueError, match=r"parallel.vpp: 2 does not divide the 47 layers of a stage"):
        spec.check_parallel(1, 2, vpp=2, ep=8)
    with pytest.raises(
        ValueError, match=r"parallel.tp: 8 does not divide the 4 \(key/value heads\); use one of 1, 2, 4$"
    ):
        spec.check_parallel(8, 2, ep=8)
