"""The reward model's servers: started, watched and restarted as the rollout servers are, with weights that stay.

They are where the run's own rollout servers are started: with `rollout.placement: split` by `serve` on the servers'
nodes, in turn over the nodes, else by the rollout process on rank 0's node.
"""

from __future__ import annotations

import asyncio
import functools
import time
from pathlib import Path

import aiohttp

from dynamo_megatron.config import Config, ModelConfig
from dynamo_megatron.reward.functions import NoScore
from dynamo_megatron.reward.http import Address, Addresses, classifier_output
from dynamo_megatron.rollout.client import SGLangClient
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.announcements import Announced, servers_folder
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.fleet import HEALTH_EVERY, Starter, answers
from dynamo_megatron.rollout.servers.server import SGLangServer
from dynamo_megatron.rollout.servers.supervisor import Listener, Supervisor
from dynamo_megatron.runtime.seeds import derived_seed

POLL_EVERY = 0.2  # seconds


class ClassifierServer(SGLangServer):
    """Of a sequence classifier with one output."""

    _port_key = "reward.servers.port"
    _task = "--is-embedding"  # architectures that SGLang knows as classifiers do without

    def _context(self) -> list[str]:
        return []  # its inputs are of any length: the model's own limit refuses what is too long

    async def _warm_up(self, client: SGLangClient, timeout: float) -> None:
        reply = await client.classify([0, 0, 0], timeout)
        try:
            classifier_output(reply)
        except NoScore as error:
            raise RolloutError(f"reward.reward_model.path: {self._model.path}: {error}; see {self.log}") from None


class RewardServers:
    """Keeps `addresses` at the servers that are up while `run` does."""

    def __init__(self, config: Config):
        """Raises ValueError where `rollout.host` or `reward.servers.port` cannot be used."""
        self.addresses = Addresses(restarts_within=config.rollout.start_timeout)
        self.notes: list[str] = []  # for the user, since they were last taken
        self._config = config
        self._up: dict[str, Endpoint] = {}
        self._final: set[str] = set()
        names = server_names(config, 1, 0)
        split = config.rollout.placement == "split"
        self._starter: Starter = (
            Announced(announced_in(config), names, self) if split else supervisor(config, names, self)
        )
        self._count = len(names)

    def up(self, endpoint: Endpoint) -> None:
        self._up[endpoint.name] = endpoint
        self._final.discard(endpoint.name)  # another node may have taken it over
        self.addresses.up(endpoint.name, Address(endpoint.url, endpoint.api_key))

    def down(self, name: str, why: str, final: bool) -> None:
        """May be called again for a server that is down."""
        self._final |= {name} if final else set()
        self.addresses.down(name, why, final=len(self._final) == self._count)
        if self._up.pop(name, None) is not None or final:
            self.notes.append(f"{name} is {'not started again' if final else 'started again'}: {why}")

    async def run(self, session: aiohttp.ClientSession) -> None:
        """For ever; cancelled, it ends the servers."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._starter.run())
            group.create_task(self._watch(session))

    async def wait_started(self) -> None:
        """Until a server is up. Raises RolloutError where none comes up."""
        end = time.monotonic() + self._config.rollout.start_timeout
        while not self._up:
            if len(self._final) == self._count or time.monotonic() > end:
                why = "; ".join(self.notes) or "nothing was heard of them within rollout.start_timeout"
                raise RolloutError(f"no server of the reward model came up: {why}")
            await asyncio.sleep(POLL_EVERY)

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.gather(*(self._check(session, endpoint) for endpoint in self._up.values()))
            await asyncio.sleep(HEALTH_EVERY)

    async def _check(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        """A server that does not answer is restarted."""
        limit = self._config.rollout.health_timeout
        healthy = await answers(SGLangClient(session, endpoint, self._config.rollout, []), limit)
        if not healthy and self._up.get(endpoint.name) == endpoint:
            why = f"no answer to /health for rollout.health_timeout ({limit:g} s)"
            self.down(endpoint.name, why, False)
            self._starter.restart(endpoint.name, endpoint.incarnation, why)


def server_names(config: Config, nodes: int, node: int) -> list[str]:
    """Of the reward model's servers on node `node` of the `nodes` that have servers."""
    count = config.reward.servers.count if config.reward.servers is not None else 0
    return [f"reward-{i}" for i in range(node, count, nodes)]


def announced_in(config: Config) -> Path:
    """Where the files are by which nodes and the controller find each other."""
    return servers_folder(config.output_dir) / "reward_model"


def gpus(config: Config, names: list[str], after: int) -> int:
    """GPUs of a node with the servers `names` and rollout servers that have the first `after`."""
    return max(after, _first_gpu(config, after) + len(names) * config.reward.servers.tp) if names else after


def _first_gpu(config: Config, after: int) -> int:
    given = config.reward.servers.first_gpu
    return after if given is None else given


def supervisor(config: Config, names: list[str], listener: Listener, after: int = 0) -> Supervisor:
    """Of the servers `names` of this node. `after`: GPUs that the node's rollout servers have. Raises ValueError as
    Supervisor."""
    servers, model = config.reward.servers, config.reward.reward_model
    # SGLang 0.5.23 gives the heads of Qwen2 and Qwen3 classifiers a bias that no checkpoint has: it is random, so that
    # only servers of one seed give a response the same score.
    seed = ["--random-seed", str(derived_seed(config.seed, "reward_model") % 2**31)]
    rollout = config.rollout.model_copy(
        update={
            "placement": "split",
            "offload": False,
            "servers": servers.count,
            "tp": servers.tp,
            "port": servers.port,
            "memory_fraction": servers.memory_fraction,
            "api_key_env": None,
            "quantization": None,
            "server_args": [*seed, *servers.server_args],
        }
    )
    served = ModelConfig(path=model.path, dtype=model.dtype, max_length=config.model.max_length)
    make = functools.partial(ClassifierServer, first_gpu=_first_gpu(config, after))
    return Supervisor(config.model_copy(update={"rollout": rollout, "model": served}), names, listener, make)
