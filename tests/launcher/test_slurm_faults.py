"""What `slurm.sh` makes of srun's messages and of a SLURM that does not answer: with commands that are made up, since a
real SLURM fails too seldom."""

from __future__ import annotations

import os
import subprocess

import pytest

from dynamo_megatron.launcher.slurm import render

REAL_SLEEP = "/bin/sleep"
COMMANDS = {
    "sleep": f"exec {REAL_SLEEP} 0.05",
    "scontrol": """
case "$*" in
  "show hostnames"*) echo n0; echo n1 ;;
  "show node"*) echo "NodeName=n0 NodeAddr=$fake_address" ;;
  requeue*)
    echo >>requeues
    [ "$(wc -l <requeues)" -gt "$fake_refused_requeues" ] || { echo "controller unreachable" >&2; exit 1; }
    ;;
esac""",
    "squeue": """
case "$*" in
  *%T) [ "$fake_state" != "" ] || { echo "controller unreachable" >&2; exit 1; }; echo "$fake_state" ;;
  *%e) echo "$fake_end" ;;
esac""",
    "srun": """
echo "$*" >>sruns
case "$*" in
  *" true") eval "$fake_nodes" ;;
  *servers-%t*) eval "$fake_servers" ;;
  *) echo $$ >ranks-$PPID; eval "$fake_ranks" ;;
esac""",
}
# Servers that outlast the ranks: the script has waited for the ranks' process before it is gone.
OUTLAST = f"until [ -s ranks-$PPID ] && ! kill -0 $(cat ranks-$PPID) 2>/dev/null; do {REAL_SLEEP} 0.05; done"
STOPPED = "srun: error: n0: task 0: Exited with exit code 75"
TOLD = "srun: launch/slurm: _step_signal: Terminating StepId=7.0"


