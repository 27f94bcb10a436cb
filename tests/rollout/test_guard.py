"""What a guarded command leaves behind: nothing, however it ends."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from living_processes import living

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardPool
from dynamo_megatron.rollout.guard import LOOK_EVERY, POLL_EVERY
from dynamo_megatron.runtime.process_signals import ASK_TO_STOP, keeping
from dynamo_megatron.types import Prompt

COMMAND = """
import multiprocessing, pathlib, sys, tempfile, time
from multiprocessing import shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(100,))
    child.start()
    pathlib.Path(sys.argv[1]).write_text(f"{segment.name} {lock._semlock.name.strip('/')} {child.pid}")
    time.sleep(100)
"""


@pytest.mark.parametrize("end", ["stdin", "SIGTERM", "SIGKILL of the command", "SIGSTOP of the command"])
def test_processes_shared_memory_and_the_folder_go(tmp_path, end):
    folder, meeting, said = tmp_path / "folder", tmp_path / "meeting", tmp_path / "said"
    folder.mkdir()
    meeting.mkdir()
    (folder / "socket").touch()
    (tmp_path / "command.py").write_text(COMMAND)
    command = [sys.executable, "-P", str(tmp_path / "command.py"), str(said)]
    words = [sys.executable, "-P", "-m", "dynamo_megatron.rollout.guard", str(folder), str(meeting), "--", *command]
    guard = subprocess.Popen(words, stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (said.exists() and said.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    name, lock, child = said.read_text().split()
    family = psutil.Process(guard.pid).children(recursive=True)
    mapped = {
        line.split()[-1]
        for p in family
        for line in Path(f"/proc/{p.pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line and not line.endswith("(deleted)")
    }
    assert int(child) in [p.pid for p in family] and f"/dev/shm/{name}" in mapped
    # Of a semaphore the process that made it maps a first name, which is gone.
    semaphore = f"/dev/shm/sem.{lock}"
    assert os.path.exists(semaphore) and semaphore not in mapped
    mapped.add(semaphore)
    process = psutil.Process(guard.pid).children()[0]
    if end == "SIGTERM":
        guard.terminate()
    elif end == "SIGKILL of the command":
        time.sleep(LOOK_EVERY + 2 * POLL_EVERY)  # the guard must have seen what it maps
        process.kill()
    else:
        if end == "SIGSTOP of the command":
            process.send_signal(signal.SIGSTOP)
        guard.stdin.close()
    assert guard.wait(15) == -signal.SIGKILL
    left = living(family)
    assert left == [] and not [path for path in mapped if os.path.exists(path)]
    assert not folder.exists() and not meeting.exists()


RUNS_A_PROGRAM = """
import subprocess
def ends_by_sigterm(prompt, response):
    return float(subprocess.run(["timeout", "1", "sleep", "60"]).returncode)
"""


def test_a_program_of_a_reward_function_can_be_ended_by_sigterm(tmp_path, monkeypatch):
    """Though the workers come from a process that has it blocked, as the rollout process has."""
    (tmp_path / "runs_a_program.py").write_text(RUNS_A_PROGRAM)
    monkeypatch.chdir(tmp_path)
    pool = RewardPool(RewardConfig(functions=["runs_a_program:ends_by_sigterm"], workers=1, deadline=30))
    with keeping(*ASK_TO_STOP):
        pool.start()
        try:
            score = asyncio.run(pool.score(Prompt("p", text="?", answer="1"), "response"))
        finally:
            pool.close()
    assert score.reward == 124  # what `timeout` returns after its signal


PRINTING = """
import pathlib, sys, time
for i in range(10 ** 6):
    print(f"line {i} " + 2000 * "x", flush=True)
    pathlib.Path(sys.argv[1]).write_text(str(i))
    time.sleep(0.01)
"""


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_command_goes_on_while_its_log_is_on_a_full_disk(tmp_path, small_disk):
    folder, said = tmp_path / "folder", tmp_path / "said"
    folder.mkdir()
    (small_disk / "ballast").write_bytes(bytes(1 << 15))
    (tmp_path / "command.py").write_text(PRINTING)
    command = [sys.executable, "-P", "-m", "dynamo_megatron.rollout.guard", str(folder), "--"]
    with (small_disk / "log").open("ab") as log:
        guard = subprocess.Popen(
            [*command, sys.executable, "-P", str(tmp_path / "command.py"), str(said)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    wait_for_line(said, 100)  # 200 kB
    assert guard.poll() is None and (small_disk / "log").stat().st_size < 1 << 16
    full = wait_for_line(said, 100)
    (small_disk / "ballast").unlink()
    wait_for_line(said, full + 20)
    guard.stdin.close()
    assert guard.wait(15) == -signal.SIGKILL
    numbers = [int(number) for number in re.findall(r"line (\d+) ", (small_disk / "log").read_text())]
    assert numbers[0] == 0 and max(numbers) > full


def wait_for_line(said: Path, number: int) -> int:
    """Returns the number of the line that has been reached. The file is empty for a moment whenever it is written."""
    deadline = time.monotonic() + 300
    while not (said.exists() and (text := said.read_text()) and int(text) >= number):
        assert time.monotonic() < deadline, f"waited 300 s for line {number}"
        time.sleep(0.05)
    return int(text)
