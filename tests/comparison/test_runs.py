"""Processes of a comparison: parts side by side, signals, the folder that a killed comparison's ranks still hold."""

import asyncio
import fcntl
import os
import signal
import sys
import time

import pytest

from dynamo_megatron.comparison import runs
from dynamo_megatron.comparison.runs import Stop, side_by_side
from dynamo_megatron.config.files import ConfigError

REFUSED_WITHIN = 60.0  # seconds for a refusal after 0.2 s, on a machine that holds this process up
PART = """
import os, pathlib, signal, sys, time
folder, part = pathlib.Path(sys.argv[1]), sys.argv[3]
assert sys.argv[2] == "--part"
name = part.replace("/", "-of-")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(folder / f"{name}.started").write_text(" ".join(map(str, sorted(os.sched_getaffinity(0)))))
if (folder / "wait").exists():
    time.sleep(60)
sys.exit(1 if name == "2-of-2" else 0)
"""


def started(folder) -> dict[str, set[int]]:
    return {file.stem: set(map(int, file.read_text().split())) for file in folder.glob("*.started") if file.read_text()}


async def watched(work, stop: Stop, until=None) -> int:
    stop.watch()
    running = asyncio.ensure_future(work)
    deadline = time.monotonic() + 60
    while until is not None and not until():
        assert time.monotonic() < deadline, "the parts did not start within 60 s"
        await asyncio.sleep(0.05)
    if until is not None:
        os.kill(os.getpid(), signal.SIGTERM)
    return await running


@pytest.fixture
def part(tmp_path):
    (tmp_path / "part.py").write_text(PART)
    return [sys.executable, "-P", str(tmp_path / "part.py"), str(tmp_path)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_parts_have_cores_of_their_own_and_the_worst_exit_code_counts(part, tmp_path):
    assert asyncio.run(watched(side_by_side(part, 2, Stop()), Stop())) == 1
    first, second = started(tmp_path)["1-of-2"], started(tmp_path)["2-of-2"]
    assert first and second and not first & second and first | second == os.sched_getaffinity(0)


def test_a_signal_reaches_every_part(part, tmp_path):
    (tmp_path / "wait").touch()
    stop, before = Stop(), time.monotonic()
    jobs = min(2, len(os.sched_getaffinity(0)))
    code = asyncio.run(watched(side_by_side(part, jobs, stop), stop, until=lambda: len(started(tmp_path)) == jobs))
    assert code == 75 and stop.asked == signal.SIGTERM and stop.code == 75 and time.monotonic() - before < 50


def test_more_jobs_than_cores_are_refused(part):
    with pytest.raises(ConfigError, match=r"--jobs: 9999 for \d+ cores; give fewer"):
        asyncio.run(side_by_side(part, 9999, Stop()))


def test_a_run_s_folder_is_waited_for(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "grpo"
    asyncio.run(runs._released(folder))
    assert folder.parent.is_dir() and not folder.exists()
    folder.mkdir()

    async def waits(seconds: float) -> bool:
        """Whether it goes on waiting for so long while the folder is in use."""
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting = asyncio.create_task(runs._released(folder))
            await asyncio.wait([waiting], timeout=seconds)
            waited = not waiting.done()
        await waiting
        return waited

    assert asyncio.run(waits(1.0))
    monkeypatch.setattr(runs, "RELEASED_WITHIN", 0.2)
    with pytest.raises(ConfigError, match=r"grpo: waited 0.2 s for another process to stop training there; end it"):
        asyncio.run(waits(REFUSED_WITHIN))
