"""The process that an actor of `launch ray` holds, without Ray's cluster."""

from __future__ import annotations

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
