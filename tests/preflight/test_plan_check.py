"""What the plan says, told on the machine where the run will be: an H100 that is not there."""

import pytest
import torch

GIB = 1 << 30


@pytest.fixture
def h100s(monkeypatch):
    """h100s(count, name=...): as many GPUs here, as far as torch says."""

    def here(count: int, name: str = "NVIDIA H100 80GB HBM3") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, int(79.1 * GIB)))

    return here


def test_without_a_gpu_there_is_nothing_to_reckon_with(check):
    ((level, text),) = check("plan")
    assert level == "skipped" and "--gpu" in text


def test_a_gpu_of_no_known_kind(check, h100s):
    h100s(2, "NVIDIA L40S")
    ((level, text),) = check("plan", ranks=2)
    assert level == "skipped" and "NVIDIA L40S" in text


def test_a_run_that_fits(check, h100s):
    h100s(2)
    ((level, text),) = check("plan", "model.dtype=bfloat16", ranks=2)
    assert level == "ok" and text.startswith("2 x h100-80 in 1 node: fits: ")


def test_idle_gpus_and_a_timeout_are_noted(check, h100s):
    h100s(2)
    keys = ("rollout.servers=1", "rollout.timeout=1e-7")
    found = check("plan", *keys, ranks=2)
    assert found[1][0] == "note" and "1 of 2 GPUs are idle while servers generate" in found[1][1]
    assert found[0][0] == "FAILED" and "cannot work: rollout.timeout is 1e-07 s" in found[0][1]


def test_a_layout_that_does_not_fit(failure, h100s):
    h100s(2)
    assert "GiB too much on the fullest rank" in failure("plan", "trainer.micro_batch_tokens=400000000", ranks=2)
