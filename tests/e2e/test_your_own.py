"""docs/quickstart.md works word by word."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_walk_through_works(tmp_path):
    for name in ("tools", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    (tmp_path / "walk.sh").write_text("set -euo pipefail\n" + "".join(blocks))
    with open(tmp_path / "console.log", "w") as log:
        done = subprocess.run(
            ["bash", "walk.sh"],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=500,
        )
    text = (tmp_path / "console.log").read_text()
    assert done.returncode == 0, text[-3000:]
    assert "\x1b" not in text and "\r" not in text, "control characters where there is no terminal"
    assert text.count("| pass@8, % (95 %) | held_out (2) |") == 1
    assert "Replaying the run's own allocator gives all 24 counts of allocation.jsonl exactly." in text
    steps = (tmp_path / "runs/my-method/metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2 and all("policy/clip_share" not in json.loads(step) for step in steps)
    assert (tmp_path / "runs/mine/report.png").stat().st_size > 10_000
    assert text.count("<|im_start|>assistant") == 4 + 1, "the samples' prompts and the export's answer to one"
