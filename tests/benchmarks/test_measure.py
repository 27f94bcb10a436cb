import contextlib
import time
from importlib import metadata

import measure
import psutil
import torch

CPU = torch.device("cpu")
MEGABYTE = 1 << 20


def floats(n_bytes: int) -> torch.Tensor:
    return torch.zeros(n_bytes // 4)


def test_peak_is_of_what_lives_at_once():
    def call():
        first = floats(3 * MEGABYTE)
        second = first + 1
        del first
        third = second[: MEGABYTE // 4] * 2
        return second.add_(1), third.view(4, -1)

    assert measure.peak_bytes(call, CPU) == 6 * MEGABYTE
    assert measure.peak_bytes(lambda: [floats(MEGABYTE) for _ in range(5)][-1], CPU) == 5 * MEGABYTE
    assert measure.peak_bytes(lambda: [floats(MEGABYTE).sum() for _ in range(5)], CPU) < 1.1 * MEGABYTE


def test_peak_leaves_out_what_was_there_and_sees_the_backward_pass():
    given = floats(MEGABYTE).requires_grad_()
    assert measure.peak_bytes(lambda: given.detach().mul_(2), CPU) == 0
    # exp keeps its result for the backward pass, which makes the gradient
    assert 2 * MEGABYTE <= measure.peak_bytes(lambda: given.exp().sum().backward(), CPU) < 3.1 * MEGABYTE
    assert given.grad is not None


def test_calls_take_turns_and_warm_up_does_not_count():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = measure.interleaved(calls, CPU, before=lambda: order.append("-"), warm_up=2, rounds=(3, 3))
    assert "".join(order) == "-a-b" * 5
    assert [times[name]["samples"] for name in "ab"] == [3, 3]


def test_rounds_end_with_the_time(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    assert measure.interleaved({"a": lambda: None}, CPU, warm_up=0, rounds=(4, 9))["a"]["samples"] == 4


def test_a_slow_call_sits_out(monkeypatch):
    seconds = {"slow": 1.0, "fast": 0.0}  # not measured: a call may be held up
    monkeypatch.setattr(measure, "SECONDS", 0.5)
    monkeypatch.setattr(measure, "seconds_once", lambda call, device: seconds[call()])
    calls = {"slow": lambda: "slow", "fast": lambda: "fast"}
    times = measure.interleaved(calls, CPU, warm_up=3, rounds=(2, 6))
    assert (times["slow"]["samples"], times["fast"]["samples"]) == (2, 6)


def test_a_command_that_takes_too_long_ends_with_its_children(tmp_path):
    log = tmp_path / "log"
    done = measure.run_logged(["sh", "-c", "echo begun; sleep 600 & echo $!; wait"], log, 3)
    assert done["exit code"] is None and done["log"][0] == "begun" and done["log"][-1] == "ended after 3 s"
    with contextlib.suppress(psutil.NoSuchProcess):
        child, deadline = psutil.Process(int(done["log"][1])), time.monotonic() + 60
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the command's child goes on"
            time.sleep(0.01)
    assert measure.run_logged(["true"], log, 60) == {"exit code": 0}


def test_summary_is_of_the_samples():
    samples = [float(i) for i in range(11)]
    assert measure.summary(samples) == {"median": 5.0, "p10": 1.0, "p90": 9.0, "samples": 11}


def test_the_machine_names_what_is_missing():
    found = measure.machine(["torch", "no-such-package"])
    assert found["torch"] == metadata.version("torch")
    assert found["no-such-package"] is None and found["cores"] >= 1
