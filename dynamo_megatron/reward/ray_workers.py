"""Reward workers on all nodes of the run's Ray cluster: Ray places an actor per node, which has the node's workers."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult
from dynamo_megatron.reward.workers import START_TIMEOUT, Workers
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

SHOWN = 200  # characters of an error in a message


class NodeWorkers:
    """The actor of one node, which Ray restarts on another one if the node is lost."""

    def __init__(self, functions: list[str], config: RewardConfig, folder: str, python_path: str | None) -> None:
        os.chdir(folder)  # the user's functions are found from here
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path
        self._workers, self._started, self._lock = Workers(functions, config), False, threading.Lock()

    def start(self) -> None:
        with self._lock:
            if not self._started:
                self._workers.start()
                self._started = True

    def run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        """As `Workers.submit`. As many threads may call it at once as there are workers."""
        self.start()
        return self._workers.submit(prompt, response).result()


class RayWorkers:
    """As `Workers`, with `config.workers` processes on each node that the cluster has at the start. Ray sends the
    samples of a lost node to another one, with the whole deadline."""

    def __init__(self, functions: list[str], config: RewardConfig) -> None:
        self._functions, self._config = functions, config
        self._actors: list[ray.actor.ActorHandle] = []
        self._free: queue.SimpleQueue[ray.actor.ActorHandle] = queue.SimpleQueue()  # one entry for each worker
        self._threads: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Starts the workers on all nodes. Raises ValueError if there is no cluster, or a node loads no functions."""
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="error")
        except (RuntimeError, ValueError, OSError) as error:
            why = on_one_line(str(error), SHOWN)
            raise InputError(f"reward.placement: ray, and there is no Ray cluster ({why}); see RAY_ADDRESS") from None
        nodes = [node for node in ray.nodes() if node["Alive"]]
        given = (self._functions, self._config, os.getcwd(), os.environ.get("PYTHONPATH"))
        options = {"num_cpus": 0, "max_concurrency": self._config.workers, "max_restarts": -1, "max_task_retries": -1}
        for node in nodes:
            placed = NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
            actor = ray.remote(NodeWorkers).options(scheduling_strategy=placed, **options).remote(*given)
            self._actors.append(actor)
        for node, started in zip(nodes, [actor.start.remote() for actor in self._actors], strict=True):
            try:
                ray.get(started, timeout=2 * START_TIMEOUT)
            except (RayError, ValueError) as error:
                why = on_one_line(str(getattr(error, "cause", error)))
                raise InputError(f"reward.placement: node {node['NodeManagerAddress']}: {why}") from None
        for actor in self._actors * self._config.workers:
            self._free.put(actor)
        self._threads = ThreadPoolExecutor(self._config.workers * len(nodes), thread_name_prefix="reward")

    def submit(self, prompt: Prompt, response: str) -> Future[list[FunctionResult]]:
        """As `Workers.submit`."""
        assert self._threads is not None, "not started"
        return self._threads.submit(self._run, prompt, response)

    def close(self) -> None:
        """Stops all workers now; samples under way are lost. May be called twice."""
        for actor in self._actors:
            ray.kill(actor)  # its workers go with it
        self._actors = []
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        ray.shutdown()

    def _run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        actor = self._free.get()  # does not wait: as many threads as workers
        try:
            return ray.get(actor.run.remote(prompt, response))
        except (RayError, RecursionError) as error:
            return [FunctionResult(name, "crashed", text=error_line(error, SHOWN)) for name in self._functions]
        finally:
            self._free.put(actor)
