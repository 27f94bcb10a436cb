"""The planner's parameters against the model that Megatron builds: every rank, every parameter's size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.models import FAMILIES
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.planning import formulas

SP = {"sequence_parallel": True}
LAYOUTS = {
    "Qwen2.5-Math-1.5B": [{}, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "vpp": 7}, {"pp": 4}],
    "Qwen2.5-Math-7B": [{}, {"tp": 4}, {"tp": 4, "pp": 4, "vpp": 7}],
    "Qwen2.5-14B": [{"tp": 4}, {"tp": 8, "pp": 2}, {"tp": 2, "pp": 4, "vpp": 3}],
    "Qwen2.5-32B": [{"tp": 8}, {"tp": 8, "pp": 4, "vpp": 4}, {"tp": 4, "pp": 4}],
    "Qwen2.5-72B": [{"tp": 8, "pp": 4}, {"tp": 8, "pp": 8, "vpp": 5}],
    "Qwen3-14B": [{"tp": 4}, {"tp": 8, "pp": 2}],
    "Qwen3-32B": [{"tp": 8}, {"tp": 8, "pp": 4, "vpp": 2}],
    "Qwen3-30B-A3B": [{"ep": 8}, {"tp": 4, "ep": 8, "pp": 2, **SP}, {"ep": 8, "pp": 4, "vpp": 3}],
}
SAMPLE = [("Qwen2.5-Math-1.5B", {"tp": 2, "pp": 2, "vpp": 7}, None), ("Qwen3-30B-A3B", {"ep": 8, "pp": 4}, [31])]


def spec_of(name):
    config = PUBLISHED[name]["config"]
    return FAMILIES[config["model_type"]](config)


def compare(cases, tmp_path):
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    job = [sys.executable, "-P", str(Path(__file__).with_name("parameter_job.py")), str(tmp_path / "cases.json")]
    with open(tmp_path / "log", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(job, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=1700).returncode
    text = (tmp_path / "log").read_text()
    assert code == 0, text[-6000:]
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"name"')]
    assert len(rows) >= len(cases)
    for row in rows:
        assert row["equal"], row
    return rows


def test_a_sample(tmp_path):
    compare(SAMPLE, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_rank_of_every_layout(tmp_path):
    rows = compare([(name, p, None) for name, layouts in LAYOUTS.items() for p in layouts], tmp_path)
    assert len({row["name"] for row in rows}) == 8


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shards_are_the_model(name):
    """Summed over the ranks of a replica, every parameter once (norms, routers and padding apart)."""
    spec = spec_of(name)
    assert formulas.model_elements(spec) / 1e9 == pytest.approx(PUBLISHED[name]["billion_parameters"], rel=0.01)
    chunks = formulas.stage_parameters(spec, ParallelConfig(), 0)
    padding = (spec.padded_vocab(1) - spec.vocab_size) * spec.hidden_size * (1 if spec.tied else 2)
    assert sum(chunks[0].dense) + sum(chunks[0].experts) == formulas.model_elements(spec) + padding
