"""gpu-check on two nodes, which are two network namespaces, and what it refuses."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import live_steps
import node_job
import node_parts
import pytest
import torch
from node_job import Job, Meeting, NodesError, job_of, run_ranks
from two_hosts import ADDRESSES, INTERFACE, NAMES, two_hosts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.py"
GIVEN = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[0-1]"}


@pytest.mark.full
def test_the_whole_command_on_two_nodes(tmp_path):
    """At tiny size: node 0 has the figures, and says what it had of node 1."""
    (tmp_path / "gpu_check.json").write_text('{"tests": {"passed": true, "exit code": 0, "tiny": true}}')
    with two_hosts(tmp_path) as hosts:
        if isinstance(hosts, str):
            pytest.skip(hosts)
        command = [sys.executable, "-P", str(SCRIPT), "--tiny", "--nodes", "2", "--out", str(tmp_path)]
        logs = [tmp_path / f"node-{i}.log" for i in range(2)]
        job = {"MASTER_ADDR": ADDRESSES[0], "OMP_NUM_THREADS": "1"}
        nodes = [hosts.start(i, command, {**job, "NODE_RANK": str(i)}, log) for i, log in enumerate(logs)]
        assert [node.wait(500) for node in nodes] == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    said, other = (log.read_text() for log in logs)
    assert "nodes-live: passed" in said and "node 1: preflight" in other and "exit code 0" in other
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(result) == ["tests", *gpu_check.OF_NODES] and all(part["passed"] for part in result.values())
    for part in gpu_check.OF_NODES:
        hosts_of = result[part]["hosts"]
        assert [(one["host"], one["address"]) for one in hosts_of] == [*zip(NAMES, ADDRESSES, strict=True)]
        assert all(one["interface"] == INTERFACE for one in hosts_of)
    reports = result["nodes-network"]["reports"]
    assert [(reports[rank]["host"], reports[rank]["interface"]) for rank in "01"] == [(n, INTERFACE) for n in NAMES]
    assert all(one["gloo"]["right"] and one["gloo"]["bus bytes a second"] > 1e6 for one in reports.values())
    layouts = result["nodes-layouts"]["layouts"]
    assert [(name, ran["ranks"]) for name, ran in layouts.items()] == [("one", 1), ("dp", 2), ("pp2", 2)]
    for ran in layouts.values():
        expected = layouts["one"]["headline"]["gradient norm"]
        assert ran["headline"]["gradient norm"] == pytest.approx(expected, rel=1e-3)
    live = result["nodes-live"]
    assert any("all-reduce over 2 ranks" in line for line in live["preflight"])
    assert len(live["steps"]) == live_steps.STEPS and all(s["push seconds"] > 0 for s in live["steps"])
    assert all(set(s["rollouts by server"]) == {"server-0", "server-1"} for s in live["steps"])
    if not torch.cuda.is_available():
        plans = [live["plan"], layouts["pp2"]["plan"], result["nodes-network"]["plan"]]
        assert all("no GPU" in plan["reason"] and plan["gpu"] is None for plan in plans)
        assert all(one["planned"] is None for plan in plans for one in plan["figures"].values())


@pytest.mark.parametrize(
    ("nodes", "environment", "said"),
    [
        ("3", GIVEN, "NODES: it is '3'; two nodes are checked at a time"),
        ("2", {"MASTER_ADDR": "127.0.0.1"}, "NODE_RANK: it is not set; start the command on both nodes"),
        ("2", {**GIVEN, "NODE_RANK": "2"}, "NODE_RANK: it is '2'"),
        ("2", {**GIVEN, "NODE_RANK": ""}, "NODE_RANK: it is not set"),
        ("2", {"NODE_RANK": "1"}, "MASTER_ADDR: it is not set"),
        ("2", {**GIVEN, "MASTER_ADDR": ""}, "MASTER_ADDR: it is not set"),
        ("2", {**GIVEN, "MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR: 'no-such-host.invalid': "),
        ("2", {**GIVEN, "MASTER_ADDR": "a" * 64}, "is no name of a host; give node 0's address"),
        ("2", {**GIVEN, "MASTER_PORT": "70000"}, "MASTER_PORT: '70000' is no port"),
        ("2", {**GIVEN, "MASTER_PORT": "http"}, "MASTER_PORT: 'http' is no port"),
        ("2", {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}, "is on one node alone; start it on both: srun --nodes=2"),
        (
            "2",
            {**IN_SLURM, "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"},
            "the srun step has 16 tasks on 2 nodes",
        ),
    ],
)
def test_what_is_no_job_is_one_line(tmp_path, monkeypatch, capsys, nodes, environment, said):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "NODE_RANK", "MASTER_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--nodes", nodes, "--out", str(tmp_path)])
    assert gpu_check.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-check: ") and said in line


def test_the_variables_of_the_user_come_before_slurms():
    given = {**GIVEN, "NODE_RANK": "1", "MASTER_PORT": "1234"}
    assert job_of("2", {**IN_SLURM, **given}) == Job(1, "127.0.0.1", 1234)
    assert job_of("2", {**GIVEN, "MASTER_PORT": ""}) == Job(0, "127.0.0.1", node_job.DEFAULT_PORT)


def test_an_address_that_is_given_needs_no_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "")
    step = {**IN_SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    with pytest.raises(NodesError, match="MASTER_ADDR: scontrol show hostnames"):
        job_of("2", step)
    assert job_of("2", {**step, "MASTER_ADDR": "127.0.0.1"}) == Job(0, "127.0.0.1", 12056)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--part", "nodes-live"], "nodes-live runs on two nodes: NODES=2"),
        (["--part", "training", "--nodes", "2"], "training runs on one node: leave NODES out"),
    ],
)
def test_a_part_of_the_other_kind_is_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--out", str(tmp_path), *words])
    assert gpu_check.main() == 2
    assert said in capsys.readouterr().err


def test_a_node_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(node_job, "MEETING", 3.0)  # also for the store to come up
    port = node_job.free_port()
    with pytest.raises(NodesError, match=f"waited 3 s for node 1 to come to 127.0.0.1:{port}.*NODE_RANK=1"):
        Meeting(Job(0, "127.0.0.1", port), 1, tmp_path)
    port = node_job.free_port()
    with pytest.raises(NodesError, match=rf"waited \d+ s for node 0 at 127.0.0.1:{port}: is gpu-check running there"):
        Meeting(Job(1, "127.0.0.1", port), 1, tmp_path)
    with pytest.raises(NodesError, match=r"rank 0 cannot listen at 192\.0\.2\.1"):
        Meeting(Job(0, "192.0.2.1", port), 1, tmp_path)
    assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ


OTHER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import node_job
node_job.SEES_FOLDER, node_job.GRACE = float(sys.argv[5]), 4.0
try:
    meeting = node_job.Meeting(node_job.Job(1, "127.0.0.1", int(sys.argv[2])), int(sys.argv[3]), Path(sys.argv[4]))
    sys.exit(meeting.follow())
except node_job.NodesError as error:
    print(error)
    sys.exit(9)
"""


