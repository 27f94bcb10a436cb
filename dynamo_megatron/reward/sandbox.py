"""Programs that a model wrote, run by bubblewrap in namespaces of their own.

What such a program has: the interpreter and /usr, read-only; a folder /tmp of its own, in memory; null, zero and random
devices; its standard streams. What it has not: a network, other processes, /proc, other files, the environment, more
processes than one. `harness.py` sets its limits of time, memory, files and threads from inside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_megatron.config.reward import CodeConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward import harness
from dynamo_megatron.runtime.plain_text import on_one_line

NAMESPACES = ("user", "ipc", "pid", "net", "uts", "cgroup-try")
NOBODY = "65534"
IF_THERE = ("/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ENVIRONMENT = {
    **{"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    **{"PYTHONHASHSEED": "0", "PYTHONINTMAXSTRDIGITS": "0"},  # 0: programs may print integers of any length
}
HARNESS = "/harness.py"
FILE_SIZE = 16 << 20  # bytes of all files in the program's temporary folder
# AUDIT_ARCH and the numbers of clone, clone3, fork and vfork (aarch64 has no such calls)
MACHINES = {"x86_64": (0xC000003E, 56, 435, 57, 58), "aarch64": (0xC00000B7, 220, 435, 0xFFFFFFFF, 0xFFFFFFFF)}
START_TIMEOUT = 60.0  # seconds; an interpreter on a busy network file system takes long
MESSAGE = 4096  # bytes of what bubblewrap or the harness says
LATE = (None, 128 + signal.SIGKILL)  # exit codes: none in time; that at the limit of CPU time
MEND = (
    "install bubblewrap 0.7 or newer, allow user namespaces (sysctl user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns), or run elsewhere; programs are not run without a sandbox"
)


@dataclass(frozen=True)
class Result:
    """`ok`: it ended by itself with exit code 0, having written no more than was allowed. `late`: a time limit ended
    it."""

    output: bytes
    ok: bool
    late: bool


class Sandbox:
    """Runs programs under the limits of `config`. Raises ValueError (one line) where this machine allows no sandbox."""

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        self._filter = _no_processes()
        program = shutil.which("bwrap")
        if program is None:
            raise InputError(f"reward.functions: code: there is no bwrap on the PATH; {MEND}")
        interpreter = config.python or os.path.realpath(sys.executable)
        self._isolation = [program, *_isolation(interpreter)]
        # -S: the folders of packages take longer to go through than all the rest of an interpreter's start.
        self._python = [interpreter, *([] if config.python else ["-S"]), "-s", "-B", "-X", "utf8"]
        self._limits = [str(config.cpu_seconds), str(config.memory), str(FILE_SIZE)]
        result = self._run("run", b"print(input())", b"ready", MESSAGE, START_TIMEOUT, subprocess.STDOUT)
        if result.output != b"ready\n":
            said = on_one_line(result.output.decode(errors="replace"), 300) or "it did not start in time"
            raise InputError(f"reward.functions: code: no sandbox can be made here: {said}; {MEND}")

    def run(self, mode: str, program: bytes, stdin: bytes, longest: int) -> Result:
        """`program` in the harness's `mode`. With more than `longest` bytes of output it is not `ok`."""
        return self._run(mode, program, stdin, longest, self._config.seconds)

    def check(self, program: bytes, tests: bytes) -> Result:
        """`tests`, Python code, in one sandbox about the names of `program` in another. `ok`: nothing was raised."""
        end = time.monotonic() + self._config.seconds
        with contextlib.ExitStack() as processes, open(os.memfd_create("verdict"), "rb") as verdict:
            (requests, asking), (replies, replying) = os.pipe(), os.pipe()
            try:
                serve = self._started("serve", {harness.PROGRAM: program}, requests, replying)
                serving = processes.enter_context(serve)
                check = self._started("check", {harness.TESTS: tests}, replies, asking, verdict.fileno())
                checking = processes.enter_context(check)
            finally:
                for descriptor in (requests, asking, replies, replying):
                    os.close(descriptor)
            code = _exit_code(checking, end)
            verdict.seek(0)
            passed = code == 0 and verdict.read() == harness.VERDICT.encode()
            # Its requests have ended, so that it ends too, unless it was late before.
            late = code in LATE or (not passed and _exit_code(serving, end) in LATE)
        return Result(b"", passed, late)

    def _run(
        self, mode: str, program: bytes, stdin: bytes, longest: int, seconds: float, stderr: int = subprocess.DEVNULL
    ) -> Result:
        # A file, which RLIMIT_FSIZE limits: nobody has to read while the program runs.
        with _in_memory(stdin) as source, open(os.memfd_create("output"), "rb") as output:
            with self._started(mode, {harness.PROGRAM: program}, source, output.fileno(), stderr) as process:
                code = _exit_code(process, time.monotonic() + seconds)
            output.seek(0)
            text = output.read(longest + 1)
        return Result(text[:longest], code == 0 and len(text) <= longest, code in LATE)

    @contextlib.contextmanager
    def _started(
        self, mode: str, files: Mapping[str, bytes], stdin: int, stdout: int, stderr: int = subprocess.DEVNULL
    ) -> Iterator[subprocess.Popen]:
        """The harness in `mode`, ended with all that it has started when the context is left."""
        with contextlib.ExitStack() as opened:
            descriptors = [opened.enter_context(_in_memory(content)) for content in (self._filter, *files.values())]
            options = ["--seccomp", str(descriptors[0])]
            for path, descriptor in zip(files, descriptors[1:], strict=True):
                options += ["--ro-bind-data", str(descriptor), path]
            command = [*self._python, HARNESS, mode, *self._limits]
            process = subprocess.Popen(
                [*self._isolation, *options, "--remount-ro", "/", "--", *command],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=ENVIRONMENT,
                pass_fds=descriptors,
                start_new_session=True,
            )
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # bubblewrap's first process ends the others with it


