"""Profiled steps, counted spikes and a tracker that fails, in runs of two steps on recorded rollouts."""

import gzip
import json
import os

import pytest

from dynamo_megatron.checkpoint.folder import read_state

pytestmark = pytest.mark.full

LIBRARY = """
def Tracker(config, start):
    raise RuntimeError("no such service")
"""


def test_the_run_goes_on_and_has_its_traces(replay, tmp_path, monkeypatch):
    (tmp_path / "my_service.py").write_text(LIBRARY)
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        code, text, output = replay(
            "tracked",
            lambda rollout: rollout,
            "parallel.pp=2",
            "tracking.backends=[jsonl, 'my_service:Tracker']",
            "tracking.profile_steps=[2]",
            "optimizer.spike={above: 2.0, window: 3}",
        )
    assert code == 0, text[-3000:]
    assert "warning: my_service:Tracker failed (RuntimeError: no such service); metrics.jsonl has all metrics" in text
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["policy/gradient_spikes"]) for row in rows] == [(1, 0), (2, 0)]
    traces = sorted((output / "profile").iterdir())
    assert [trace.name for trace in traces] == [f"step-000002-rank-{r}.json.gz" for r in (0, 1)]
    for trace in traces:
        with gzip.open(trace) as file:
            assert any("backward" in str(event.get("name")).lower() for event in json.load(file)["traceEvents"])


def test_the_norms_of_updates_are_kept_over_a_resume(replay, command_line, workspace):
    keys, name = ("parallel.pp=1", "checkpoint.every=1"), "resumed"
    spike = "optimizer={lr: 1e-4, spike: {window: 3}}"
    code, text, output = replay(name, lambda rollout: rollout, *keys, "trainer.steps=1", spike)
    assert code == 0, text[-3000:]
    assert "spikes" in read_state(output / "checkpoints" / "step-000001")
    keys += ("trainer.steps=2", spike, "rollout.engine=recorded")
    record = f"rollout.recorded={workspace / f'{name}-record'}"
    code, text = command_line(workspace, "train", workspace / "config.yaml", *keys, record, f"output_dir={output}")
    assert code == 0 and "resumed from" in text, text[-3000:]
    norms = read_state(output / "checkpoints" / "step-000002")["spikes"]["norms"]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert norms == [row["policy/grad_norm"] for row in rows]
    assert rows[1]["policy/gradient_spikes"] == 0
