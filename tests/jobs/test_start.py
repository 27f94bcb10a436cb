"""A signal ends a run that has not come to its first step, whatever it is doing there."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

PROBLEMS = """
import ctypes, pathlib

def holds_the_interpreter():
    pathlib.Path("reached").touch()
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # PyDLL keeps the lock: no signal handler runs
    for _ in range(2):
        c.pthread_mutex_lock(mutex)  # the second call never ends, whatever signal comes
    yield {"problem": "1+1?", "answer": "2"}
"""


@pytest.mark.full
def test_a_signal_ends_the_start(tiny_model, tmp_path):
    (tmp_path / "hard_data.py").write_text(PROBLEMS)
    keys = [f"model.path={tiny_model}", "model.dtype=float32", "data.source=hard_data:holds_the_interpreter"]
    keys += ["data.limit=1000000000", "rollout.max_new_tokens=16", "parallel.pp=2", "output_dir=run"]
    with open(tmp_path / "console.log", "w") as log:
        run = subprocess.Popen(
            [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *keys],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    launcher, ranks = psutil.Process(run.pid), []
    while not (tmp_path / "reached").exists() or len(ranks) < 2:  # rank 1 may be started late
        assert run.poll() is None, (tmp_path / "console.log").read_text()
        time.sleep(0.05)
        ranks = launcher.children(recursive=True)
    run.send_signal(signal.SIGUSR1)
    try:
        code = run.wait(240)  # and the data never ends
    finally:
        run.kill()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)
    said = (tmp_path / "console.log").read_text()
    assert code == 75, said
    assert said.splitlines()[-1] == (
        "stopped by SIGUSR1 while it started; nothing is saved yet: the same command starts from step 0"
    )