def other_node(port: int, ranks: int, folder: Path, log: Path, sees: float = 60.0) -> subprocess.Popen:
    words = [sys.executable, "-P", "-c", OTHER, str(BENCHMARKS), str(port), str(ranks), str(folder), str(sees)]
    with open(log, "w") as file:
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in (("MEETING", 200.0), ("SEES_FOLDER", 60.0), ("GRACE", 4.0)):
        monkeypatch.setattr(node_job, name, seconds)


def test_both_nodes_run_what_node_0_asks_for(tmp_path, quick):
    port, log = node_job.free_port(), tmp_path / "log"
    other = other_node(port, 2, tmp_path, log)
    meeting = Meeting(Job(0, "127.0.0.1", port), 2, tmp_path)
    shows = "import json, os, sys; a = sys.argv; print(json.dumps({'is': [a[1], *map(os.environ.get, a[2:])]}))"
    words = ["-c", shows, node_job.ADDRESS, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    ran = meeting.run(words, tmp_path, 60, "shows")
    assert ran["exit code"] == 0
    assert {rank: one["is"] for rank, one in ran["said"].items()} == {
        str(rank): ["127.0.0.1", str(rank), str(rank % 2), "4", "2", "127.0.0.1"] for rank in range(4)
    }
    fails = "import os, sys, time; time.sleep(60 * (os.environ['RANK'] != '3')); print('disk on fire'); sys.exit(5)"
    start = time.monotonic()
    ran = meeting.run(["-c", fails], tmp_path, 60, "fails")
    assert ran["exit code"] == 5 and time.monotonic() - start < 55
    assert "disk on fire" in ran["log"] and any("rank 3 on" in line for line in ran["log"])
    assert any("after another rank had failed" in line for line in ran["log"])
    meeting.end(1)
    assert other.wait(60) == 1, log.read_text()


def test_a_node_that_cannot_write_the_folder_says_so(tmp_path, quick):
    port, log = node_job.free_port(), tmp_path / "log"
    other = other_node(port, 1, tmp_path, log)
    meeting = Meeting(Job(0, "127.0.0.1", port), 1, tmp_path)
    blocked = tmp_path / "sleeps-rank-1.log"
    blocked.mkdir()
    ran = meeting.run(["-c", "import time; time.sleep(60)"], tmp_path, 60, "sleeps")
    assert ran["exit code"] == 1 and ran["log"][0] == f"node 1: [Errno 21] Is a directory: '{blocked}'"
    meeting.end(1)
    assert other.wait(60) == 1, log.read_text()


def test_a_folder_that_node_0_cannot_make_is_told(tmp_path, quick):
    (tmp_path / "file").touch()
    port, log = node_job.free_port(), tmp_path / "log"
    other = other_node(port, 1, tmp_path / "file", log, sees=2.0)
    with pytest.raises(NodesError, match=r"node 0: .*File exists"):
        Meeting(Job(0, "127.0.0.1", port), 1, tmp_path / "file")
    assert other.wait(60) == 9, log.read_text()


@pytest.mark.parametrize("fails", [True, False])
def test_a_run_that_ends_early_is_no_success_of_an_earlier_one(tmp_path, monkeypatch, fails):
    """Node 1 is told 1, although the file has the figures of a run that passed."""
    told, parts = [], list(gpu_check.OF_NODES)
    passed = {part: {"passed": True, "exit code": 0, "tiny": True} for part in parts}
    (tmp_path / "gpu_check.json").write_text(json.dumps(passed))
    figures = gpu_check.Figures(tmp_path / "gpu_check.json", tiny=True, keeps=True)

    class Met:
        def __init__(self, job, ranks, folder):
            self.job = job

        def end(self, code):
            told.append(code)

    def run(*_):
        if fails:
            raise OSError("no space left")

    monkeypatch.setattr(node_job, "Meeting", Met)
    monkeypatch.setattr(node_parts, "run_of_nodes", run)
    options = argparse.Namespace(tiny=True, server_python=None)
    with pytest.raises(OSError, match="no space") if fails else contextlib.nullcontext():
        gpu_check.on_nodes(Job(0, "127.0.0.1", 1), options, parts, figures, tmp_path)
    assert told == [1 if fails else 0]


def test_a_node_that_goes_is_named(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(node_job, "GRACE", 1.0)
    port, log = node_job.free_port(), tmp_path / "log"
    other = other_node(port, 1, tmp_path, log)
    meeting = Meeting(Job(0, "127.0.0.1", port), 1, tmp_path)
    other.kill()
    other.wait()
    ran = meeting.run(["-c", ""], tmp_path, 7, "nothing")  # which an interpreter that does nothing must not miss
    assert ran["exit code"] is None and ran["log"] == [meeting.lost]
    assert meeting.lost == "node 0 waited 8 s for node 1 to end nothing"


def test_nodes_that_do_not_match_are_told(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(node_job, "GRACE", 60.0)  # until node 1 has seen it: node 0's end is that of the store
    port, log = node_job.free_port(), tmp_path / "log"
    other = other_node(port, 8, tmp_path, log)
    with pytest.raises(NodesError, match=r"has 1 GPUs, .* has 8 GPUs; hide some with CUDA_VISIBLE_DEVICES"):
        Meeting(Job(0, "127.0.0.1", port), 1, tmp_path)
    assert other.wait(60) == 9 and "the same number of GPUs" in log.read_text()


def test_a_folder_that_node_1_does_not_see_is_told(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(node_job, "SEES_FOLDER", 5.0)
    port, log = node_job.free_port(), tmp_path / "log"
    other = other_node(port, 1, tmp_path / "elsewhere", log, sees=1.0)  # while node 0's store is there
    with pytest.raises(NodesError, match="node 0 waited 5 s for node 1 to see"):
        Meeting(Job(0, "127.0.0.1", port), 1, tmp_path)
    assert other.wait(60) == 9
    assert f"node 1 waited 1 s for what node 0 writes to {tmp_path / 'elsewhere'}" in log.read_text()


def test_ranks_that_take_too_long_are_ended(tmp_path):
    found = run_ranks(["-c", "import time; time.sleep(60)"], tmp_path, "sleeps", [{"RANK": "0"}], 0.5)
    assert found["exit code"] is None and found["log"][-1] == "ended after 0.5 s"


def test_layouts_over_nodes_that_train_differently_fail():
    def ran(norm, code=0):
        return {"exit code": code, "steps": [{"gradient norm": norm}]}

    assert node_parts.wrong_norms({"one": ran(2.0), "dp": ran(2.01), "pp2": ran(1.99)}) == []
    for norm in (2.1, 1.9, float("nan")):
        (said,) = node_parts.wrong_norms({"one": ran(2.0), "dp": ran(2.01), "pp2": ran(norm)})
        assert said == f"step 1: gradient norm 2 on one rank, {norm:g} in layout pp2 over both nodes"
    assert node_parts.wrong_norms({"one": ran(2.0), "dp": ran(0, code=1)}) == ["dp: exit code 1"]


def test_all_reduces_without_a_report_of_rank_0_are_wrong(tmp_path):
    class Met:
        def run(self, *_):
            return {"exit code": 0, "said": {"0": None, "1": {"host": "b", "nccl": None, "gloo": {"right": True}}}}

    found = node_parts.network(Met(), tmp_path)
    assert found["wrong"] == ["rank 0 reported nothing"] and "plan" not in found


def test_wrong_sums_and_silent_servers_are_named():
    good, bad = {"right": True}, {"right": False}
    reports = {
        "0": {"host": "a", "nccl": None, "gloo": good},
        "1": {"host": "b", "nccl": bad, "gloo": good},
        "2": None,
    }
    assert node_parts.wrong_sums(reports) == [
        "rank 1 on b: a wrong sum over nccl; leave this node out",
        "rank 2 reported nothing",
    ]
    steps = [
        {"step": 1, "restarts": 0, "rollouts by server": {"server-0": 4, "server-1": 4}},
        {"step": 2, "restarts": 1, "rollouts by server": {"server-0": 8, "server-1": 0}},
    ]
    assert node_parts.silent_servers(steps[:1], 2) == []
    assert node_parts.silent_servers(steps, 2) == [
        "step 2: 1 of 2 servers answered (server-0)",
        "step 2: 1 restarts of servers",
    ]
