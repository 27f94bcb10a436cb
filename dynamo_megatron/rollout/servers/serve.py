"""`dynamo-megatron serve`: one node's servers for a run whose rank 0 is on another node."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from dynamo_megatron.config import Config
from dynamo_megatron.rollout.servers.announcements import NodeSide
from dynamo_megatron.rollout.servers.fleet import server_names
from dynamo_megatron.rollout.servers.supervisor import Supervisor
from dynamo_megatron.runtime.log_files import log_to
from dynamo_megatron.runtime.process_signals import ASK_TO_STOP, END, die_with_parent, keeping
from dynamo_megatron.runtime.threads import first_error

STOP_GRACE = 20.0  # seconds


def serve(config: Config, nodes: int, node: int) -> int:
    """Runs node `node`'s share of `rollout.servers` until the run ends or SIGTERM or SIGINT arrives; returns the exit
    code.

    Raises ValueError where the servers are not an equal share for each of `nodes`, or host or port cannot be used.
    """
    side, supervisor = _made(config, nodes, node)
    try:
        asyncio.run(_serve(side, supervisor, config.trainer.timeout))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("stopped", flush=True)
    return 0


def _made(config: Config, nodes: int, node: int) -> tuple[NodeSide, Supervisor]:
    """Starts nothing yet. Raises ValueError as `serve` does."""
    names = server_names(config.rollout.servers, nodes, node)
    side = NodeSide(config.output_dir, names)
    return side, Supervisor(config, names, side)


async def _serve(side: NodeSide, supervisor: Supervisor, timeout: float) -> None:
    """Runs the servers until the run ends. Raises TimeoutError where no run shows itself for `timeout` seconds."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT, END):
        loop.add_signal_handler(number, task.cancel)
    await side.join(timeout)
    try:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(supervisor.run())
            await side.run(supervisor)  # also where all servers are down for good: the run has to be notified
            keeping.cancel()
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    finally:
        side.leave()


class NodeServers:
    """Runs `serve` in a child process of a training node's local rank 0, for colocated servers.

    Raises ValueError as `serve` does.
    """

    def __init__(self, config: Config, nodes: int, node: int):
        _made(config, nodes, node)  # raises here: if the child did, rank 0 would wait for ever
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_child, args=(config, nodes, node, os.getpid()), name="servers")
        with keeping(*ASK_TO_STOP):
            self._process.start()

    def close(self) -> None:
        """Stops the servers."""
        if self._process.is_alive():
            os.kill(self._process.pid, END)
        self._process.join(STOP_GRACE)
        self._process.kill()  # if it has not ended; the servers' guards end them
        self._process.join()


def _child(config: Config, nodes: int, node: int, parent: int) -> None:
    os.setsid()
    die_with_parent(END, parent)
    log_to(Path(config.output_dir) / "logs" / f"servers-node-{node}.log")
    sys.exit(serve(config, nodes, node))
