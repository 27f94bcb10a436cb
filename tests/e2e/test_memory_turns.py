"""Servers and ranks that take turns with memory through whole runs, on the CPU: not a bit changes, no server dies."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from dynamo_megatron.rollout.store import step_file


@pytest.mark.full
def test_a_run_that_takes_turns_is_the_same_run(replay):
    runs = {how: replay(f"turns-{how}", lambda r: r, f"rollout.offload={how}") for how in ("on", "off")}
    rows, weights = {}, {}
    for how, (code, text, output) in runs.items():
        assert code == 0, text[-3000:]
        rows[how] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        weights[how] = {n: t for f in sorted((output / "hf").glob("*.safetensors")) for n, t in load_file(f).items()}
    assert all(torch.equal(tensor, weights["off"][name]) for name, tensor in weights["on"].items())
    for on, off in zip(rows["on"], rows["off"], strict=True):
        same = {k for k in off if not k.startswith(("time/", "throughput/", "resources/"))}
        assert {k: on[k] for k in same} == {k: off[k] for k in same}
        assert on["memory/released_bytes"] > 0 and on["memory/resumed_bytes"] > 0 and on["time/memory"] > 0
        assert not any(k.startswith("memory/") for k in off)


@pytest.mark.full
def test_servers_live_through_every_phase_and_a_stop(workspace, start_run, step_lines, tmp_path):
    """On a CPU they free nothing, but die of the same calls: a release in generation, a second one, two ranks'."""
    output = tmp_path / "run"
    keys = ["rollout.offload=true", "rollout.servers=2", "rollout.max_new_tokens=150", "checkpoint.every=2"]
    command = (workspace / "config.yaml", *keys, "trainer.steps=5", f"output_dir={output}")
    run = start_run(workspace, *command)
    stopped_in = step_file(output, 3)
    run.wait_until(lambda: stopped_in.is_file() and stopped_in.stat().st_size, "rollouts of step 3")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) == 75, run.text[-3000:]
    assert "left the rotation" not in run.text
    again = start_run(workspace, *command)
    assert again.wait() == 0, again.text[-3000:]
    assert "left the rotation" not in again.text
    rows = step_lines(output)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["rollout/logprob_gap_max"] <= 1e-4 and row["fleet/restarts"] == 0
        assert row["memory/released_bytes"] > 0 and row["memory/resumed_bytes"] > 0
