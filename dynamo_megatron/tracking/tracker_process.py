"""Runs a tracker in a process of its own: whatever its library does, rank 0 neither waits for it nor fails with it.

    python -P -m dynamo_megatron.tracking.tracker_process NAME OUTPUT_DIR DESCRIPTOR PARENT

Rank 0 writes JSON lines into a pipe without ever blocking: first the configuration, then one line per row. The output
of the process goes to output_dir/logs/tracker-NAME.log. Its stdin is empty: a library that asks for a key gets none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.runtime.log_files import log_to, mark, open_log, text_since
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, die_with_parent, keeping

LARGEST_BACKLOG = 16 << 20  # bytes of rows that the process has not read yet: some thousand steps
LAST_WORDS = 1.0  # seconds for a process that has closed its pipe to exit, and to write the reason into its log


class TrackerProcess:
    """Rank 0's side. A tracker that fails or stops reading is killed, with one line to `say` and to its log; the run
    goes on."""

    def __init__(self, name: str, config: Config, say: Callable[[str], None]):
        self._name, self._say = name, say
        self._log = Path(config.output_dir) / "logs" / f"tracker-{name}.log"
        self._log_began = mark(self._log)
        theirs, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        module = "dynamo_megatron.tracking.tracker_process"
        words = [sys.executable, "-P", "-m", module, name, config.output_dir, str(theirs), str(os.getpid())]
        with keeping(*FOR_THE_RANKS):  # the tracker must still send what the ranks log while they stop
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=(theirs,))
        os.close(theirs)
        self._open, self._told = True, False
        self._backlog = bytearray(json.dumps(to_plain(config)).encode() + b"\n")
        self._send()

    def write(self, metrics: Mapping[str, float]) -> None:
        """As `Tracker.write`. Returns at once, except for up to LAST_WORDS seconds when it finds that the process has
        failed."""
        if not self._open:
            return
        self._backlog += json.dumps(metrics).encode() + b"\n"
        self._send()
        if self._open and len(self._backlog) > LARGEST_BACKLOG:
            self._give_up(f"has taken nothing for {LARGEST_BACKLOG >> 20} MiB of metrics")

    def ended(self) -> bool:
        """As `Tracker.ended`."""
        if self._open:
            self._send()
        if self._open and not self._backlog:
            self._end()
        return self._process.poll() is not None

    def close(self) -> None:
        """As `Tracker.close`."""
        if self._open:
            return self._give_up("did not take its last rows in time")
        if self._told:
            return
        if self._process.poll() is None:
            return self._kill("did not end in time")
        if self._process.returncode != 0:
            self._tell("failed")

    def _send(self) -> None:
        try:
            while self._backlog:
                del self._backlog[: os.write(self._pipe, self._backlog[: 1 << 16])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS)
            self._give_up("failed")

    def _give_up(self, what: str) -> None:
        self._end()
        self._kill(what)

    def _kill(self, what: str) -> None:
        self._process.kill()
        self._process.wait()
        self._tell(what)

    def _end(self) -> None:
        self._open = False
        os.close(self._pipe)

    def _tell(self, what: str) -> None:
        self._told = True
        line = f"warning: {self._name} {what}"
        if why := self._said_last():
            line += f" ({why})"
        with contextlib.suppress(OSError), open(open_log(self._log, 0o644), "w", encoding="utf-8") as log:
            log.write(f"{line}\n")
        self._say(f"{line}; metrics.jsonl has all metrics; its log is {self._log}")

    def _said_last(self) -> str:
        """The last line in the process's log, shortened; "" where there is none."""
        try:
            lines = text_since(self._log, self._log_began).split("\n")
        except OSError:
            return ""
        return on_one_line(next((line for line in reversed(lines) if line.strip()), ""), 200)


def main(name: str, output_dir: str, descriptor: int, parent: int) -> None:
    die_with_parent(signal.SIGKILL, parent)
    log_to(Path(output_dir) / "logs" / f"tracker-{name}.log")
    from dynamo_megatron.tracking.services import SERVICES

    with open(descriptor, encoding="utf-8") as rows:
        tracker = SERVICES[name](Config.model_validate_json(rows.readline()))
        for row in rows:
            tracker.write(json.loads(row))
    tracker.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
