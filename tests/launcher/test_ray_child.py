"""The process that an actor of `launch ray` holds, without Ray's cluster."""

from __future__ import annotations

import os
import sys
import time

import pytest

SAVES = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("up", flush=True)
try:
    time.sleep(60)
finally:
    time.sleep(1)
    print("saved", flush=True)
"""


def test_a_child_that_is_stopped_has_time_to_save(tmp_path):
    pytest.importorskip("ray")
    from dynamo_megatron.launcher.ray_child import Child

    child, said, code = Child(), "", None
    assert child.start([sys.executable, "-c", SAVES], {}, str(tmp_path), str(tmp_path / "log")) is None
    deadline = time.monotonic() + 60
    while code is None and time.monotonic() < deadline:
        code, text = child.poll()
        if "up" in text:
            child.stop()
        said += text
        time.sleep(0.05)
    assert (code, said) == (75, "up\nsaved\n")


WRITES = """
import pathlib, sys, time
def wait(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.02)
print("first", flush=True)
wait("one")
print("x" * 1000, "\\nsecond\\nhalf of ", end="", flush=True)
wait("two")
print("a line", flush=True)
"""


def test_a_log_that_is_moved_between_two_polls_loses_no_line(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from dynamo_megatron.launcher.ray_child import Child
    from dynamo_megatron.runtime import log_files

    monkeypatch.setattr(log_files, "LOG_BYTES", 8192)
    log, child, said, code = tmp_path / "log", Child(), "", None
    log.write_text("of an earlier start\n" * 500)
    assert child.start([sys.executable, "-c", WRITES], {}, str(tmp_path), str(log)) is None
    deadline = time.monotonic() + 60
    while "first" not in said and time.monotonic() < deadline:
        said += child.poll()[1]
        time.sleep(0.05)
    (tmp_path / "one").touch()
    while not log.read_text().endswith("half of ") and time.monotonic() < deadline:
        time.sleep(0.05)
    descriptor = log_files.open_log(log, 0o644)
    log_files.bound_log(descriptor)
    os.close(descriptor)
    assert log.read_bytes() == b""
    (tmp_path / "two").touch()
    while code is None and time.monotonic() < deadline:
        code, text = child.poll()
        said += text
        time.sleep(0.05)
    assert (code, said) == (0, f"first\n{'x' * 1000} \nsecond\nhalf of a line\n")
