"""What a program of the reward `code` can reach. Every attempt is also made without the sandbox, where it succeeds."""

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

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
import os
def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""
"""
ATTEMPTS = {
    "TCP to the host's loopback": """
import socket
print(socket.create_connection(("127.0.0.1", PORT), 60).recv(100).decode())
""",
    "an abstract Unix socket": """
import socket
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + NAME)
print(connection.recv(100).decode())
""",
    "the file of a server's key": "print(read(KEY))",
    "the file of a server's key, by a symbolic link": """
os.chdir(os.environ.get("TMPDIR", "/tmp"))
os.symlink(KEY, "link")
print(read("link"))
""",
    "the file of a server's key, from a folder above": "print(read('../' * 20 + KEY))",
    "the environment of the run": "print(read(f'/proc/{PID}/environ'), read(f'/proc/{os.getppid()}/environ'))",
    "its own environment": "print(dict(os.environ))",
    "the command line of another process": "print([read(f'/proc/{pid}/cmdline') for pid in os.listdir('/proc')])",
    "the files of another process": "print(read(f'/proc/{PID}/root{KEY}'))",
    "a descriptor that the run has open": "print(os.pread(DESCRIPTOR, 100, 0).decode())",
}


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(CodeConfig(seconds=60.0, cpu_seconds=30))


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """The names that the attempts use; what they aim at holds SECRET."""
    folder = tmp_path_factory.mktemp("run")
    key = folder / "server.key"
    key.write_text(SECRET)
    key.chmod(0o600)
    descriptor = os.open(key, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    over_tcp, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0dynamo-{os.getpid()}")
    abstract.listen()
    for listener in (over_tcp, abstract):
        threading.Thread(target=tell, args=(listener,), daemon=True).start()
    environment = {**os.environ, "SERVER_KEY": SECRET, "TMPDIR": str(folder)}
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()", SECRET]
    with subprocess.Popen(waiting, env=environment, stdin=subprocess.PIPE) as other:
        names = {"PORT": over_tcp.getsockname()[1], "NAME": f"dynamo-{os.getpid()}", "KEY": str(key)}
        yield {**names, "PID": other.pid, "DESCRIPTOR": descriptor, "FOLDER": str(folder)}, environment
        other.stdin.close()
    os.close(descriptor)
    over_tcp.close()
    abstract.close()


def tell(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.sendall(SECRET.encode())


def attempt(surroundings, program):
    names, _ = surroundings
    return "\n".join([READ, *(f"{name} = {value!r}" for name, value in names.items()), program])


def printed(sandbox, program, stdin=b"", longest=1 << 20):
    return sandbox.run("run", program.encode(), stdin, longest)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_nothing_of_the_run_or_the_host_can_be_read(sandbox, surroundings, monkeypatch, name):
    program, (_, environment) = attempt(surroundings, ATTEMPTS[name]), surroundings
    for variable in ("SERVER_KEY", "TMPDIR"):
        monkeypatch.setenv(variable, environment[variable])
    outside = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, close_fds=False)
    assert SECRET in outside.stdout, outside.stderr
    assert SECRET not in printed(sandbox, program).output.decode()


def test_nothing_is_written_outside_of_its_own_folder(sandbox, surroundings):
    folder = surroundings[0]["FOLDER"]
    places = [f"{folder}/written", "/usr/lib/written", "/dev/shm/written", "/dev/written", "/written"]
    places += [f"{Path.home()}/written", f"/tmp/written-{os.getpid()}"]
    program = f"""
import os
for place in {places}:
    try:
        open(place, "w").close()
        print(place)
    except OSError:
        pass
"""
    alone = program.replace(str(places), str(places[:1]))
    assert subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True).stdout.split() == places[:1]
    os.remove(places[0])
    assert printed(sandbox, program).output.decode().split() == places[-1:]
    assert not [place for place in places if os.path.exists(place)]


@pytest.mark.parametrize("target", ["FOLDER", "/usr/lib", "/proc/self/root/dev/shm", "/.."])
def test_nothing_is_written_through_a_symbolic_link_to_a_folder(sandbox, surroundings, tmp_path, target):
    folder = surroundings[0]["FOLDER"] if target == "FOLDER" else target
    name = f"written-{os.getpid()}"
    program = f"""
import os
os.symlink({folder!r}, LINK)
open(LINK + "/{name}", "w").close()
print("written")
"""
    if target == "FOLDER":
        outside = program.replace("LINK", repr(str(tmp_path / "link")))
        assert subprocess.run([sys.executable, "-c", outside], capture_output=True, text=True).stdout == "written\n"
        os.remove(f"{folder}/{name}")
    result = printed(sandbox, program.replace("LINK", repr("/tmp/link")))
    assert not result.ok and result.output == b""
    assert not os.path.exists(f"{folder}/{name}")


def test_no_other_process_can_be_ended(sandbox):
    program = """
import os, sys
for pid in {int(sys.argv[1]) if len(sys.argv) > 1 else VICTIM, os.getppid()}:
    try:
        os.kill(pid, 9)
    except OSError:
        pass
print("still here")
"""
    for inside in (False, True):
        with subprocess.Popen(["sleep", "600"]) as victim:
            text = program.replace("VICTIM", str(victim.pid))
            if inside:
                assert printed(sandbox, text).output == b"still here\n"
                assert victim.poll() is None
                victim.kill()
            else:  # in a process whose parent may end: a shell
                subprocess.run(["sh", "-c", '"$0" -c "$1"; true', sys.executable, text], capture_output=True)
                assert victim.wait(timeout=60) == -9


def test_descriptors_of_processes_are_refused(sandbox):
    program = """
