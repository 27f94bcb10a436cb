"""The actor of `launch ray`: it has a child process on a node of the cluster, which ends with the actor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

from dynamo_megatron.runtime.free_ports import free_port
from dynamo_megatron.runtime.log_files import open_log

COMPARED = 4096  # the last bytes read, by which the place is found again in a log that was moved


class Child:
    """A rank, or one server's `serve`, as a child process under the guard: it ends with this process."""

    def node(self) -> tuple[str, list[str], int, int]:
        """Returns (address, GPUs that Ray gave to this actor, a free port, cores)."""
        return ray.util.get_node_ip_address(), [str(i) for i in ray.get_gpu_ids()], free_port(), os.cpu_count() or 1

    def has(self, folder: str) -> bool:
        return os.path.isdir(folder)

    def start(self, command: list[str], environment: dict[str, str], folder: str, log: str) -> str | None:
        """Runs `command` in `folder`, its output appended to `log`. Returns why it cannot be started, or None."""
        temporary = tempfile.mkdtemp(prefix="dynamo-megatron-")  # the guard's to remove
        guarded = [sys.executable, "-P", "-m", "dynamo_megatron.rollout.guard", temporary, "--", *command]
        try:
            with open(open_log(Path(log), 0o644), "ab") as file:
                self._log = open(log, "rb", buffering=0)  # noqa: SIM115 (as long as the actor lives)
                self._log.seek(max(0, file.tell() - COMPARED))
                self._last, self._half = self._log.read(), b""
                self._process = subprocess.Popen(
                    guarded,
                    cwd=folder,
                    env={**os.environ, **environment},
                    stdin=subprocess.PIPE,  # held open as long as this process lives
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def poll(self) -> tuple[int | None, str]:
        """Returns (exit code or None, what the child has written since the last call)."""
        code = self._process.poll()
        text = self._half + self._written()
        end = len(text) if code is not None else text.rfind(b"\n") + 1  # half a line waits for its other half
        self._half = text[end:]
        return code, text[:end].decode(errors="replace")

    def _written(self) -> bytes:
        """Returns what was added to the log since the last call, including what the guard has moved to NAME.1
        meanwhile."""
        rest = b""
        if os.fstat(self._log.fileno()).st_size < self._log.tell():
            with contextlib.suppress(OSError):  # moved away by hand
                _, found, after = Path(f"{self._log.name}.1").read_bytes().rpartition(self._last)
                rest = after if found else b""
            self._log.seek(0)
        new = rest + self._log.read()
        self._last = (self._last + new)[-COMPARED:]
        return new

    def stop(self) -> None:
        """Asks the child to save and end; SIGTERM would have the guard kill it."""
        self._process.send_signal(signal.SIGUSR1)
