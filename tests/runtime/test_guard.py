"""What a guarded command leaves behind: nothing, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from living_processes import living

from dynamo_megatron.runtime import guard

GUARD = [sys.executable, "-P", "-m", guard.NAME]
COMMAND = """
import mmap, multiprocessing, os, sys, time
from multiprocessing import shared_memory

def child(name, lock):
    os.setsid()
    segment = shared_memory.SharedMemory(name)
    with open(f"/dev/shm/{name}.plain", "w+b") as file:
        file.truncate(4096)
        plain = mmap.mmap(file.fileno(), 4096)
    print(name, lock._semlock.name.strip("/"), os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    segment, lock = shared_memory.SharedMemory(create=True, size=4096), spawn.Lock()
    spawn.Process(target=child, args=(segment.name, lock)).start()
    time.sleep(3600)
"""


@pytest.mark.parametrize("end", ["SIGKILL of the command", "SIGSTOP of the command", "SIGKILL of the parent"])
def test_processes_shared_memory_and_folders_go(tmp_path, end):
    folders = [tmp_path / "folder", tmp_path / "meeting"]
    for folder in folders:
        folder.mkdir()
        (folder / "socket").touch()
    (tmp_path / "command.py").write_text(COMMAND)
    words = [*GUARD, *map(str, folders), "--", sys.executable, "-P", str(tmp_path / "command.py")]
    starts = f"import subprocess\nsubprocess.Popen({words}, stdin=subprocess.PIPE).wait()"
    parent = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True)
    name, lock, child = parent.stdout.readline().split()
    (guarding,) = psutil.Process(parent.pid).children()
    family = guarding.children(recursive=True)
    (command,) = guarding.children()
    # Of a semaphore the process that made it maps a first name, which is gone.
    left = [Path("/dev/shm", file) for file in (name, f"sem.{lock}", f"{name}.plain")]
    assert int(child) in [process.pid for process in family] and all(path.exists() for path in left)
    if end == "SIGKILL of the command":
        command.kill()
    else:
        if end == "SIGSTOP of the command":
            command.suspend()
        parent.kill()
    parent.communicate(timeout=300)  # all that has its output has ended
    assert living(family) == []
    assert not [path for path in [*left, *folders] if path.exists()]


def test_shared_memory_of_a_process_that_was_killed_before_goes(tmp_path):
    segment, looked = Path("/dev/shm", f"{os.getpid()}.plain"), tmp_path / "looked"
    script = "import mmap, os, time\n"
    script += f"with open({str(segment)!r}, 'w+b') as file:\n    file.truncate(4096)\n"
    script += "    plain = mmap.mmap(file.fileno(), 4096)\n"
    script += f"while not os.path.exists({str(looked)!r}): time.sleep(0.05)\nos.kill(os.getpid(), 9)"
    code = f"""import pathlib, sys
from dynamo_megatron.runtime import guard
def look(pids, real=guard.shared_memory_of):
    if {str(segment)!r} in (found := real(pids)): pathlib.Path({str(looked)!r}).touch()
    return found
guard.shared_memory_of = look
guard.main([], [sys.executable, '-c', {script!r}])"""
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(300) == -signal.SIGKILL
    assert not segment.exists()


def guarded(*words: str, script: str) -> subprocess.CompletedProcess:
    """Runs `script` under a guard whose stdin stays open until the script has ended."""
    with subprocess.Popen([*GUARD, *words, "--", sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        return subprocess.CompletedProcess(words, process.wait(300))


def test_the_guard_ends_as_its_command_does():
    assert guarded(script="raise SystemExit(3)").returncode == 3
    assert guarded(script="import os\nos.abort()").returncode == -signal.SIGABRT


def test_a_guard_below_another_clears_away_too(tmp_path):
    (tmp_path / "inner").mkdir()
    inner = [*GUARD, str(tmp_path / "inner"), "--", "sleep", "3600"]
    script = f"import subprocess\nsubprocess.Popen({inner}, stdin=subprocess.PIPE)"
    assert guarded(script=script).returncode == 0
    assert not (tmp_path / "inner").exists()


def test_sigusr1_is_passed_on_and_sigterm_is_not():
    script = "import signal, sys\nprint('up', flush=True)\nsys.exit(signal.sigwait({10, 15}))"
    script = f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {{10, 15}})\n{script}"
    words = [*GUARD, "--", sys.executable, "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        process.send_signal(signal.SIGUSR1)
        assert process.wait(300) == signal.SIGUSR1
