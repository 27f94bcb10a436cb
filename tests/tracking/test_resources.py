import mmap
import os
import subprocess
import sys
import time

import psutil
import pytest

from dynamo_megatron.tracking.resources import ResourceMeter, resident_memory, resource_metrics

MB = 1_000_000
HOLD = "block = bytearray(b'x') * 100_000_000; print(flush=True); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"
# In a process of its own, which has no children but these: those of other tests may end meanwhile. It prints what
# 100 MB in a child of a child add.
GROWN = f"""
import subprocess, sys
from pathlib import Path
from dynamo_megatron.tracking.resources import ResourceMeter, resource_metrics
sample = [ResourceMeter().sample()]
before = resource_metrics(sample, Path("."))["resources/rollout_memory"]
child = subprocess.Popen([sys.executable, "-c", {PARENT!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(resource_metrics(sample, Path("."))["resources/rollout_memory"] - before)
child.communicate(b"\\n")
"""


def test_a_rank_s_own_memory_grows_with_what_it_holds():
    meter = ResourceMeter()
    before = meter.sample()
    with mmap.mmap(-1, 100 * MB) as block:  # pages of its own: what earlier tests have freed may be there still
        block.write(b"x" * (100 * MB))
        after = meter.sample()
    assert 95 * MB < after["host_memory"] - before["host_memory"] < 150 * MB
    assert before.keys() == {"host_memory", "gpu_memory"}


def test_the_largest_rank_counts(tmp_path):
    per_rank = [{"host_memory": 5, "gpu_memory": 9}, {"host_memory": 7, "gpu_memory": 8}]
    metrics = resource_metrics(per_rank, tmp_path)
    assert (metrics["resources/host_memory_max"], metrics["resources/gpu_memory_max"]) == (7, 9)


def test_the_memory_of_descendants_is_the_rollouts():
    done = subprocess.run([sys.executable, "-P", "-c", GROWN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 100 * MB < int(done.stdout) < 150 * MB


def test_a_process_that_ends_while_it_is_counted_counts_nothing():
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    listed = [psutil.Process(ended.pid), psutil.Process()]
    ended.communicate(b"\n")
    assert resident_memory(listed[:1]) == 0
    assert resident_memory(listed) > 1 * MB


def test_a_busy_core_is_seen_and_the_disk_is_that_of_the_output(tmp_path):
    begin, spent = time.monotonic(), time.process_time()
    sample = [ResourceMeter().sample()]
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    spent = time.process_time() - spent  # less than 0.5 s where this process was held up
    metrics = resource_metrics(sample, tmp_path)
    share = spent / (time.monotonic() - begin) / os.cpu_count()
    assert 0.8 * share < metrics["resources/cpu"] <= 1.0
    disk = os.statvfs(tmp_path)
    assert metrics["resources/disk_free"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.01)


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="no CUDA device")
def test_the_gpu_peak_is_of_the_time_since_the_last_sample():
    import torch

    meter = ResourceMeter()
    meter.sample()
    block = torch.zeros(100 * MB, dtype=torch.uint8, device="cuda")
    del block
    assert 100 * MB <= meter.sample()["gpu_memory"] < 110 * MB
    assert meter.sample()["gpu_memory"] < 10 * MB
