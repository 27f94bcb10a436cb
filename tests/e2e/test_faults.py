"""Runs whose servers and ranks are killed and frozen: every step is trained, or the run ends soon with one message."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from background_run import step_lines

from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.rollout.retention import after_a_stop
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.runtime.guard import shared_memory_of

pytestmark = pytest.mark.full
FAULTS = 6
BUDGET = 24
OUTCOMES = ("truncated", "aborted", "failed", "rejected")


def hurt(run, rng: random.Random) -> str:
    """One random fault, to one random server: killed or frozen, all of it or one process."""
    name, processes = rng.choice(sorted(run.servers().items()))
    number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    some = rng.choice([processes, processes[:1], processes[-1:]])
    for process in some:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
    return f"{number.name} to {len(some)} of {len(processes)} processes of {name}"


@pytest.mark.timeout(2400)
def test_faults_at_random_times_leave_every_step_trained(workspace, start_run, tmp_path):
    output, rng, faults = tmp_path / "run", random.Random(7), []
    keys = ["rollout.servers=2", "rollout.health_timeout=60", "trainer.steps=10000", f"output_dir={output}"]
    run = start_run(workspace, workspace / "config.yaml", *keys)
    for due in range(FAULTS):
        run.wait_until(lambda due=due: len(step_lines(output)) >= due, f"step {due} after {faults[-1:]}", 600)
        time.sleep(rng.uniform(0.0, 1.0))
        run.wait_until(run.servers, "a server to hurt", 400)
        faults.append(f"after step {len(step_lines(output))}: {hurt(run, rng)}")
    print("\n".join(faults))
    due = len(step_lines(output)) + 2
    run.wait_until(lambda: len(step_lines(output)) >= due, "two steps after the last fault", 600)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.text[-3000:]
    rows = step_lines(output)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row["fleet/restarts"] for row in rows) > 0
    for row in rows:
        rollouts = read_rollouts(step_file(output, row["step"]))
        lost = [r for r in rollouts if r.status in ("failed", "rejected")]
        assert len(rollouts) == BUDGET
        assert len(lost) == round(BUDGET * sum(row[f"rollout/{kind}"] for kind in OUTCOMES[1:]))
        assert row["rollout/logprob_gap_max"] <= 1e-4
        assert row["rollout/weight_version_min"] == row["rollout/weight_version_max"] == row["step"] - 1
    record = read_run(output)
    assert what_if.first_difference(record.steps, what_if.replay(record.steps, what_if.allocator_of(record))) is None
    assert run.left_behind() == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_killed_while_rollouts_are_generated(workspace, start_run, tmp_path, rank):
    """kill -9: the run ends at once, and with it servers, their ports and their shared memory."""
    output = tmp_path / "run"
    keys = ["rollout.max_new_tokens=200", "algorithm.allocation.rollout_n_max=200", "algorithm.allocation.budget=300"]
    run = start_run(workspace, workspace / "config.yaml", *keys, "trainer.steps=500", f"output_dir={output}")
    run.wait_until(lambda: step_file(output, 2).is_file(), "the second step", 600)
    processes = [p for found in run.servers().values() for p in found]
    segments = shared_memory_of([p.pid for p in processes])
    ports = {c.laddr.port for p in processes for c in p.net_connections("tcp") if c.status == "LISTEN"}
    assert processes and segments and ports
    next(p for p in run.family if p.is_running() and p.environ().get("RANK") == rank).kill()
    assert run.wait() == 1
    again = after_a_stop(output)
    assert run.text.splitlines()[-1] == f"rank {rank} was ended by SIGKILL; {again}"
    assert run.left_behind() == []
    assert not [segment for segment in segments if Path(segment).exists()]
    assert not ports & {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
