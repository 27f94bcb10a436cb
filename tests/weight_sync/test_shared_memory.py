"""The shared memory of transport `tensor`, where /dev/shm has no room for it."""

import os
import shutil
import subprocess
import sys

import pytest

FULL = "mount -t tmpfs -o size=1m none /dev/shm && exec "
ASKS = "from dynamo_megatron.weight_sync.transports.tensor import _shared; _shared(2 << 20)"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a /dev/shm of 1 MiB: as root")
def test_a_full_dev_shm_is_named_in_one_line(tmp_path):
    isolated = ["unshare", "--mount", "--propagation", "private", "sh", "-c", FULL + '"$0" -P -c "$1"']
    done = subprocess.run([*isolated, sys.executable, ASKS], capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("OSError: /dev/shm has no room for 2.10 MB of weights"), done.stderr
    assert "No space left on device" in last and "rollout.sync.bucket_bytes" in last


OPENS_TOO_MUCH = """
import contextlib, os, resource
from dynamo_megatron.weight_sync.transports.tensor import _shared
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with contextlib.suppress(OSError):
    while True:
        os.open("/dev/null", os.O_RDONLY)
_shared(1 << 20)
"""


def test_another_failure_of_shared_memory_is_not_called_a_full_one():
    done = subprocess.run([sys.executable, "-P", "-c", OPENS_TOO_MUCH], capture_output=True, text=True, timeout=120)
    assert "Too many open files" in done.stderr and "has no room" not in done.stderr, done.stderr
