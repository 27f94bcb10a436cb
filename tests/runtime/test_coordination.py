"""Ranks that were asked to stop, that fail, or that hang."""

import datetime
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from dynamo_megatron.runtime import coordination
from dynamo_megatron.runtime.coordination import Coordinator, RemoteFailure, StopFlag, StopRequested


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))


@pytest.fixture
def ranks(store):
    both = [Coordinator(store, rank, StopFlag()) for rank in (0, 1)]
    yield both
    for coordinator in both:
        coordinator.close()


def test_all_ranks_report_the_first_failure(ranks, store, monkeypatch):
    first, second = ranks
    for coordinator in ranks:
        coordinator.close()  # else their watchdogs would end this process
    assert second.fail("rank 1: no memory") == "rank 1: no memory"
    assert first.fail("rank 0: lost rank 1") == "rank 1: no memory"
    for wait in (first.check, lambda: second.wait("never", "nothing", 60)):
        with pytest.raises(RemoteFailure, match="rank 1: no memory"):
            wait()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun starts the ranks again, and keeps its store
    again = Coordinator(store, 0, StopFlag())
    again.check()
    again.close()


def test_no_watchdog_is_left_when_a_rank_ends(store, monkeypatch):
    """One inside a call of the store makes Python abort at its end: a run that is complete has then failed."""
    monkeypatch.setattr(coordination, "BEAT_EVERY", 1e-5)
    for _ in range(10):
        coordinator = Coordinator(store, 1, StopFlag())
        coordinator.close()
        assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_signal_of_any_rank_stops_the_run(ranks):
    first, second = ranks
    first.check_stop()
    second.stop._set(signal.SIGUSR1, None)
    with pytest.raises(TimeoutError, match="rank 1 waited 0 s for the step"):
        second.wait("never", "the step", 0.0)
    with pytest.raises(StopRequested, match="SIGUSR1 on rank 1"):
        first.check_stop()


STEPS = """
import os, sys, time
from dynamo_megatron.runtime.coordination import Coordinator, StopFlag, connect_store

coordinator = Coordinator(connect_store(60), int(os.environ["RANK"]), StopFlag(), step_timeout=0.01)
coordinator.begin_step(1)
time.sleep(600 if sys.argv[1] == "hangs" else 0.02)
coordinator.end_step()
"""


@pytest.mark.parametrize(
    ("step", "ranks"), [("has ended", 1), pytest.param("hangs", 2, marks=pytest.mark.full, id="hangs")]
)
def test_a_step_that_takes_too_long_ends_all_ranks(store, step, ranks):
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    where["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command, environment = [sys.executable, "-P", "-c", STEPS, step], {**os.environ, **where}
    started = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert {process.returncode for process in started} == {75}, said
    assert said[0].startswith("step 1 took longer than trainer.step_timeout (0.01 s); the same command resumes from")
