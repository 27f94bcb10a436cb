"""A run that is hurt again and again stays flat and loses nothing; and what would show if it did not."""

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import soak_meter
from soak_faults import FAULTS, order
from soak_meter import LEAST, WARM_UP, Meter, OtherWork, growth
from soak_run import Soak, audit

from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Rollout

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
LIMIT = 1200  # seconds
BUSY_WITHIN = 120.0  # seconds for a process to use one second of CPU time beside others
CLOCK_TICKS = 0.2  # seconds by which the system's counters may differ, which are of whole ticks
AHEAD = [
    "rollout.max_staleness=2",
    "algorithm.rollout_correction={kind: truncate, level: sequence}",
    "rollout.keep_last=1000",  # else a full disk also has old rollouts removed, with a line of its own
]
CHILD = """
import os, socket, sys, threading
kept = [bytearray(32 << 20)]
for line in sys.stdin:
    match line.strip():
        case "memory":
            kept.append(bytearray(os.urandom(1 << 20)))
        case "descriptors":
            kept.append(open(os.devnull))
        case "sockets":
            kept.append(socket.socket())
        case "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()  # to the end of the process
    print("done", flush=True)
"""


def soak(folder: Path, *words: str) -> dict:
    """Runs benchmarks/soak.py, checks what it says of each fault, and returns its result."""
    out, log = folder / "soak.json", folder / "soak.log"
    with open(log, "w") as file:
        command = [sys.executable, "-P", SOAK, "--folder", folder / "soak", "--out", out, *words]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT).returncode
    print(log.read_text())
    result = json.loads(out.read_text())
    assert code == 0 and result["problems"] == [], "\n".join(result["problems"])
    kinds = {fault.name: fault for fault in FAULTS}
    for record in result["faults"]:
        fault, lines = kinds[record["fault"]], record["lines"]
        assert all(re.search(fault.says, line) for line in lines), record
        assert (0 if fault.silent else 1) <= len(lines) <= fault.most, record
        assert record["exit code"] in fault.codes, record
    return result


@pytest.mark.full
@pytest.mark.timeout(LIMIT + 100)
def test_a_run_that_is_hurt_every_few_steps_loses_nothing_and_stays_flat(tmp_path):
    """Ten minutes of benchmarks/soak.py: the first kinds of a seeded order."""
    result = soak(tmp_path, "--minutes", "10", "--every", "8", "--seed", "7", "--health-timeout", "12")
    done = [record["fault"] for record in result["faults"]]
    assert len(done) == len(set(done)), "a kind came again before all had come"
    assert len(done) >= 6, done
    judged = {growth["what"].partition(" ")[0] for growth in result["growth"]}
    assert "/dev/shm" in judged
    assert "step" in judged or result["steps beside other work"] > LEAST


@pytest.mark.full
@pytest.mark.timeout(LIMIT + 100)
def test_a_run_whose_servers_work_ahead_is_hurt_and_loses_nothing(tmp_path):
    kinds = ["SIGINT during a save", "no server", "server frozen", "server has other weights"]
    if os.geteuid() == 0 and shutil.which("unshare"):
        kinds.append("disk full")
    result = soak(tmp_path, "--rounds", "1", "--every", "6", "--health-timeout", "12", "--set", *AHEAD, "--", *kinds)
    assert sorted(record["fault"] for record in result["faults"]) == sorted(kinds)


def test_an_unknown_kind_is_one_line_before_anything_is_started_or_written(tmp_path):
    out = tmp_path / "soak.json"
    out.write_text("kept")
    command = [sys.executable, "-P", SOAK, "no servr", "--folder", tmp_path / "soak", "--out", out]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.startswith("soak: no such fault: no servr; there are: server killed, ")
    assert ended.stderr.count("\n") == 1
    assert out.read_text() == "kept" and not (tmp_path / "soak").exists()


