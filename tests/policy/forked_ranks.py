"""Ranks that are forks of one process, which has imported Megatron once: starting them takes a moment."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def fork_ranks(count: int, body: Callable[[], None], logs: Path) -> list[int]:
    """Starts `count` ranks that call `body` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; returns their pids.

    Their output goes to `logs`/rankN.log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            log = os.open(logs / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            try:
                body()
                code = 0
            except BaseException:  # as torch's CheckpointException is
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return pids


def wait_for(pids: list[int], logs: Path) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = "\n".join(file.read_text()[-3000:] for file in sorted(logs.glob("rank*.log")))
    assert codes == [0] * len(pids), f"{codes}\n{said}"
