"""The shared memory of transport `tensor`, where /dev/shm has no room for it."""

import os
import shutil
import subprocess
import sys

import pytest

FULL = "mount -t tmpfs -o size=1m none /dev/shm && exec "
ASKS = "from dynamo_megatron.resharding.transports.tensor import _shared; _shared(2 << 20)"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a /dev/shm of 1 MiB: as root")
def test_a_full_dev_shm_is_named_in_one_line(tmp_path):
    isolated = ["unshare", "--mount", "--propagation", "private", "sh", "-c", FULL + '"$0" -P -c "$1"']
    done = subprocess.run([*isolated, sys.executable, ASKS], capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("OSError: /dev/shm has no room for 2.10 MB of weights"), done.stderr
    assert "No space left on device" in last and "rollout.sync.bucket_bytes" in last