@pytest.fixture
def run(tmp_path, job):
    """run(options, **fake) -> (exit code, output, calls of `scontrol requeue`) of the script in a job of number 7."""
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash{body if body[0] == chr(10) else chr(10) + body}\n")
        (tmp_path / name).chmod(0o755)

    def one(options: dict[str, int] | None = None, **fake: object) -> tuple[int, str, int]:
        text = render(job(**(options or {})), ["c.yaml"], [], tmp_path / "out")
        fakes = {"address": "127.0.0.1", "refused_requeues": 0, "state": "RUNNING", "end": "N/A", "servers": OUTLAST}
        fakes["nodes"] = "exit 0"
        given = {f"fake_{name}": value for name, value in (fakes | fake).items()}
        given |= {"SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "n[0-1]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        text = text.replace("SECONDS + 60", "SECONDS + 2").replace("KILL 60", "KILL 1")
        done = subprocess.run(
            ["bash", "-c", text],
            env={**os.environ, **{name: str(value) for name, value in given.items()}},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        requeues = tmp_path / "requeues"
        return done.returncode, done.stdout, len(requeues.read_text().splitlines()) if requeues.is_file() else 0

    return one


def lines(*messages: str, code: int) -> str:
    return "".join(f"echo '{message}' >&2; " for message in messages) + f"exit {code}"


ASKED = "kill -s USR1 $PPID; trap : USR1; /bin/sleep 0.3; "


@pytest.mark.parametrize(
    ("ranks", "code", "requeued"),
    [
        (lines(STOPPED, TOLD, "srun: error: n1: task 1: Terminated", code=143), 75, 1),
        (lines("srun: error: n1: tasks 1-3: Exited with exit code 75", TOLD, STOPPED, code=75), 75, 1),
        # A refused config; then a rank that was told to end, as if it had been asked to stop.
        (lines("srun: error: n0: task 0: Exited with exit code 2", TOLD, STOPPED, code=75), 2, 0),
        (lines("srun: error: n1: task 1: Killed", TOLD, STOPPED, code=137), 137, 0),
        (lines("srun: error: n1: task 1: Out Of Memory", TOLD, STOPPED, code=137), 137, 0),
        (lines("srun: error: n1: task 1: Segmentation fault (core dumped)", TOLD, STOPPED, code=139), 139, 0),
        (lines("srun: error: Unable to create step for job 7: Invalid node name", code=1), 1, 0),
        (ASKED + lines("srun: error: n1: task 1: Killed", TOLD, STOPPED, code=137), 75, 1),
        (ASKED + lines("srun: error: n1: task 1: Exited with exit code 1", TOLD, STOPPED, code=75), 1, 0),
        (ASKED + "exit 138", 75, 1),  # srun was not there yet
    ],
)
def test_the_first_rank_to_end_decides(run, ranks, code, requeued):
    ended, said, requeues = run(ranks=ranks)
    assert (ended, requeues) == (code, requeued), said
    assert ("failed (exit code" in said) == (not requeued)


FAILED = "srun: error: n0: tasks 0,2: Exited with exit code {}"


@pytest.mark.parametrize("nodes", ["exit 1", f"exec {REAL_SLEEP} 600"])
@pytest.mark.parametrize(
    "ranks",
    [
        lines(FAILED.format(1), TOLD, "srun: error: Timed out waiting for job step to complete", code=1),
        lines("srun: error: n0: task 0: Aborted (core dumped)", TOLD, code=134),
    ],
)
def test_a_node_that_has_gone_away_is_no_failure(run, ranks, nodes):
    assert run(ranks=lines(FAILED.format(2), code=2), nodes=nodes)[::2] == (2, 0)  # a refusal is one all the same
    code, said, requeues = run({"nodes": 2}, ranks=ranks, nodes=nodes)
    assert (code, requeues) == (75, 1) and "and not all nodes answer: requeued" in said, said


def test_servers_have_all_cores_of_their_node(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert run({"ranks_per_node": 8, "rollout_nodes": 1}, ranks="exit 0")[0] == 0
    servers = [line for line in (tmp_path / "sruns").read_text().splitlines() if "servers-%t" in line]
    assert len(servers) == 1 and " --cpus-per-task=32 " in servers[0]
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    assert run({"rollout_nodes": 1}, ranks="exit 0")[0] == 0
    assert (tmp_path / "sruns").read_text().count("--cpus-per-task") == 1


KILLED = "srun: error: n1: task 1: Terminated"
AGAIN = "submit again to go on\n"


@pytest.mark.parametrize(
    ("ranks", "fake", "requeues", "says"),
    [
        (lines(STOPPED, code=75), {"refused_requeues": 2}, 3, "stopped to be resumed: requeued\n"),  # for a moment
        (lines(STOPPED, code=75), {"refused_requeues": 10**6}, None, f"scontrol could not requeue it: {AGAIN}"),
        (lines(STOPPED, code=75), {"state": ""}, 0, f"squeue has no answer, so that the job is not requeued: {AGAIN}"),
        (lines(STOPPED, code=75), {"state": "COMPLETING"}, 0, ""),  # it was cancelled
        (lines(KILLED, code=143), {"state": "COMPLETING"}, 0, ""),
    ],
)
def test_a_controller_that_is_away_and_a_job_that_is_cancelled(run, ranks, fake, requeues, says):
    code, said, counted = run(ranks=ranks, **fake)
    assert code == 75 and said.endswith(says), said
    assert counted == requeues if requeues is not None else counted >= 1


def test_ranks_that_are_busy_at_the_limit(run):
    def ends(seconds: int) -> str:
        return subprocess.check_output(["date", "+%FT%T", "--date", f"{seconds} seconds"], text=True).strip()

    busy = f"until [ -s requeues ]; do {REAL_SLEEP} 0.05; done >/dev/null 2>&1"
    code, said, requeues = run(ranks=busy, end=ends(50))
    assert (code, requeues) == (75, 1) and "busy until the time limit: requeued" in said
    assert run(ranks=busy, end=ends(3600))[0] == 0


def test_servers_that_end_before_the_ranks(run):
    job = {"rollout_nodes": 1}
    refused = "mkdir -p out/logs/slurm-7; echo rollout.host: no such interface >out/logs/slurm-7/servers-0.log; exit 2"
    code, said, _ = run(job, ranks="exit 1", servers=refused)
    assert code == 1
    assert said.endswith("servers-0.log\nrollout.host: no such interface\n"), said
    assert run(job, ranks="exit 0")[0] == 0


def test_an_address_that_slurm_does_not_tell(run):
    code, said, _ = run(ranks="exit 0", address="")
    assert code == 1 and "scontrol does not tell the address of the first node of n[0-1]" in said
