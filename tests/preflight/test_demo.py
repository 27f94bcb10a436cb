"""The demo's own configuration passes preflight's checks of model and data."""

import json
import runpy
import types
from pathlib import Path

import pytest

from dynamo_megatron.config.files import compose
from dynamo_megatron.preflight import data_checks, model_checks
from dynamo_megatron.preflight.subject import Subject

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """Its data as tools/demo_task.py writes them, of fewer problems."""
    made, folder = runpy.run_path(str(ROOT / "tools" / "demo_task.py")), tmp_path_factory.mktemp("task")
    parts = made["sums"](0)
    rows = {part: parts[part][:128] for part in ("pool", "held_out")}
    for part, written in rows.items():
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return folder


@pytest.fixture
def demo(task, monkeypatch) -> Subject:
    files = [str(ROOT / "configs" / name) for name in ("demo/rl.yaml", "methods/dynamo.yaml")]
    keys = {"data.source": "pool.jsonl", "eval.data": "held_out.jsonl", "output_dir": "run"}
    monkeypatch.chdir(ROOT)  # the warm start's path is of this folder
    config, _ = compose(files, [f"{key}={task / name}" for key, name in keys.items()])
    return Subject(config, 2, 2)


@pytest.mark.parametrize(
    "check",
    [
        model_checks.vocabulary,
        model_checks.weights,
        model_checks.template,
        model_checks.context_length,
        data_checks.data,
        data_checks.evaluation,
    ],
)
def test_the_demo_passes(demo, check):
    assert {finding.level for finding in check(demo)} <= {"ok", "note"}


def test_a_tokenizer_that_keeps_neither_text_nor_prompt_is_refused(demo):
    """As one of another class does: here, without the digits."""
    fast = demo.tokenizer

    class WithoutDigits:
        def __getattr__(self, name):
            return getattr(fast, name)

        def decode(self, *arguments):
            return "".join(c for c in fast.decode(*arguments) if not c.isdigit())

    other = types.SimpleNamespace(spec=demo.spec, config=demo.config, tokenizer=WithoutDigits(), prompts=demo.prompts)
    with pytest.raises(ValueError, match="its files belong to another tokenizer class"):
        list(model_checks.vocabulary(other))
