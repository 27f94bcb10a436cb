"""What a program of the reward `code` can reach, use and leave behind."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.config.reward import CodeConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward import RewardPool
from dynamo_megatron.reward.sandbox import Sandbox

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
SECRET = "s3cret-of-the-run"
READ = """
import os, socket
def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""
"""
READING = [
    "print(socket.create_connection(('127.0.0.1', PORT), 60).recv(100).decode())",
    "other = socket.socket(socket.AF_UNIX); other.connect('\\0' + NAME); print(other.recv(100).decode())",
    "print(read(KEY), read('../' * 20 + KEY))",
    "os.chdir('/tmp'); os.symlink(KEY, 'link'); print(read('link'))",
    "print(read(f'/proc/{PID}/environ'), read(f'/proc/{os.getppid()}/environ'), dict(os.environ))",
    "print([read(f'/proc/{pid}/cmdline') for pid in os.listdir('/proc')], read(f'/proc/{PID}/root{KEY}'))",
    "print(os.pread(DESCRIPTOR, 100, 0).decode())",
]
# Programs that must fail before they print.
HOSTILE = {
    "kills": "os.kill(PID, 9)",
    "kills its parent": "os.kill(os.getppid(), 9) or os._exit(1)",
    "writes to the run": "open(FOLDER + '/written', 'w')",
    "writes to the interpreter": "open('/usr/lib/written', 'w')",
    "writes through a link": "os.symlink(FOLDER, '/tmp/link'); open('/tmp/link/written', 'w')",
    "forks": "os.fork() or os._exit(0)",
    "spawns": "os.posix_spawn('/bin/true', ['true'], {})",
    "uses much memory": "bytearray(2 << 30)",
    "writes a file in memory": "open(os.memfd_create('x'), 'wb').write(bytes(17 << 20))",
    "writes many files": "for n in range(20): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))",
    "opens many files": "for n in range(64): os.dup(0)",
}


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(CodeConfig(seconds=600.0, cpu_seconds=300))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Assignments to the names that the programs use; what they aim at holds SECRET. Its process must live."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "server.key").write_text(SECRET)
    descriptor = os.open(folder / "server.key", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    over_tcp, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0dynamo-{os.getpid()}")
    abstract.listen()
    for listener in (over_tcp, abstract):
        threading.Thread(target=tell, args=(listener,), daemon=True).start()
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()", SECRET]
    with subprocess.Popen(waiting, env={**os.environ, "KEY": SECRET}, stdin=subprocess.PIPE) as other:
        names = {"PORT": over_tcp.getsockname()[1], "NAME": f"dynamo-{os.getpid()}", "DESCRIPTOR": descriptor}
        names |= {"KEY": str(folder / "server.key"), "PID": other.pid, "FOLDER": str(folder)}
        yield "\n".join([READ, *(f"{name} = {value!r}" for name, value in names.items()), ""])
        assert other.poll() is None and os.listdir(folder) == ["server.key"]
        other.stdin.close()
    os.close(descriptor)


def tell(listener):
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(SECRET.encode())


def printed(sandbox, program, longest=1 << 20):
    return sandbox.run("run", program.encode(), b"", longest)


@pytest.mark.parametrize("program", READING, ids=range(len(READING)))
def test_nothing_of_the_run_or_the_host_can_be_read(sandbox, run, monkeypatch, program):
    monkeypatch.setenv("SERVER_KEY", SECRET)
    assert SECRET not in printed(sandbox, run + program).output.decode()


@pytest.mark.parametrize("program", HOSTILE)
def test_a_hostile_program_is_contained(sandbox, run, program):
    result = printed(sandbox, f"{run}{HOSTILE[program]}\nprint('done')")
    assert not result.ok and not result.late and result.output == b""


def test_a_program_has_threads_and_a_folder_of_its_own(sandbox):
    program = """
import sys, threading
threading.stack_size(1 << 26)
sys.setrecursionlimit(100_000)
def deep(n): return n and deep(n - 1) + 1
thread = threading.Thread(target=lambda: print(deep(20_000), file=open("x", "w")))
thread.start(); thread.join(); print(open("/tmp/x").read())
"""
    assert printed(sandbox, program).output.split() == [b"20000"]


@pytest.mark.parametrize("limits", [{"seconds": 1.0, "cpu_seconds": 300}, {"seconds": 600.0, "cpu_seconds": 1}])
def test_time_is_limited_and_nothing_is_left_of_a_program_that_was_ended(limits):
    memory = (1 << 30) + os.getpid()  # in the command line of each
    short = Sandbox(CodeConfig(memory=memory, **limits))
    ignoring = """
import os, signal, threading, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
os.setsid(); os.close(1); os.close(2)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
while True: pass
"""
    assert printed(short, ignoring).late
    assert short.check(b"def f():\n    while True: pass", b"f()").late
    while any(str(memory) in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "there is no bwrap on the PATH; install bubblewrap"),
        ("echo 'bwrap: No permissions to create a new namespace' >&2; exit 1", "No permissions to create a new"),
    ],
)
def test_a_run_is_refused_where_there_is_no_sandbox(tmp_path, monkeypatch, script, words):
    if script is not None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"^reward\.functions: code: ") as error:
        RewardPool(RewardConfig(functions=["code"], workers=1)).start()
    assert words in str(error.value) and "programs are not run without a sandbox" in str(error.value)
    assert "\n" not in str(error.value)


def test_programs_can_have_the_packages_of_another_interpreter(tmp_path):
    own = Sandbox(CodeConfig(seconds=600.0, cpu_seconds=300, python=sys.executable))
    assert printed(own, "import pydantic; print('found')").output == b"found\n"
    with pytest.raises(InputError, match=r"^reward\.code\.python: .*no-python does not start"):
        Sandbox(CodeConfig(python=str(tmp_path / "no-python")))
