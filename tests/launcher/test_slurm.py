"""`launch slurm` on a real SLURM of two virtual nodes: requeues, failures, cancelling, servers' own nodes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from background_run import FAILS_ON_RANK_1, HOLDS, runs_first, step_lines
from living_processes import living

from dynamo_megatron.runtime.guard import shared_memory_of


@pytest.fixture
def launched(cluster, run_folder, tmp_path):
    """launch(*words, code, hold) -> (job, output): the run on both nodes, one rank each, in interpreters that run
    `code` first, and wait after step `hold`; cancelled with the test."""
    jobs = []

    def launch(*words: object, code: str = HOLDS, hold: int | None = None) -> tuple[str, Path]:
        (run_folder / "hold").unlink(missing_ok=True)
        if hold is not None:
            (run_folder / "hold").write_text(str(hold))
        output = tmp_path / "it's a run %j"
        words = ("config.yaml", f"output_dir={output}", "--nodes", "2", *words)
        jobs.append(cluster.launch(run_folder, *words, environment=runs_first(tmp_path, code)))
        return jobs[-1], output

    yield launch
    for job in jobs:
        cluster.tool("scancel", job)
        cluster.wait_until(lambda job=job: not cluster.tool("squeue", "-h", "-j", job), f"the end of {job}", tmp_path)


def batch_log(output: Path, job: str) -> str:
    return (output / "logs" / f"slurm-{job}.out").read_text()


def rank_log(output: Path, job: str, rank: int) -> str:
    return (output / "logs" / f"slurm-{job}" / f"rank-{rank}.log").read_text()


def processes_of(job: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_JOB_ID") == job:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.full
def test_a_failure_is_summed_up_and_not_requeued(cluster, launched):
    job, output = launched(code=FAILS_ON_RANK_1.replace("RANK", "SLURM_PROCID"))
    cluster.wait(job, output, "FAILED")
    assert cluster.field(job, "Restarts") == "0" and cluster.field(job, "ExitCode") == "1:0"
    summary = batch_log(output, job).partition("failed (exit code 1)\n")[2]
    assert "rank 1, step 3: KeyError: 'this rank has had enough'" in summary.partition("rank-0.log\n")[2]


# Both nodes are this machine.
LIVE = ("rollout.engine=sglang", "rollout.recorded=null", "rollout.servers=2", "rollout.host=127.0.0.1")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_live_run_goes_on_after_usr1_and_what_cancelling_leaves(cluster, launched, run_folder):
    """A server a node, with the node's rank; the rollout process and the reward workers are rank 0's.

    USR1 requeues the job, first as before a time limit, then sent by SLURM to every process of the steps; the second
    run is cancelled.
    """
    job, output = launched(*LIVE, "trainer.steps=6", "--time", "30", hold=2)
    for restarts, steps, to in (("1", 2, ["--batch"]), ("2", 4, [])):
        cluster.wait_until(lambda steps=steps: len(step_lines(output)) >= steps, f"{steps} steps", output)
        (run_folder / "hold").write_text(str(steps + 2))
        cluster.tool("scancel", *to, "--signal=USR1", job)
        cluster.wait_until(lambda n=restarts: cluster.field(job, "Restarts") == n, f"requeue {restarts}", output)
        done = len(step_lines(output))
        assert done in (steps, steps + 1)
    (run_folder / "hold").unlink()
    cluster.wait(job, output)
    assert "SIGUSR1: the ranks save and stop" in batch_log(output, job)
    assert "stopped by SIGUSR1; the same command resumes from the checkpoint of step " in rank_log(output, job, 0)
    assert f"(step {done})" in rank_log(output, job, 0), "goes on from where it was stopped"
    assert [row["step"] for row in step_lines(output)] == [1, 2, 3, 4, 5, 6]
    assert max(row["rollout/logprob_gap_max"] for row in step_lines(output)) <= 1e-4
    again, _ = launched(*LIVE, "trainer.steps=999")
    cluster.wait_until(lambda: len(step_lines(output)) >= 7, "one more step", output)
    ours = processes_of(again)
    assert len(ours) >= 9, "two ranks, rollout process, servers and their children, reward worker"
    segments = shared_memory_of([p.pid for p in ours])
    cluster.tool("scancel", again)
    cluster.wait_until(lambda: cluster.field(again, "JobState") == "CANCELLED", "the cancelled job's end", output)
    assert cluster.field(again, "Restarts") == "0"
    cluster.wait_until(lambda: not living(ours), "the end of the job's processes", output)
    assert not [segment for segment in segments if os.path.exists(segment)]


@pytest.mark.full
def test_servers_on_a_node_of_their_own(cluster, launched):
    split = ("rollout.servers=1", "rollout.placement=split", "rollout.host=127.0.0.3", "--rollout-nodes", "1")
    job, output = launched(*LIVE, *split, "--nodes", "1", "--ranks-per-node", "2", "trainer.steps=2")
    cluster.wait(job, output, timeout=500)
    assert [row["step"] for row in step_lines(output)] == [1, 2]
    assert max(row["rollout/logprob_gap_max"] for row in step_lines(output)) <= 1e-4
    assert (output / "logs" / f"slurm-{job}" / "servers-0.log").is_file()
