"""Memory and cores of a step, and its profile."""

import gzip
import json
import os
from types import SimpleNamespace

import pytest
import torch

from dynamo_megatron.config import Config
from dynamo_megatron.tracking.resources import StepProfiler, resource_metrics

MB = 1_000_000


def test_the_largest_rank_and_the_disk_of_the_output_count(tmp_path):
    metrics = resource_metrics([(5, 9), (7, 8)], tmp_path)
    assert (metrics["resources/host_memory_max"], metrics["resources/gpu_memory_max"]) == (7, 9)
    disk = os.statvfs(tmp_path)
    assert metrics["resources/disk_free"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.01)


@pytest.mark.parametrize("replica", [0, 1])
def test_the_chosen_steps_have_a_chrome_trace_each_from_one_replica(tmp_path, replica):
    tracking = {"profile_steps": [2, 3]}
    config = Config(model={"path": "m"}, data={"source": "s"}, output_dir=str(tmp_path), tracking=tracking)
    profiler = StepProfiler(config, SimpleNamespace(rank=5, dp=SimpleNamespace(rank=lambda: replica)))
    for step in range(1, 5):
        profiler.begin(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.end(step)
    names = [f"step-00000{step}-rank-5.json.gz" for step in (2, 3)] if replica == 0 else []
    assert sorted(path.name for path in tmp_path.glob("profile/*")) == names
    for name in names:
        with gzip.open(tmp_path / "profile" / name) as file:
            assert "aten::mm" in {event.get("name") for event in json.load(file)["traceEvents"]}
