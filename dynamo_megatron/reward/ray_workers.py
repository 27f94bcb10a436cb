"""Reward workers on all nodes of the run's Ray cluster: one actor per node, which has the node's workers.

Ray places the actors and reports a lost node. Deadlines, outcomes and the killing of late workers are left to `Workers`
on each node.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pickle import PicklingError

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.outcomes import Outcome
from dynamo_megatron.reward.workers import START_TIMEOUT, Workers
from dynamo_megatron.runtime.plain_text import error_line, on_one_line, show
from dynamo_megatron.types import Prompt

LOSSES = 3  # nodes that may be lost while they have a sample: the sample may be the reason
CONNECT_TIMEOUT = 10.0  # seconds
SHOWN = 200  # characters of an error in a message


class NodeWorkers:
    """The actor of one node. As many threads may call `run` at once as there are workers."""

    def start(self, functions: list[str], config: RewardConfig, folder: str, python_path: str | None) -> str | None:
        """Starts the workers in `folder`, with `python_path` as PYTHONPATH. Returns the reason where it fails, or
        None."""
        try:
            os.chdir(folder)  # the user's functions are found from here
            if python_path is not None:
                os.environ["PYTHONPATH"] = python_path
            self._workers = Workers(functions, config)
            self._workers.start()
        except (ValueError, OSError) as error:
            return on_one_line(str(error))
        return None

    def run(self, prompt: Prompt, response: str) -> list[Outcome]:
        """As `Workers.submit`."""
        return self._workers.submit(prompt, response).result()


@dataclass(eq=False)
class _Node:
    """`under_way`: number of samples that the node has. `name`: the node's address and the start of its id."""

    name: str
    actor: ray.actor.ActorHandle
    under_way: int = 0
    lost: bool = False


class RayWorkers:
    """As `Workers`, with `config.workers` processes on each node that the cluster has at the start.

    The samples of a lost node are sent to another node, with the whole deadline; late answers of the lost node are
    ignored. A lost node is not used again. `notes` gets a line for each lost node.
    """

    def __init__(self, functions: list[str], config: RewardConfig, notes: list[str]) -> None:
        self._functions, self._config, self._notes = functions, config, notes
        self._nodes: list[_Node] = []
        self._free: queue.SimpleQueue[_Node | None] = queue.SimpleQueue()  # one entry for each worker; None: no node
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._connected = False
        self._why_none = ""
        # A worker may have to be killed and another one to import before a sample's own time begins.
        self._overdue = config.deadline + 2 * START_TIMEOUT

    def start(self) -> None:
        """Starts the workers on all nodes. Raises ValueError where there is no cluster, or where the functions cannot
        be loaded on a node."""
        self._connect()
        remote = ray.remote(NodeWorkers)
        for node in ray.nodes():
            if node["Alive"]:
                actor = remote.options(
                    num_cpus=0,  # Ray's CPU count does not pin to cores, and the ranks may have taken all of it
                    max_restarts=0,
                    max_concurrency=self._config.workers,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                ).remote()
                self._nodes.append(_Node(f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})", actor))
        given = (self._functions, self._config, os.getcwd(), os.environ.get("PYTHONPATH"))
        begun = [(node, node.actor.start.remote(*given)) for node in self._nodes]
        for node, reference in begun:
            try:
                why = ray.get(reference, timeout=2 * START_TIMEOUT)
            except RayError as error:
                why = error_line(error, SHOWN)
            if why is not None:
                raise InputError(f"reward.placement: node {node.name}: {why}")
        for _ in range(self._config.workers):
            for node in self._nodes:
                self._free.put(node)
        self._threads = ThreadPoolExecutor(self._config.workers * len(self._nodes), thread_name_prefix="reward")

    def submit(self, prompt: Prompt, response: str) -> Future[list[Outcome]]:
        """As `Workers.submit`."""
        assert self._threads is not None, "not started"
        return self._threads.submit(self._run, prompt, response)

    def close(self) -> None:
        """Stops all workers now; samples under way are lost. May be called twice."""
        self._closed = True
        self._free.put(None)
        for node in self._nodes:
            ray.kill(node.actor)  # its workers go with it
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._nodes = []
        if self._connected:
            self._connected = False
            ray.shutdown()

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
        try:
            if port.isdecimal():  # Ray itself would try for minutes
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
            ray.init(address="auto", log_to_driver=False, logging_level="error")
        except (OSError, RuntimeError, ValueError) as error:
            why = on_one_line(str(error).partition(". ")[0], SHOWN)
            raise InputError(
                f"reward.placement: ray, and there is no Ray cluster ({why}); start the run with `launch ray`, name a "
                "cluster by the environment variable RAY_ADDRESS, or leave local"
            ) from None
        self._connected = True

    def _run(self, prompt: Prompt, response: str) -> list[Outcome]:
        lost = 0
        while lost < LOSSES and (node := self._taken()) is not None:
            try:
                return ray.get(node.actor.run.remote(prompt, response), timeout=self._overdue)
            except (RayTaskError, RecursionError, PicklingError) as error:  # the sample is nested too deep
                return self._crashed(f"it cannot be sent to a worker: {error_line(error, SHOWN)}")
            except RayError as error:
                self._lose(node, error)
                lost += 1
            finally:
                self._give_back(node)
        if self._closed:
            raise RuntimeError("the reward pool was closed")
        if lost < LOSSES:
            return self._crashed(f"no node with reward workers is left; {self._why_none}")
        return self._crashed(f"{lost} nodes with reward workers were lost while they had it")

    def _crashed(self, text: str) -> list[Outcome]:
        return [Outcome(name, "crashed", text=text) for name in self._functions]

    def _taken(self) -> _Node | None:
        """Waits for a node with a free worker; returns None where no node is left."""
        while (node := self._free.get()) is not None:
            with self._lock:
                if not node.lost:
                    node.under_way += 1
                    return node
        self._free.put(None)  # for the next thread that waits
        return None

    def _give_back(self, node: _Node) -> None:
        with self._lock:
            node.under_way -= 1
        self._free.put(node)

    def _lose(self, node: _Node, error: RayError) -> None:
        with self._lock:
            if node.lost or self._closed:
                return
            node.lost = True
            left = sum(not other.lost for other in self._nodes)
            self._why_none = f"the reward workers of node {node.name} are lost ({type(error).__name__})"
            self._notes.append(
                f"{self._why_none}; {node.under_way} samples go to the other nodes, of which {left} are left"
            )
            if not left:
                self._free.put(None)
        show(f"{self._why_none}: {error}")
        ray.kill(node.actor)  # it may be alive and only late
