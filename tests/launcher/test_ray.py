"""`launch ray` on a cluster of two raylets on this machine, a rank on each."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from background_run import HOLDS, Run, runs_first, step_lines

from dynamo_megatron.runtime import guard

SECRET = "c0ffee-never-to-be-seen"


@pytest.fixture(scope="module")
def address():
    """A head and another node with a core each, so that two ranks never share one."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def start(run_folder, address, tmp_path):
    """start(name, *words, hold) -> (run, output_dir): `launch ray` in the background, ended with the test. It waits
    after step `hold`."""
    started = []

    def one(name: str, *words: object, ranks=2, hold: int | None = None) -> tuple[Run, Path]:
        output = run_folder / name
        (run_folder / "hold").unlink(missing_ok=True)
        if hold is not None:
            (run_folder / "hold").write_text(str(hold))
        keys = ["config.yaml", f"output_dir={output}", "--ranks", str(ranks), "--address", address, *words]
        environment = {"WANDB_API_KEY": SECRET, **runs_first(tmp_path, HOLDS)}
        started.append(Run(run_folder, *keys, environment=environment, command="launch ray"))
        return started[-1], output

    yield one
    for run in started:
        if run.process.poll() is None:
            run.kill()


def ranks_of(output: Path) -> dict[int, psutil.Process]:
    """rank -> its process (not the guard's)."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = process.cmdline()
            if {"train", f"output_dir={output}"} <= {*command} and guard.NAME not in command:
                found[int(process.environ()["RANK"])] = process
    return found


class NoRoom:
    """Of a placement group that is never placed. `asked`: while the launcher waits, it gets SIGTERM."""

    asked = False

    def wait(self, seconds):
        if self.asked:
            signal.raise_signal(signal.SIGTERM)
        return False


@pytest.fixture
def launch_without_room(tmp_path, monkeypatch):
    """launch_without_room(*words) -> exit code, on a cluster of eight GPUs that are taken."""
    pytest.importorskip("ray")
    from dynamo_megatron.launcher import ray as launcher

    monkeypatch.setattr(launcher, "placement_group", lambda bundles, strategy: NoRoom())
    monkeypatch.setattr(launcher, "remove_placement_group", lambda group: None)
    for name, given in (
        ("init", lambda **_: None),
        ("shutdown", lambda: None),
        ("cluster_resources", lambda: {"GPU": 8.0}),
        ("available_resources", dict),
    ):
        monkeypatch.setattr(launcher.ray, name, given)
    base = ["model.path=m", "data.source=d", f"output_dir={tmp_path / 'run'}", "rollout.host=ib0"]
    return lambda *words: launcher.launch(argparse.Namespace(address=None, ranks=3, wait=0.0), [], [*base, *words])


def test_a_serving_actor_has_the_gpus_of_its_server(launch_without_room, capsys):
    keys = ["rollout.placement=split", "rollout.servers=2", "rollout.tp=2", "trainer.resume=never"]
    assert launch_without_room(*keys) == 1
    wanted = "3 x {'CPU': 1, 'GPU': 1}, 2 x {'CPU': 1, 'GPU': 2}"
    assert capsys.readouterr().err.startswith(f"ray: no resources for {wanted} within 0 s")


def test_local_ranks_follow_the_ranks_whatever_the_gpus_are_called(monkeypatch):
    pytest.importorskip("ray")
    from dynamo_megatron.launcher import ray as launcher

    monkeypatch.setattr(launcher.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="a:1"))
    run, started = launcher.RayRun.__new__(launcher.RayRun), []
    nodes, gpus = "aabb", ["GPU-f0", "GPU-1c", "1", "0"]
    run._placed = [launcher.Placed(f"rank-{i}", None, nodes[i], gpus=[gpus[i]]) for i in range(4)]
    run._ranks, run._servers, run._words = 4, 0, []
    run._begin = lambda placed, command, words, environment: started.append(environment)
    run._start()
    assert [own["LOCAL_RANK"] for own in started] == ["0", "1", "0", "1"]
    assert [own["CUDA_VISIBLE_DEVICES"] for own in started] == ["GPU-f0,GPU-1c"] * 2 + ["1,0"] * 2


def test_a_signal_to_stop_before_the_ranks_start_is_not_lost(launch_without_room, monkeypatch, capsys):
    monkeypatch.setattr(NoRoom, "asked", True)
    assert launch_without_room() == 75
    said = "stopped while it started; nothing is saved yet: the same command starts from step 0\n"
    assert capsys.readouterr().err == said


def test_an_actor_runs_its_child_to_the_end_and_asks_it_to_stop(tmp_path):
    pytest.importorskip("ray")
    from dynamo_megatron.launcher.ray import Child

    log = tmp_path / "rank-0.log"
    script = "import os, signal\nsignal.pthread_sigmask(0, {10})\nprint(os.environ['NAME'], os.getcwd(), flush=True)\n"
    script += "raise SystemExit(signal.sigwait({10}))"
    with ThreadPoolExecutor() as pool:
        early, child = Child(), Child()
        asked = pool.submit(early.stop)  # before there is a child
        assert early.run(["sleep", "3600"], {}, str(tmp_path), str(log)) == -signal.SIGUSR1 and asked.result() is None
        assert "FileNotFoundError" in child.run(["true"], {}, str(tmp_path / "none"), str(log))
        ended = pool.submit(child.run, [sys.executable, "-c", script], {"NAME": "one"}, str(tmp_path), str(log))
        while not log.read_text():
            assert not ended.done()
            time.sleep(0.05)
        child.stop()
        assert ended.result() == signal.SIGUSR1 and log.read_text() == f"one {tmp_path}\n"


def test_lines_of_a_child_are_printed_once_and_whole(tmp_path, capsys):
    pytest.importorskip("ray")
    from dynamo_megatron.launcher.ray import Placed

    log = tmp_path / "rank-1.log"
    placed = Placed("rank-1", actor=None, node="", log=str(log), printed=len("earlier\n"))
    log.write_bytes("earlier\none\ntwö".encode()[:-1])
    placed.print_output("[rank-1] ", ended=False)
    assert capsys.readouterr().out == "[rank-1] one\n"
    log.with_suffix(".new").write_text("earlier\none\ntwö\nlast")
    log.with_suffix(".new").rename(log)  # as over NFS, where an open file may not show what another node writes
    placed.print_output("[rank-1] ", ended=False)
    assert capsys.readouterr().out == "[rank-1] twö\n"
    placed.print_output("[rank-1] ", ended=True)
    log.unlink()
    placed.print_output("[rank-1] ", ended=True)
    assert capsys.readouterr().out == "[rank-1] last\n"


@pytest.mark.full
def test_stopped_and_killed_a_run_ends_as_on_this_machine_alone(start, run_folder, ends_as_undisturbed):
    """By SIGTERM; a rank of it; an actor."""
    run, output = start("ray", hold=3)
    run.wait_until(lambda: len(step_lines(output)) >= 3, "3 steps")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75 and "stopped by SIGUSR1" in run.text, run.text[-3000:]

    run, _ = start("ray", hold=6)
    run.wait_until(lambda: len(step_lines(output)) >= 6, "3 steps more")
    ranks_of(output)[1].kill()
    (run_folder / "hold").unlink()
    assert run.wait() == 1 and "rank-1 on " in run.text.splitlines()[-1]

    run, _ = start("ray", hold=7)
    run.wait_until(lambda: len(step_lines(output)) >= 7, "7 steps")
    ranks = ranks_of(output)
    actor = ranks[1].parent().parent()
    assert "Child" in actor.name() or any("Child" in word for word in actor.cmdline()), actor.cmdline()
    actor.kill()
    assert run.wait() == 1
    last = run.text.splitlines()[-1]
    assert last.startswith("rank-1 on ") and "its actor died" in last, last
    assert not psutil.wait_procs(ranks.values(), timeout=60)[1]

    run, _ = start("ray")
    assert run.wait() == 0 and "resumed from" in run.text, run.text[-3000:]
    ends_as_undisturbed(output)
    assert (output / "logs" / "ray" / "rank-1.log").is_file()
    written = [run.log, *(output / "logs").rglob("*"), *Path("/tmp/ray/session_latest/logs").rglob("*")]
    assert len(written) > 5
    assert not [file for file in written if file.is_file() and SECRET in file.read_text(errors="replace")]
