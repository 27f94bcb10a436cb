"""The reward model's servers: started, watched and restarted as the rollout servers are, with weights that stay.

They are where the run's own rollout servers are started: with `rollout.placement: split` by `serve` on the servers'
nodes, in turn over the nodes, else by the rollout process on rank 0's node.
"""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path

import aiohttp

from dynamo_megatron.config import Config, ModelConfig
from dynamo_megatron.reward.functions import NoScore
from dynamo_megatron.reward.http import Address, classifier_output
from dynamo_megatron.rollout.client import ANY_TOKEN, SGLangClient
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.announcements import Announced, servers_folder
from dynamo_megatron.rollout.servers.fleet import Fleet, Server, Starter
from dynamo_megatron.rollout.servers.server import SGLangServer
from dynamo_megatron.rollout.servers.supervisor import Listener, Supervisor
from dynamo_megatron.runtime.seeds import derived_seed


class ClassifierServer(SGLangServer):
    """Of a sequence classifier with one output."""

    _port_key = "reward.servers.port"
    _task = "--is-embedding"  # architectures that SGLang knows as classifiers do without

    @property
    def gpus(self) -> list[int]:
        return []  # the use of its GPUs is not measured (docs/analysis.md)

    def _context(self) -> list[str]:
        return []  # its inputs are of any length: the model's own limit refuses what is too long

    def _threads(self) -> int:
        return 1  # it computes while the rollout servers do

    async def _warm_up(self, client: SGLangClient, timeout: float) -> None:
        reply = await client.classify([0, 0, 0], timeout)
        try:
            classifier_output(reply)
        except NoScore as error:
            raise RolloutError(f"reward.reward_model.path: {self._model.path}: {error}; see {self.log}") from None


class RewardServers(Fleet):
    """Raises ValueError where `rollout.host` or `reward.servers.port` cannot be used."""

    kind = "server of the reward model"

    def __init__(self, config: Config, session: aiohttp.ClientSession):
        self._turns = itertools.count()
        super().__init__(config, session, [], ANY_TOKEN)

    def _make_starters(self) -> dict[str, Starter]:
        names, split = server_names(self.config, 1, 0), self.config.rollout.placement == "split"
        starter: Starter = (
            Announced(announced_in(self.config), names, self) if split else supervisor(self.config, names, self)
        )
        return dict.fromkeys(names, starter)

    async def next(self) -> Address:
        """The address of a server that is up, in turn. Waits for one for at most `rollout.start_timeout` seconds, and
        raises NoScore if none comes up."""
        deadline = time.monotonic() + self.config.rollout.start_timeout
        while not self._servers:
            if not await self._change(deadline):
                raise NoScore(self._why_none(), "crashed")
        up = [server.endpoint for server in self._servers.values()]
        endpoint = up[next(self._turns) % len(up)]
        return Address(endpoint.url, endpoint.api_key)

    def _watched(self) -> list[Server]:
        return list(self._servers.values())


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
            "router_replay": False,
            "server_args": [*seed, *servers.server_args],
        }
    )
    served = ModelConfig(path=model.path, dtype=model.dtype, max_length=config.model.max_length)
    make = functools.partial(ClassifierServer, first_gpu=_first_gpu(config, after))
    return Supervisor(config.model_copy(update={"rollout": rollout, "model": served}), names, listener, make)
