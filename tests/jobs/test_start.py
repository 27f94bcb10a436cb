"""A signal ends a run that has not come to its first step, whatever it is doing there."""

import signal

import pytest
from background_run import Run
from living_processes import living

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
    run = Run(tmp_path, *keys)
    # rank 1 may be started late
    run.wait_until(lambda: (tmp_path / "reached").exists() and len(run.family) >= 2, "the data are read by two ranks")
    run.process.send_signal(signal.SIGUSR1)
    code = run.wait()  # and the data never ends
    assert living(run.family) == []
    assert code == 75, run.text
    assert run.text.splitlines()[-1] == (
        "stopped by SIGUSR1 while it started; nothing is saved yet: the same command starts from step 0"
    )