def _isolation(interpreter: str) -> list[str]:
    """bubblewrap's options. Raises ValueError for an interpreter that does not start."""
    # -I: not the user's folders, which the sandbox has not
    command = [interpreter, "-I", "-c", "import sys; print(sys.prefix); print(sys.base_prefix)"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"reward.code.python: {interpreter} does not start: {on_one_line(str(error), 200)}") from None
    folders = [folder for folder in dict.fromkeys(asked.stdout.splitlines()) if not Path(folder).is_relative_to("/usr")]
    return [
        *("--die-with-parent", "--cap-drop", "ALL", "--uid", NOBODY, "--gid", NOBODY),
        *(f"--unshare-{name}" for name in NAMESPACES),
        *("--size", str(FILE_SIZE), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--ro-bind", "/usr", "/usr"),
        *(option for path in IF_THERE for option in ("--ro-bind-try", path, path)),
        *(option for path in folders for option in ("--ro-bind", path, path)),
        *(option for path in DEVICES for option in ("--dev-bind", path, path)),
        *("--ro-bind", str(Path(harness.__file__)), HARNESS),
    ]


def _no_processes() -> bytes:
    """A seccomp filter that allows new threads but no new processes: RLIMIT_NPROC does not hold for root, and memory
    and CPU time are limited per process."""
    if platform.machine() not in MACHINES:
        raise InputError(f"reward.functions: code: there is no sandbox on {platform.machine()}")
    architecture, clone, clone3, fork, vfork = MACHINES[platform.machine()]
    load, equal, at_least, bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    x32, clone_thread, allow, kill, fail = 0x40000000, 0x10000, 0x7FFF0000, 0x80000000, 0x00050000
    steps = [  # (code, steps to skip if true, if false, value); loads are from struct seccomp_data
        *((load, 0, 0, 4), (equal, 0, 11, architecture)),
        *((load, 0, 0, 0), (at_least, 9, 0, x32)),
        *((equal, 7, 0, clone3), (equal, 4, 0, fork), (equal, 3, 0, vfork), (equal, 0, 3, clone)),
        *((load, 0, 0, 16), (bits, 1, 0, clone_thread)),
        *((end, 0, 0, fail | errno.EPERM), (end, 0, 0, allow)),
        # The flags of clone3 are in memory, which a filter cannot read. With ENOSYS the C library uses clone.
        *((end, 0, 0, fail | errno.ENOSYS), (end, 0, 0, kill)),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """A descriptor to read `content` from."""
    writable = os.memfd_create("content")
    with open(writable, "wb") as file:
        file.write(content)
        file.flush()
        descriptor = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _exit_code(process: subprocess.Popen, end: float) -> int | None:
    """None where it has not ended until `end` (time.monotonic)."""
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
