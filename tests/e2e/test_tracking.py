"""Profiled steps, counted spikes and a tracker that fails, in a run of two steps on recorded rollouts."""

import gzip
import json
import os

import pytest

from dynamo_megatron.checkpoint.folder import read_state

pytestmark = pytest.mark.full

LIBRARY = """
def init(**settings):
    raise RuntimeError("no such service")
"""


@pytest.mark.parametrize("stages", [1, 2], ids=["alone", "stages"])
def test_the_run_goes_on_and_has_its_traces(replay, tmp_path, monkeypatch, stages):
    (tmp_path / "trackio.py").write_text(LIBRARY)
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        code, text, output = replay(
            f"tracked-{stages}",
            lambda rollout: rollout,
            f"parallel.pp={stages}",
            "tracking.backends=[jsonl, trackio]",
            "tracking.profile_steps=[2]",
            "optimizer.spike={above: 2.0, window: 3}",
        )
    assert code == 0, text[-3000:]
    assert "warning: trackio failed (RuntimeError: no such service); metrics.jsonl has all metrics" in text
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["policy/gradient_spikes"]) for row in rows] == [(1, 0), (2, 0)]
    traces = sorted((output / "profile").iterdir())
    assert [trace.name for trace in traces] == [f"step-000002-rank-{r}.json.gz" for r in range(stages)]
    for trace in traces:
        with gzip.open(trace) as file:
            assert any("backward" in str(event.get("name")).lower() for event in json.load(file)["traceEvents"])


@pytest.mark.parametrize("before", [False, True], ids=["from the resume on", "before, too"])
def test_the_norms_of_updates_are_kept_over_a_resume(replay, command_line, workspace, before):
    """The checkpoint of a run without `optimizer.spike` has no history of norms; the next one has."""
    keys, name = ("parallel.pp=1", "checkpoint.every=1"), f"resumed-{before}"
    spike = "optimizer={lr: 1e-4, spike: {window: 3}}"
    code, text, output = replay(name, lambda rollout: rollout, *keys, "trainer.steps=1", *[spike] * before)
    assert code == 0, text[-3000:]
    assert ("spikes" in read_state(output / "checkpoints" / "step-000001")) == before
    keys += ("trainer.steps=2", spike, "rollout.engine=recorded")
    record = f"rollout.recorded={workspace / f'{name}-record'}"
    code, text = command_line(workspace, "train", workspace / "config.yaml", *keys, record, f"output_dir={output}")
    assert code == 0 and "resumed from" in text, text[-3000:]
    norms = read_state(output / "checkpoints" / "step-000002")["spikes"]["norms"]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert norms == [row["policy/grad_norm"] for row in rows[not before :]]
    assert rows[1]["policy/gradient_spikes"] == 0
