"""Two ranks that were asked to stop, or that hang."""

import os
import socket
import subprocess
import sys

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


RANK = """
import os, signal, time
import sys
from pathlib import Path
from dynamo_megatron.runtime.coordination import Coordinator, StopFlag, StopRequested, connect_store
from dynamo_megatron.runtime.signed_store import share_secret

rank = int(os.environ["RANK"])
stop = StopFlag()
stop.catch_signals()
store = connect_store(60)
coordinator = Coordinator(store, rank, stop, share_secret(store, Path(sys.argv[1]), rank, 60), step_timeout=4)
if rank == 1:
    os.kill(os.getpid(), signal.SIGUSR1)
    print(coordinator.wait("stopped", "rank 0 to stop", 60))
else:
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            coordinator.check_stop()
            time.sleep(0.02)
    except StopRequested as stopped:
        coordinator.announce("stopped", f"stopped by {stopped}")
for step in (6, 7):  # a new step has its own time
    coordinator.begin_step(step)
    time.sleep(2 if step == 6 else 60)
"""


SLOW_STEP = """
import sys, time
from pathlib import Path
from dynamo_megatron.runtime.coordination import Coordinator, StopFlag, connect_store
from dynamo_megatron.runtime.signed_store import share_secret

store = connect_store(60)
coordinator = Coordinator(store, 0, StopFlag(), share_secret(store, Path(sys.argv[1]), 0, 60), step_timeout=0.01)
coordinator.begin_step(1)
time.sleep(0.02)
coordinator.end_step()
"""


def test_a_step_that_took_too_long_does_not_go_on_even_if_it_has_ended(tmp_path):
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-P", "-c", SLOW_STEP, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **where}, capture_output=True, text=True, check=False)
    assert done.returncode == 75 and done.stderr.startswith("step 1 took longer than trainer.step_timeout (0.01 s)")


@pytest.mark.full
def test_any_ranks_signal_stops_the_run_and_a_step_has_its_time(tmp_path):
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", RANK, str(tmp_path)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        (_, said), (out, _) = (rank.communicate(timeout=120) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [75, 75], said
    assert out == "stopped by SIGUSR1 on rank 1\n"
    line = "step 7 took longer than trainer.step_timeout (4 s); the same command resumes from the last checkpoint, "
    assert said.splitlines()[-1] == line + "or starts from step 0 if there is none"
