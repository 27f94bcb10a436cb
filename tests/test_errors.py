"""What the user is told of an error, and the exit code, follow from the error's type."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dynamo_megatron"
# Their arguments are a caller's, not a user's: pydantic makes a fault of the config of what a validator raises, and a
# reward function's error is shown with its type.
PLAIN = (
    "config",
    "algorithm",
    "reward/functions.py",
    "reward/procedural.py",
    "reward/math_answer.py",
    "reward/choice.py",
    "reward/code_tests.py",
    "reward/question_answering.py",
    "evaluation/estimates.py",
)

JOB = """
import sys
from dynamo_megatron.algorithm.advantages import group_advantages
from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.run import Job, run_rank


class Fails(Job):
    def check(self, ranks):
        return {}

    def prepare(self, spec):
        if sys.argv[2] == "input":
            raise InputError("data.source: it is empty")
        group_advantages([1.0], ["a"], "no such kind")


sys.exit(run_rank(Fails(Config.model_validate_json(sys.argv[1]))))
"""


@pytest.mark.full
@pytest.mark.parametrize(("error", "code"), [("input", 2), ("argument", 1)])
def test_only_an_input_error_is_the_users(tiny_model, error, code):
    config = {"model": {"path": str(tiny_model)}, "data": {"source": "none"}, "output_dir": "none"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", JOB, json.dumps(config), error],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    if error == "input":
        assert done.stderr == "data.source: it is empty\n"
    else:
        assert "Traceback" in done.stderr and "kind: 'no such kind' is unknown" in done.stderr.splitlines()[-1]


def test_modules_that_read_what_users_give_raise_input_errors():
    """Or the user would be shown a traceback, and the exit code would be 1."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE).as_posix()
        if place.startswith(PLAIN):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                found += [f"{place}:{node.lineno}"] if node.exc.func.id == "ValueError" else []
    assert found == []
