"""Profiled steps and a tracker that fails, in a run of two steps on recorded rollouts."""

import gzip
import json
import os

import pytest

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
        )
    assert code == 0, text[-3000:]
    assert "warning: my_service:Tracker failed (RuntimeError: no such service); metrics.jsonl has all metrics" in text
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    traces = sorted((output / "profile").iterdir())
    assert [trace.name for trace in traces] == [f"step-000002-rank-{r}.json.gz" for r in (0, 1)]
    for trace in traces:
        with gzip.open(trace) as file:
            assert any("backward" in str(event.get("name")).lower() for event in json.load(file)["traceEvents"])
