import gzip
import json
import tempfile
from types import SimpleNamespace

import pytest
import torch

from dynamo_megatron.config import Config
from dynamo_megatron.tracking.profiler import StepProfiler


def profiled(tmp_path, replica: int) -> list[str]:
    """The files after four steps on a rank of that replica of the model, with 2 and 3 asked for."""
    config = Config(
        model={"path": "m"}, data={"source": "s"}, output_dir=str(tmp_path), tracking={"profile_steps": [2, 3]}
    )
    profiler = StepProfiler(config, SimpleNamespace(rank=5, dp=SimpleNamespace(rank=lambda: replica)))
    for step in range(1, 5):
        profiler.begin(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        assert (told := profiler.end(step)) is None, told
    return sorted(path.name for path in tmp_path.glob("profile/*"))


def test_the_chosen_steps_have_a_chrome_trace_each(tmp_path):
    assert profiled(tmp_path, 0) == ["step-000002-rank-5.json.gz", "step-000003-rank-5.json.gz"]
    with gzip.open(tmp_path / "profile" / "step-000002-rank-5.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names


def test_no_other_file_is_left_and_none_goes_through_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert len(profiled(tmp_path, 0)) == 2 == len(list((tmp_path / "profile").iterdir()))


def test_a_full_disk_is_told(small_disk):
    with (small_disk / "full").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(AssertionError, match=r"step-000002-rank-5\.json\.gz was not written: .*No space left"):
        profiled(small_disk, 0)
    assert not list(small_disk.glob("profile/*"))


def test_other_replicas_of_the_model_write_none(tmp_path):
    assert profiled(tmp_path, 1) == []
