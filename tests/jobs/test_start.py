"""A signal ends a run that has not come to its first step, whatever it is doing there."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

PROBLEMS = """
import ctypes, itertools, pathlib

def endless():
    for number in itertools.count():
        if number == 1000:
            pathlib.Path("reached").touch()
        yield {"problem": f"{number}+1?", "answer": str(number + 1)}

def holds_the_interpreter():
    pathlib.Path("reached").touch()
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # PyDLL keeps the lock: no signal handler runs
    for _ in range(2):
        c.pthread_mutex_lock(mutex)  # the second call never ends, whatever signal comes
    yield {"problem": "1+1?", "answer": "2"}
"""


def signalled(folder, model, source, number):
    """(exit code, output) of a training that gets a signal while it reads its data."""
    (folder / "hard_data.py").write_text(PROBLEMS)
    keys = [f"model.path={model}", "model.dtype=float32", f"data.source=hard_data:{source}", "data.limit=1000000000"]
    keys += ["rollout.max_new_tokens=16", "parallel.pp=2", "output_dir=run"]
    with open(folder / "console.log", "w") as log:
        run = subprocess.Popen(
            [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *keys],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    launcher, ranks = psutil.Process(run.pid), []
    while not (folder / "reached").exists() or len(ranks) < 2:  # rank 1 may be started late
        assert run.poll() is None, (folder / "console.log").read_text()
        time.sleep(0.05)
        ranks = launcher.children(recursive=True)
    run.send_signal(number)
    try:
        code = run.wait(240)  # and the data never ends
    finally:
        run.kill()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)
    return code, (folder / "console.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "number", "code"),
    [
        ("endless", signal.SIGINT, 130),
        ("holds_the_interpreter", signal.SIGUSR1, 75),
    ],
)
def test_a_signal_ends_the_start(tiny_model, tmp_path, source, number, code):
    ended, said = signalled(tmp_path, tiny_model, source, number)
    assert ended == code, said
    if code == 75:
        assert said.splitlines()[-1] == (
            f"stopped by {number.name} while it started; nothing is saved yet: the same command starts from step 0"
        )
