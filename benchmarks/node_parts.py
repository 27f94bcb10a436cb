"""The parts of gpu-check on two nodes: check 14 of docs/gpu-bringup.md, as far as a program can do it.

    make gpu-check NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1     # on node 0, which has that address
    make gpu-check NODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1     # on node 1
    srun --nodes=2 --ntasks-per-node=1 make gpu-check NODES=2   # on both, under SLURM

nodes-network: all-reduces over all ranks of both nodes, over gloo and on GPUs NCCL, and their bandwidth;
nodes-layouts: the training's steps over both nodes, data parallel and with a pipeline stage on each, whose gradient
norms must be those of one rank; nodes-live: `preflight` on both nodes, then five steps with servers and a pipeline
stage on each, so that what is pushed to a server crosses the network. Node 0 writes the figures.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_steps
import training_steps
from measure import VERSIONS, machine
from node_job import ADDRESS, Meeting, NodesError
from planned import gpu_here

from dynamo_megatron.planning.hardware import Cluster

LAYOUTS: dict[str, dict[str, int]] = {"dp": {}, "pp2": {"pp": 2}}  # of all ranks: the latter's stages are the nodes
NORM_BAR = 1e-2  # how far the gradient norm of step 1 of a layout may be from one rank's, of itself
NETWORK_TIMEOUT = 180.0  # seconds to start, meet and add
PREFLIGHT_TIMEOUT = 300.0
CLI = ["-m", "dynamo_megatron.cli"]


def run_node_part(
    part: str, meeting: Meeting, tiny: bool, folder: Path, server_python: str | None, timeout: float
) -> dict[str, Any]:
    """On node 0: the part's figures, with "passed", "exit code" and "hosts". `folder`: new, which both nodes see."""
    folder.mkdir(parents=True)
    if part == "nodes-network":
        result = network(meeting, folder)
    elif part == "nodes-layouts":
        result = layouts(meeting, tiny, folder, timeout)
    else:
        result = live(meeting, tiny, folder, server_python, timeout)
    passed = result["exit code"] == 0 and not result["wrong"]
    return {"hosts": [meeting.about, meeting.other], **result, "passed": passed}


