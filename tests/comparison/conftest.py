"""The file of a comparison, and the config of its runs, in the current folder."""

from pathlib import Path

import pytest
import yaml

from dynamo_megatron.comparison.spec import Spec, read_spec

SPEC = {
    "base": ["base.yaml", "trainer.steps=6"],
    "arms": {"grpo": ["methods/grpo"], "wide": ["methods/rloo", "data.batch_prompts=8"]},
    "control": "grpo",
    "seeds": [3, 5],
    "learning_rates": [1e-6, 1.5e-6],
    "output_dir": "out",
}


@pytest.fixture
def write_spec(tmp_path, monkeypatch):
    """write_spec(**changes): writes SPEC with these changes to spec.yaml."""
    monkeypatch.chdir(tmp_path)
    config = {"model": {"path": "models/tiny"}, "data": {"source": "pool.jsonl", "batch_prompts": 4}}
    config["eval"] = {"data": "held_out.jsonl", "every": 2, "samples": 4, "k": [1, 4]}
    Path("base.yaml").write_text(yaml.safe_dump(config))
    return lambda **changes: Path("spec.yaml").write_text(yaml.safe_dump({**SPEC, **changes}, sort_keys=False))


@pytest.fixture
def spec(write_spec):
    """spec(**changes) -> the spec that `write_spec` writes."""

    def read(**changes) -> Spec:
        write_spec(**changes)
        return read_spec("spec.yaml")

    return read
