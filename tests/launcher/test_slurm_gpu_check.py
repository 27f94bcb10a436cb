"""`make gpu-check NODES=2` as an srun step: each task finds its node's place in SLURM's variables."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


def test_srun_starts_it_on_both_nodes(cluster, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    made = ["make", "gpu-check", "NODES=2", "TINY=1", "PART=nodes-network", f"OUT={tmp_path}"]
    inherited = {name: value for name, value in cluster.environment.items() if not name.startswith(("RANK", "MASTER_"))}
    with open(tmp_path / "log", "w") as log:
        code = subprocess.run(
            ["srun", "--nodes=2", "--ntasks-per-node=1", "--label", *made],
            cwd=ROOT,
            env=inherited,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=240,
        ).returncode
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    assert "0: nodes-network: passed" in said and "1: node 1: all-reduce" in said
    result = json.loads((tmp_path / "gpu_check.json").read_text())["nodes-network"]
    assert result["passed"] and list(result["reports"]) == ["0", "1"]