@pytest.mark.parametrize("faults", [[], [{"fault": "server killed"}]])
def test_a_soak_that_is_interrupted_before_its_first_fault_leaves_an_earlier_result(tmp_path, monkeypatch, faults):
    spec = importlib.util.spec_from_file_location("soak_command", SOAK)
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)

    class Interrupted(Soak):
        def run(self, kinds, rng):
            self.faults += faults
            raise KeyboardInterrupt

    site = SimpleNamespace(close=lambda: None, small_disks=False, step=3, meter=Meter(tmp_path, tmp_path))
    monkeypatch.setattr(command, "Site", lambda *arguments, **options: site)
    monkeypatch.setattr(command, "Soak", Interrupted)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.setenv(command.ISOLATED, "1")
    out = tmp_path / "soak.json"
    out.write_text("kept")
    monkeypatch.setattr(sys, "argv", ["soak.py", "--folder", str(tmp_path), "--out", str(out)])
    assert command.main() == 1
    assert (out.read_text() == "kept") == (not faults)


def measured(tmp_path, monkeypatch, leak: str) -> dict[str, bool]:
    """What of a process that does so in every step, and of the machine, is flat."""
    meter = Meter(tmp_path, tmp_path)
    command = [sys.executable, "-P", "-c", CHILD, "multiprocessing.spawn"]
    monkeypatch.setattr(soak_meter, "YOUNG", 0.0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        for step in range(WARM_UP + LEAST):
            child.stdin.write(f"{leak}\n")
            child.stdin.flush()
            child.stdout.readline()
            if leak == "entries":
                (tmp_path / f"sem.{step}").touch()
            meter.sample(step, 1.0, psutil.Process().pid, [psutil.Process(child.pid)], 0.0)
        child.stdin.close()
    return {g.what.split()[-1]: g.flat for g in meter.growths()}


@pytest.mark.parametrize("leak", ["nothing", "memory", "descriptors", "sockets", "threads", "entries"])
def test_a_leak_in_one_process_shows(tmp_path, monkeypatch, leak):
    shows = {"nothing": set(), "sockets": {"sockets", "descriptors"}, "entries": {"entries", "folders"}}
    flat = measured(tmp_path, monkeypatch, leak)
    grown = {name for name, is_flat in flat.items() if not is_flat}
    assert flat.keys() == {"memory", "descriptors", "threads", "sockets", "entries", "folders", "time"}
    assert grown - {"memory"} == shows.get(leak, {leak}) - {"memory"}
    assert ("memory" in grown) == (leak == "memory")


@pytest.mark.parametrize("lives", [True, False])
def test_what_killed_processes_could_not_clear_away_does_not_count(tmp_path, lives):
    """Two files a step, and a folder, which a process that lives may have."""
    places = [tmp_path / "shared", tmp_path / "temporary"]
    for place in places:
        place.mkdir()
    meter = Meter(*places)
    for step in range(2 * LEAST):
        (places[0] / f"sem.{step}").touch()
        (places[0] / f"sem.mp-{step}").touch()
        for place in places:
            (place / f"folder-{step}").mkdir()
        meter.ignore_unused([psutil.Process()] if lives else [])
        meter.sample(step, 1.0, psutil.Process().pid, [], 0.0)
    flat = {g.what: g.flat for g in meter.growths()}
    assert flat == {"/dev/shm entries": not lives, "temporary folders": not lives, "step time": True}
    assert max(meter._whole["/dev/shm entries"]) == (2 * LEAST if lives else 0), "folders alone"


def test_the_time_of_a_step_beside_other_work_does_not_count(tmp_path):
    meter = Meter(tmp_path, tmp_path)
    for step in range(4 * LEAST):
        grows = step >= 2 * LEAST
        meter.sample(step, 2.0 if grows else 1.0, psutil.Process().pid, [], 0.5 if grows else 0.0)
    assert {g.what: (g.samples, g.flat) for g in meter.growths()}["step time"] == (2 * LEAST, True)
    assert meter.beside == 2 * LEAST


def test_other_work_is_what_the_named_processes_have_not_used(monkeypatch):
    """By clocks of the test's own: between two readings of real ones the machine may do something else for seconds."""
    now = SimpleNamespace(at=100.0, busy=1000.0, user=7.0, system=3.0)

    class Named:
        def cpu_times(self) -> tuple[float, ...]:
            return now.user, now.system, now.at, now.at  # the last two: of its children, which are named themselves

    monkeypatch.setattr(soak_meter, "time", SimpleNamespace(monotonic=lambda: now.at))
    monkeypatch.setattr(soak_meter, "_busy", lambda: now.busy)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    everything, others, named = OtherWork(), OtherWork(), Named()
    now.at = 101.0
    everything.share([])
    others.share([named])
    now.at, now.busy, now.user, now.system = 103.0, 1006.0, 9.5, 3.5
    assert (everything.share([]), others.share([named])) == (6 / 8, 3 / 8)
    now.at, now.busy = 104.0, 1007.0
    assert others.share([named]) == 1 / 4, "since the last call"


def test_the_machines_cpu_time_has_that_of_a_process_in_it():
    """The readings are nested, so that what happens between two of them makes the outer one larger alone."""

    def used() -> float:
        return sum(busy.cpu_times()[:2])

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            busy = psutil.Process(child.pid)
            at, machine, own = time.monotonic(), soak_meter._busy(), used()
            while used() - own < 1.0:
                assert time.monotonic() - at < BUSY_WITHIN, "the process gets no CPU time"
                time.sleep(0.05)
            own = used() - own
            machine = soak_meter._busy() - machine
            whole = (time.monotonic() - at) * psutil.cpu_count()
        finally:
            child.kill()  # else leaving the block would wait for it
    assert own - CLOCK_TICKS < machine < whole + CLOCK_TICKS


def test_growth_is_of_medians_and_one_more_of_what_is_counted_is_none():
    rng = random.Random(0)
    noisy = [rng.choice([1.0, 1.0, 1.0, 5.0]) for _ in range(200)]
    assert growth("step time", noisy).flat
    assert not growth("step time", [1.0 + i / 1000 for i in range(200)]).flat
    assert growth("rank 0 7 descriptors", [9.0] * 50 + [10.0] * 50).flat
    assert not growth("rank 0 7 descriptors", [9.0] * 50 + [11.0] * 50).flat


def test_the_order_of_faults_is_seeded_and_has_each_kind_as_often():
    first, again, other = (order(list(FAULTS), 3 * len(FAULTS), random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    for start in range(0, len(first), len(FAULTS)):
        whole = first[start : start + len(FAULTS)]
        assert {f.name for f in whole} == {f.name for f in FAULTS}
        outlived = [len(fault.codes) if None in fault.codes else 3 for fault in whole]
        assert outlived == sorted(outlived)


def made_rollout(name: str, status: str) -> Rollout:
    return Rollout(
        rollout_id=name,
        group_id=name.rpartition("-")[0],
        prompt_id="p",
        step=1,
        tokens=[1, 2],
        response_mask=[0, 1],
        engine_logprobs=[-1.0],
        weight_versions=[(0, 0, 1)],
        finish_reason="stop",
        reward=0.0,
        success=False,
        reward_parts={},
        status=status,
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("nothing", None),
        ("missing", "of 3 rollouts 1 missing, 0 twice, 0 others"),
        ("twice", "of 3 rollouts 0 missing, 1 twice, 0 others"),
        ("strange", "of 3 rollouts 0 missing, 0 twice, 1 others"),
        ("failed", "1 rollouts on disk were not trained, the metrics count 0"),
        ("rejected", None),
    ],
)
def test_a_rollout_that_is_lost_or_there_twice_shows(tmp_path, change, says):
    store = RolloutStore(tmp_path)
    for k in range(2 if change == "missing" else 4 if change == "strange" else 3):
        status = "failed" if change == "failed" and k == 0 else "ok"
        store.append(made_rollout(rollout_id(group_id(1, 0), k), status))
    if change == "twice":
        store.append(made_rollout(rollout_id(group_id(1, 0), 0), "ok"))
    if change == "rejected":
        store.reject(1, [rollout_id(group_id(1, 0), 0)])
    store.close()
    rejected = 1 / 3 if change == "rejected" else 0.0
    row = {"step": 1, "rollout/aborted": 0.0, "rollout/failed": 0.0, "rollout/rejected": rejected}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "allocation.jsonl").write_text(json.dumps({"step": 1, "prompt_id": "p", "n": 3}) + "\n")
    assert audit(tmp_path, range(1, 2)) == ({1: 3}, [] if says is None else [f"step 1: {says}"])
