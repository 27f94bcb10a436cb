"""`make demo` in short: the commands that make runs, with few steps."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 400  # seconds of each command
SHORTER = {"train": ["trainer.steps=3", "eval.limit=32", "eval.samples=2", "eval.k=[1,2]"]}


def commands() -> list[list[str]]:
    """What make runs after the installation."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    dry = ["make", "--dry-run", "--always-make", "demo"]
    said = subprocess.run(dry, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    ours = (".venv/bin/python -P tools/", ".venv/bin/dynamo-megatron ")
    return [shlex.split(line) for line in said.stdout.splitlines() if line.startswith(ours)]


@pytest.mark.full
@pytest.mark.timeout(4 * LIMIT)
def test_the_demos_commands_make_a_model_train_it_and_report(tmp_path):
    for name in ("configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    said = {}
    for program, *words in commands():
        named = "task" if "tools/demo_task.py" in words else words[0]
        command = [str(Path(sys.executable).with_name(Path(program).name)), *words, *SHORTER.get(named, [])]
        log = tmp_path / f"{named}.log"
        with open(log, "w") as file:
            code = subprocess.run(
                command,
                cwd=tmp_path,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                timeout=LIMIT,
            ).returncode
        said[named] = log.read_text()
        assert code == 0, said[named][-3000:]
    assert list(said) == ["task", "train", "report"]
    output = tmp_path / "runs" / "demo" / "rl"
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["rollout/requested"] == 256 for row in steps)
    scores = [json.loads(line)["step"] for line in (output / "evaluations.jsonl").read_text().splitlines()]
    assert scores == [0, 3], "before and after"
    assert "layout: 2 ranks = tp 2" in said["train"] and (output / "hf" / "config.json").is_file()
    assert "pass@1" in said["report"] and list(output.glob("report*"))
