"""Reward workers on all nodes of the run's Ray cluster: Ray places one actor per node, which has the node's workers."""

from __future__ import annotations

import os
import queue
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult
from dynamo_megatron.reward.workers import START_TIMEOUT, Workers
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

CONNECT_TIMEOUT = 10.0  # seconds
SHOWN = 200  # characters of an error in a message


class NodeWorkers:
    """The actor of one node. As many threads may call `run` at once as there are workers."""

    def start(self, functions: list[str], config: RewardConfig, folder: str, python_path: str | None) -> None:
        """Starts the workers in `folder`, with `python_path` as PYTHONPATH."""
        os.chdir(folder)  # the user's functions are found from here
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path
        self._workers = Workers(functions, config)
        self._workers.start()

    def run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        """As `Workers.submit`."""
        return self._workers.submit(prompt, response).result()


class RayWorkers:
    """As `Workers`, with `config.workers` processes on each node that the cluster has at the start.

    The samples of a lost node are sent to another node, with the whole deadline. A lost node is not used again; `notes`
    gets a line for it.
    """

    def __init__(self, functions: list[str], config: RewardConfig, notes: list[str]) -> None:
        self._functions, self._config, self._notes = functions, config, notes
        self._actors: dict[str, ray.actor.ActorHandle] = {}  # by node, without those that are lost
        self._free: queue.SimpleQueue[str] = queue.SimpleQueue()  # the node of each free worker
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Starts the workers on all nodes. Raises ValueError if there is no cluster, or if the functions cannot be
        loaded on a node."""
        host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
        try:
            if port.isdecimal():  # Ray itself would try for minutes
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
            ray.init(address="auto", log_to_driver=False, logging_level="error")
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(
                f"reward.placement: ray, and there is no Ray cluster ({on_one_line(str(error), SHOWN)}); start the run with "
                "`launch ray`, name a cluster by the environment variable RAY_ADDRESS, or leave local"
            ) from None
        for node in ray.nodes():
            if node["Alive"]:
                self._actors[node["NodeManagerAddress"] + " " + node["NodeID"][:8]] = (
                    ray.remote(NodeWorkers)
                    .options(
                        num_cpus=0,  # Ray's CPU count does not pin to cores, and the ranks may have taken all of it
                        max_concurrency=self._config.workers,
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                    )
                    .remote()
                )
        given = (self._functions, self._config, os.getcwd(), os.environ.get("PYTHONPATH"))
        begun = {node: actor.start.remote(*given) for node, actor in self._actors.items()}
        for node, reference in begun.items():
            try:
                ray.get(reference, timeout=2 * START_TIMEOUT)
            except (RayError, ValueError) as error:
                why = on_one_line(str(getattr(error, "cause", error)))
                raise InputError(f"reward.placement: node {node}: {why}") from None
        for _ in range(self._config.workers):
            for node in self._actors:
                self._free.put(node)
        self._threads = ThreadPoolExecutor(self._config.workers * len(self._actors), thread_name_prefix="reward")

    def submit(self, prompt: Prompt, response: str) -> Future[list[FunctionResult]]:
        """As `Workers.submit`."""
        assert self._threads is not None, "not started"
        return self._threads.submit(self._run, prompt, response)

    def close(self) -> None:
        """Stops all workers now; samples under way are lost. May be called twice."""
        actors, self._actors = self._actors, {}
        for actor in actors.values():
            ray.kill(actor)  # its workers go with it
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        ray.shutdown()

    def _run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        while self._actors:
            node = self._free.get()
            try:
                if (actor := self._actors.get(node)) is not None:
                    return ray.get(actor.run.remote(prompt, response))
            except RayActorError as error:
                with self._lock:
                    if self._actors.pop(node, None) is not None:
                        line = f"the reward workers of node {node} are lost ({type(error).__name__})"
                        self._notes.append(f"{line}; their samples go to the {len(self._actors)} nodes that are left")
            except (RayError, RecursionError) as error:
                text = f"it cannot be sent to a worker: {error_line(error, SHOWN)}"
                return [FunctionResult(name, "crashed", text=text) for name in self._functions]
            finally:
                if node in self._actors or not self._actors:  # in the end it wakes the threads that wait
                    self._free.put(node)
        return [FunctionResult(name, "crashed", text="no node with reward workers is left") for name in self._functions]