import ctypes, errno
call = ctypes.CDLL(None, use_errno=True).syscall
for number, *arguments in ((434, 1, 0), (438, 0, 0, 0)):  # pidfd_open, pidfd_getfd
    assert call(number, *arguments) == -1
    print(errno.errorcode[ctypes.get_errno()])
"""
    assert printed(sandbox, program).output.split() == [b"EPERM", b"EPERM"]


@pytest.mark.parametrize(
    "start",
    [
        "os.fork() or os._exit(0)",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run([sys.executable, '-c', ''], check=True)",
        "multiprocessing.get_context('fork').Process(target=print).start()",
    ],
)
def test_no_process_can_be_started(sandbox, start):
    program = f"import multiprocessing, os, subprocess, sys\n{start}\nprint('started')"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
    result = printed(sandbox, program)
    assert not result.ok and b"started" not in result.output


def test_threads_can_be_started_and_are_not_many(sandbox):
    few = """
import threading
threading.stack_size(1 << 26)
def deep(n): return n and deep(n - 1) + 1
import sys; sys.setrecursionlimit(100_000)
thread = threading.Thread(target=lambda: print(deep(20_000)))
thread.start(); thread.join()
"""
    assert printed(sandbox, few).output == b"20000\n"
    many = """
import os, threading, time
threading.stack_size(1 << 15)
while True:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    os.write(1, b".")
"""
    started = len(printed(sandbox, many).output)
    # The kernel does not count root's; then the limit of address space is the one that ends it.
    assert 0 < started < (64 if os.getuid() else 10_000)


@pytest.mark.parametrize(
    "program",
    [
        "bytearray(2 << 30)",
        "import mmap; mmap.mmap(-1, 2 << 30)",
        "import os; os.memfd_create('x')",
        "open('/tmp/x', 'wb').write(bytes(17 << 20))",
        "for n in range(20): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))",
        "import os\nfor n in range(64): os.dup(0)",
    ],
)
def test_memory_files_and_descriptors_are_limited(sandbox, program):
    result = printed(sandbox, program + "\nprint('enough')")
    assert not result.ok and not result.late and result.output == b""


def test_time_is_limited():
    sandbox = Sandbox(CodeConfig(seconds=1.0, cpu_seconds=30))
    start = time.monotonic()
    assert printed(sandbox, "import os; os.close(1); os.close(2)\nwhile True: pass").late
    assert sandbox.check(b"def f():\n    while True: pass", b"f()").late
    assert time.monotonic() - start < 20
    sandbox = Sandbox(CodeConfig(seconds=300.0, cpu_seconds=1))
    start = time.monotonic()
    assert printed(sandbox, "while True: pass").late
    assert time.monotonic() - start < 100


def test_output_is_limited(sandbox):
    result = printed(sandbox, "while True: print('x' * 1000)", longest=10_000)
    assert not result.ok and not result.late and len(result.output) == 10_000


def test_nothing_is_left_of_a_program_that_was_ended():
    memory = (1 << 30) + os.getpid()  # in the command line of each
    short = Sandbox(CodeConfig(seconds=1.0, cpu_seconds=30, memory=memory))
    ignoring = """
import os, signal, threading, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
os.setsid()
threading.Thread(target=time.sleep, args=(600,)).start()
time.sleep(600)
"""
    assert printed(short, ignoring).late
    assert not short.check(b"import os\nos._exit(0)", b"f()").ok
    end = time.monotonic() + 60
    while left := [p for p in psutil.process_iter(["cmdline"]) if str(memory) in (p.info["cmdline"] or [])]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "there is no bwrap on the PATH; install bubblewrap"),
        ("echo 'bwrap: No permissions to create a new namespace' >&2; exit 1", "No permissions to create a new"),
        ("exit 1", "no sandbox can be made here"),
    ],
)
def test_a_run_is_refused_where_there_is_no_sandbox(tmp_path, monkeypatch, script, words):
    if script is not None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = RewardPool(RewardConfig(functions=["code"], workers=1))
    with pytest.raises(InputError, match=r"^reward\.functions: code: ") as error:
        pool.start()
    assert words in str(error.value) and "programs are not run without a sandbox" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_interpreter_that_does_not_start_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"^reward\.code\.python: .*no-python does not start"):
        Sandbox(CodeConfig(python=str(tmp_path / "no-python")))


def test_an_interpreter_beside_usr_is_put_into_the_sandbox(tmp_path):
    """Its folder begins with the letters /usr and is no part of /usr, which is there anyway."""
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho /usr2/python\necho /usr\n")
    interpreter.chmod(0o755)
    with pytest.raises(InputError, match="find source path /usr2/python: "):
        Sandbox(CodeConfig(python=str(interpreter)))


def test_a_worker_with_many_open_files_reads_what_a_program_prints(sandbox):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2048), hard))
    try:
        with contextlib.ExitStack() as files:
            while files.enter_context(open(os.devnull)).fileno() < 1100:
                pass
            assert printed(sandbox, "print('read')").output == b"read\n"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_programs_can_have_the_packages_of_another_interpreter():
    own = Sandbox(CodeConfig(seconds=60.0, cpu_seconds=30, python=sys.executable))
    assert printed(own, "import pydantic; print('found')").output == b"found\n"
