"""A small run whose parts the tests damage, and one check of it at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from dynamo_megatron.config.files import compose
from dynamo_megatron.preflight import checks
from dynamo_megatron.preflight.checks import OF_A_NODE, OF_THE_JOB, findings

CHECKS = {check.__name__.replace("_", " "): check for check in (*OF_THE_JOB, *OF_A_NODE, checks.server)}


@pytest.fixture
def base(tiny_model, tmp_path, monkeypatch) -> Path:
    """A folder with a model of its own, problems and config.yaml; also the current one."""
    shutil.copytree(tiny_model, tmp_path / "model")
    rows = [{"id": f"p{i}", "problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(4)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_length": 128},
        "data": {"source": str(tmp_path / "problems.jsonl"), "batch_prompts": 2},
        "rollout": {"max_new_tokens": 8, "start_timeout": 400},
        "reward": {"workers": 1},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def check(base):
    """check(name, *keys, ranks=1) -> [(level, text)] of that check under the base config with `keys`."""

    def one(name: str, *keys: str, ranks: int = 1) -> list[tuple[str, str]]:
        config, _ = compose([str(base / "config.yaml")], keys)
        found = findings(CHECKS[name], checks.Subject(config, ranks, ranks), set())
        return [(finding.level, finding.text) for finding in found]

    return one


@pytest.fixture
def failure(check):
    """failure(name, *keys) -> the one line of a check that must fail."""

    def one(name: str, *keys: str, ranks: int = 1) -> str:
        texts = [text for level, text in check(name, *keys, ranks=ranks) if level == "FAILED"]
        assert len(texts) == 1 and "\n" not in texts[0], texts
        return texts[0]

    return one
