"""`dynamo-megatron serve`: one node's servers for a run whose rank 0 is on another node."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import TypeAlias

from dynamo_megatron.config import Config
from dynamo_megatron.rollout.servers import reward_servers
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

    With `rollout.placement: split` also runs its share of the reward model's servers. Raises ValueError where the
    rollout servers are not an equal share for each of `nodes`, or host or port cannot be used.
    """
    parts = _parts(config, nodes, node)
    try:
        asyncio.run(_serve(config, parts))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("stopped", flush=True)
    return 0


Part: TypeAlias = "tuple[NodeSide, Supervisor]"


def _parts(config: Config, nodes: int, node: int) -> list[Part]:
    """Returns the part for the rollout servers and, where this node runs any, that for the reward model's servers.
    Nothing is started yet. Raises ValueError as `serve` does."""
    names = server_names(config.rollout.servers, nodes, node)
    side = NodeSide(config.output_dir, names)
    parts = [(side, Supervisor(config, names, side))]
    rewards = reward_servers.server_names(config, nodes, node) if config.rollout.placement == "split" else []
    if rewards:
        side = NodeSide(reward_servers.announced_in(config), rewards)
        parts.append((side, reward_servers.supervisor(config, rewards, side, after=len(names) * config.rollout.tp)))
    return parts


async def _serve(config: Config, parts: list[Part]) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT, END):
        loop.add_signal_handler(number, task.cancel)
    try:
        await asyncio.gather(*(_serve_part(config, *part) for part in parts))  # where one fails, `run` ends the others
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None


async def _serve_part(config: Config, side: NodeSide, supervisor: Supervisor) -> None:
    """Runs the servers of one part until the run ends. Raises TimeoutError where no run shows itself."""
    await side.join(config.trainer.timeout)
    try:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(supervisor.run())
            await side.run(supervisor)  # also where all servers are down for good: the run has to be notified
            keeping.cancel()
    finally:
        side.leave()


class NodeServers:
    """Runs `serve` in a child process of a training node's local rank 0, for colocated servers.

    Raises ValueError as `serve` does.
    """

    def __init__(self, config: Config, nodes: int, node: int):
        _parts(config, nodes, node)  # raises here: if the child did, rank 0 would wait for ever
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_child, args=(config, nodes, node, os.getpid()), name="servers")
        with keeping(*ASK_TO_STOP):
            self._process.start()

    def close(self) -> None:
        """Stops the servers."""
        if self._process.is_alive():
            os.kill(self._process.pid, END)
        self._process.join(STOP_GRACE)
        if self._process.is_alive():
            self._process.kill()  # the servers' guards end them
            self._process.join()


def _child(config: Config, nodes: int, node: int, parent: int) -> None:
    os.setsid()
    die_with_parent(END, parent)
    log_to(Path(config.output_dir) / "logs" / f"servers-node-{node}.log")
    sys.exit(serve(config, nodes, node))
