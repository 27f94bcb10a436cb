"""Reward workers on all nodes of the run's Ray cluster: Ray places an actor per node, which has the node's workers."""

from __future__ import annotations

import functools
import os

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult
from dynamo_megatron.reward.pool import START_TIMEOUT, WorkerPool, Workers, processes
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

SHOWN = 200  # characters of an error in a message


class NodeWorkers:
    """The actor of one node, which Ray restarts on another one if the node is lost."""

    def __init__(self, functions: list[str], config: RewardConfig, folder: str, python_path: str | None) -> None:
        os.chdir(folder)  # the user's functions are found from here
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path
        self._workers = Workers(functions, config)

    def start(self) -> None:
        self._workers.start()

    def run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        """As `Workers.submit`. As many threads may call it at once as there are workers."""
        return self._workers.submit(prompt, response).result()


class RayWorkers(WorkerPool):
    """As `Workers`, on each node that the cluster has at the start. Ray sends the samples of a lost node to another
    one, with the whole deadline."""

    def __init__(self, functions: list[str], config: RewardConfig) -> None:
        """Raises ValueError if there is no cluster."""
        self._functions = functions
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="error")
        except (RuntimeError, ValueError, OSError) as error:
            why = on_one_line(str(error), SHOWN)
            raise InputError(f"reward.placement: ray, and there is no Ray cluster ({why}); see RAY_ADDRESS") from None
        config = config.model_copy(update={"workers": processes(config)})
        given = (functions, config, os.getcwd(), os.environ.get("PYTHONPATH"))
        options = {"num_cpus": 0, "max_concurrency": config.workers, "max_restarts": -1, "max_task_retries": -1}
        self._actors: dict[str, ray.actor.ActorHandle] = {}  # by the address of the node
        for node in ray.nodes():
            if node["Alive"]:
                placed = NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
                actor = ray.remote(NodeWorkers).options(scheduling_strategy=placed, **options).remote(*given)
                self._actors[f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"] = actor
        super().__init__([functools.partial(self._ask, actor) for actor in self._actors.values()] * config.workers)

    def start(self) -> None:
        """Waits until all are ready. Raises ValueError if a node loads no functions."""
        started = {address: actor.start.remote() for address, actor in self._actors.items()}
        for address, reference in started.items():
            try:
                ray.get(reference, timeout=2 * START_TIMEOUT)
            except (RayError, ValueError) as error:
                why = on_one_line(str(getattr(error, "cause", error)))
                raise InputError(f"reward.placement: node {address}: {why}") from None

    def close(self) -> None:
        """Stops all workers now; samples under way are lost. May be called twice."""
        for actor in self._actors.values():
            ray.kill(actor)  # its workers go with it
        self._actors = {}
        super().close()
        ray.shutdown()

    def _ask(self, actor: ray.actor.ActorHandle, prompt: Prompt, response: str) -> list[FunctionResult]:
        try:
            return ray.get(actor.run.remote(prompt, response))
        except (RayError, RecursionError) as error:
            return [FunctionResult(name, "crashed", text=error_line(error, SHOWN)) for name in self._functions]