def network(meeting: Meeting, folder: Path) -> dict[str, Any]:
    """What the ranks' all-reduces say, and their bandwidth beside that of the plan's network."""
    script = Path(__file__).with_name("node_bandwidth.py")
    ran = meeting.run([str(script)], folder, NETWORK_TIMEOUT, "all-reduce")
    reports = ran.pop("said")
    result: dict[str, Any] = {**ran, "reports": reports, "wrong": []}
    if ran["exit code"] == 0:
        result["wrong"] = wrong_sums(reports)
    if ran["exit code"] == 0 and (own := reports["0"]) is not None:
        gpu, reason = gpu_here()
        count = len(reports)
        measured = (own["nccl"] or own["gloo"])["bus bytes a second"]
        planned = Cluster(gpu, count, count // 2).link(count) if gpu else None
        over = measured / planned if planned else None
        one = {"measured": measured, "planned": planned, "measured over planned": over}
        result["plan"] = {
            "gpu": gpu.name if gpu else None,
            "reason": reason or None,
            "figures": {"bus bytes a second": one},
        }
    return result


def wrong_sums(reports: dict[str, Any]) -> list[str]:
    """A line for each rank without a report or with a wrong sum."""
    found = []
    for rank, report in reports.items():
        if report is None:
            found.append(f"rank {rank} reported nothing")
            continue
        found += [
            f"rank {rank} on {report['host']}: a wrong sum over {backend}; leave this node out"
            for backend in ("nccl", "gloo")
            if report[backend] is not None and not report[backend]["right"]
        ]
    return found


def starter(meeting: Meeting, *keys: str) -> training_steps.Start:
    """How the benchmarks' runs are started: on all ranks of both nodes, with these keys after the config's."""

    def start(words: list[str], folder: Path, timeout: float, _ranks: int) -> dict[str, Any]:
        ran = meeting.run([*CLI, *words, *keys], folder, timeout, words[0])
        del ran["said"]
        return ran

    return start


def layouts(meeting: Meeting, tiny: bool, folder: Path, timeout: float) -> dict[str, Any]:
    """Three steps' figures on one rank of node 0, and in each layout of the ranks of both nodes."""
    work = training_steps.TINY if tiny else training_steps.QWEN_1_5B
    backend = training_steps.backend_here()
    found = {"one": training_steps.run(work, folder / "one", backend, timeout)}
    for name, parallel in LAYOUTS.items():
        if found[[*found][-1]]["exit code"] != 0:
            break
        ranks, start = 2 * meeting.ranks, starter(meeting)
        found[name] = training_steps.run(work, folder / name, backend, timeout, ranks, parallel, 2, start)
    wrong = wrong_norms(found)
    return {"layouts": found, "exit code": [*found.values()][-1]["exit code"], "wrong": wrong}


def wrong_norms(found: dict[str, dict[str, Any]]) -> list[str]:
    """What the layouts' figures must not be beside those of "one", a line each."""
    wrong = [f"{name}: exit code {ran['exit code']}" for name, ran in found.items() if ran["exit code"] != 0]
    if wrong:
        return wrong
    norms = {name: ran["steps"][0]["gradient norm"] for name, ran in found.items()}
    one = norms.pop("one")
    return [
        f"step 1: gradient norm {one:.6g} on one rank, {norm:.6g} in layout {name} over both nodes"
        for name, norm in norms.items()
        if not abs(norm / one - 1) <= NORM_BAR
    ]


def live(meeting: Meeting, tiny: bool, folder: Path, server_python: str | None, timeout: float) -> dict[str, Any]:
    """preflight's lines, and where it passes the figures of steps with servers on both nodes."""
    work = training_steps.TINY if tiny else training_steps.QWEN_1_5B
    host = f"rollout.host={ADDRESS}"
    said: dict[str, Any] = {}
    train: Callable[..., dict[str, Any]] = starter(meeting, host)

    def start(words: list[str], run_folder: Path, seconds: float, ranks: int) -> dict[str, Any]:
        check = [*CLI, "preflight", words[-1], host, "--no-server"]
        checked = meeting.run(check, run_folder, PREFLIGHT_TIMEOUT, "preflight")
        said["preflight"] = (run_folder / "preflight-rank-0.log").read_text(encoding="utf-8").splitlines()
        if checked["exit code"] != 0:
            del checked["said"]
            return checked
        return train(words, run_folder, seconds, ranks)

    run = folder / "live"
    result = live_steps.run("nodes-live", work, run, server_python, timeout, 2 * meeting.ranks, 2, start)
    result["wrong"] += silent_servers(result["steps"], live_steps.servers_of("nodes-live") or 2 * meeting.ranks)
    return {**said, **result}


def silent_servers(steps: list[dict[str, Any]], servers: int) -> list[str]:
    """A line for each step in which a server answered nothing or was restarted."""
    found = []
    for step in steps:
        answered = [name for name, count in step["rollouts by server"].items() if count]
        if len(answered) < servers:
            found.append(f"step {step['step']}: {len(answered)} of {servers} servers answered ({', '.join(answered)})")
        if step["restarts"]:
            found.append(f"step {step['step']}: {step['restarts']:g} restarts of servers")
    return found


def run_of_nodes(
    meeting: Meeting,
    parts: list[str],
    options: tuple[bool, str | None, float],
    scratch: Path,
    keep: Callable[[str, dict[str, Any]], None],
) -> None:
    """On node 0: runs the parts one after the other and passes each one's figures to `keep`. `options`: tiny, the
    servers' interpreter, seconds for a run."""
    for part in parts:
        folder = scratch / f"{part}-{time.time_ns()}"  # new: a network file system may show node 1 an older one's files
        start, before = time.time(), machine(VERSIONS)
        result = run_node_part(part, meeting, options[0], folder, *options[1:])
        keep(part, {"tiny": options[0], "machine": before, "seconds": time.time() - start, **result})
        if result["passed"]:
            shutil.rmtree(folder, ignore_errors=True)  # a network file system may still hold files open
        if meeting.lost is not None:
            raise NodesError(meeting.lost)
