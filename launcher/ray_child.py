"""The actor of `launch ray`: a child process on a node of the cluster, which ends with the actor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

from dynamo_megatron.launcher.command import free_port


class Child:
    """A rank, or a server's node, as a child process under the guard: it ends with this process."""

    def node(self) -> tuple[str, list[str], int, int]:
        """(address, GPUs that Ray gave to this actor, a free port, cores)."""
        return ray.util.get_node_ip_address(), [str(i) for i in ray.get_gpu_ids()], free_port(), os.cpu_count() or 1

    def start(self, command: list[str], environment: dict[str, str], folder: str, log: str) -> str | None:
        """Runs `command` in `folder`, its output appended to `log`. Returns why it cannot, or None."""
        temporary = tempfile.mkdtemp(prefix="dynamo-megatron-")  # the guard's to remove
        guarded = [sys.executable, "-P", "-m", "dynamo_megatron.rollout.guard", temporary, "--", *command]
        try:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as file:
                self._log, self._read = open(log, "rb"), file.tell()  # noqa: SIM115 (as long as the actor lives)
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
        """(exit code or None, what the child has written since the last call)."""
        code = self._process.poll()
        if os.fstat(self._log.fileno()).st_size < self._read:  # the guard has moved what was there to NAME.1
            self._read = 0
        self._log.seek(self._read)
        text = self._log.read()
        if code is None:
            text = text[: text.rfind(b"\n") + 1]  # half a line waits for its other half
        self._read += len(text)
        return code, text.decode(errors="replace")

    def stop(self) -> None:
        """Asks the child to save and end; SIGTERM would have the guard kill it."""
        self._process.send_signal(signal.SIGUSR1)
