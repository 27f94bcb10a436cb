"""The `rollout` section: servers, sampling, waiting. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dynamo_megatron.config.method import Positive, Seconds, Section
from dynamo_megatron.config.reward import Url

ALONE = 0.85  # memory_fraction of a server that shares its GPU with no rank
SHORTEST_TIMEOUT, TOKEN_TIMEOUT = 600.0, 0.1  # seconds of a rollout, and of each token that it may have
EVERY_INTERFACE = ("0.0.0.0", "::", "[::]", "*")
# config.json's quantization_config of the weights that models/fp8.py makes
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _memory_fraction(placement: str = "colocated", offload: object = "auto", **_: object) -> float:
    return ALONE if placement != "colocated" else 0.7 if offload else 0.5


class SyncConfig(Section):
    """How weights get to the servers after every step (docs/rollouts.md)."""

    transport: Literal["auto", "ipc", "nccl", "gloo", "tensor", "disk"] = "auto"
    bucket_bytes: Positive = 512 << 20  # sent at once; a sending rank needs three times that of memory, ipc five


class ProofConfig(Section):
    """What is checked of servers and rollouts (docs/rollouts.md)."""

    checksums: bool = True  # of all weights, at every weight sync
    # nats, mean |policy - engine logprob| of a rollout; above: rejected; null: only what is not finite
    max_mean_gap: Annotated[float, Field(gt=0)] | None = 0.3
    max_rejected_share: Annotated[float, Field(ge=0, le=1)] = 0.5  # of a step's rollouts; above: the run stops


class RolloutConfig(Section):
    engine: Literal["sglang", "recorded"] = "sglang"
    recorded: str | None = None  # a run's folder, for engine "recorded"
    placement: Literal["colocated", "split", "external"] = "colocated"  # docs/rollouts.md
    servers: Positive = 1  # on all nodes together; unset, colocated on GPUs: as many as the ranks' GPUs have room for
    tp: Positive = 1  # ranks of a server
    urls: list[Url] = []  # placement external: servers that run already
    api_key_env: str | None = None  # placement external: the environment variable that holds their API key
    host: str = "127.0.0.1"  # what servers listen on: an address, or a network interface (ib0) of every node
    python: str | None = None  # the server's interpreter; None: this one
    port: Annotated[int, Field(ge=1, le=65535)] | None = None  # the first server's, the next ones'; None: free ones
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: float = 1.0
    max_new_tokens: Positive = 1024
    stop: Annotated[list[str], Field(max_length=32)] = []  # texts that end a response besides the end token
    mode: Literal["sync"] = "sync"  # of old configs: `max_staleness` has taken its place
    # steps between the weights that a token is sampled from and the step that trains on it; above 0 servers generate
    # for later steps while the ranks train (docs/rollouts.md)
    max_staleness: Annotated[int, Field(ge=0)] = 0
    # what a weight sync does with responses under way: partial, they go on under the new weights; drain, it waits
    at_sync: Literal["partial", "drain"] = "partial"
    concurrency: Positive = 256  # requests under way at once, at each server
    # per rollout at its server; then aborted and counted; None: 0.1 for each token of max_new_tokens, at least 600
    timeout: Seconds | None = None
    start_timeout: Seconds = 600.0  # until a server answers, compilations included
    health_timeout: Seconds = 30.0  # without an answer of a server to /health until it counts as hung
    # number of steps whose rollouts are kept, in addition to those after the last checkpoint; None: all, until they use
    # half of the space on output_dir's disk, then the newest
    keep_last: Positive | None = None
    # module:function, which has an episode of several turns for each rollout (docs/agents.md); max_new_tokens and
    # timeout are then an episode's
    agent: str | None = None
    agent_python: str | None = None  # the interpreter of its processes; None: this one
    agent_workers: Positive = 2  # processes, each of which runs many episodes at once
    agent_turns: Positive = 32  # of an episode
    # of all segments of an episode together, their contexts included: they are one micro-batch; None:
    # trainer.micro_batch_tokens, or model.max_length if that is more
    agent_tokens: Positive | None = None
    agent_episodes: Positive = 64  # under way at once; an evaluation beside training has as many of its own
    tool_parser: str = "qwen25"  # SGLang's name of the form in which the model calls tools
    # of the servers' linear layers, whose weights each weight sync quantises; None: none (docs/rollouts.md)
    quantization: Literal["fp8"] | None = None
    # mixtures of experts: servers return the experts that each token was routed to, and the training routes it to the
    # same ones (docs/rollouts.md)
    router_replay: bool = True
    sync: SyncConfig = SyncConfig()
    proof: ProofConfig = ProofConfig()
    offload: Literal["auto"] | bool = "auto"  # servers and ranks take turns with memory; auto: where on one GPU
    # of the GPU, for the server's weights and KV cache; unset: 0.7 where it takes turns with a rank, 0.5 beside one
    # without turns, 0.85 on a GPU of its own
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(default_factory=lambda own: _memory_fraction(**own))
    server_args: list[str] = []  # passed to sglang.launch_server as they are

    def timeout_of(self, max_new_tokens: int | None = None) -> float:
        """Seconds from a rollout's dispatch until it is aborted; `max_new_tokens` None: the config's."""
        if self.timeout is not None:
            return self.timeout
        return max(SHORTEST_TIMEOUT, TOKEN_TIMEOUT * (max_new_tokens or self.max_new_tokens))

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.top_p != 1.0:
            yield "top_p: training needs 1.0, since the engine's logprobs are of the full softmax"
        if (self.engine == "recorded") != (self.recorded is not None):
            yield "recorded: name a run's folder together with engine: recorded, and only then"
        if (self.placement == "external") != bool(self.urls):
            yield "urls: name running servers together with placement: external, and only then"
        if self.api_key_env is not None and self.placement != "external":
            yield "api_key_env: goes with placement: external; our own servers get a key of their own"
        if self.host in EVERY_INTERFACE:
            yield f"host: {self.host} opens the servers to every network of the node; name an address or interface"
        if self.offload is True and self.placement != "colocated":
            yield f"offload: servers and ranks share no memory where placement is {self.placement}"
        if self.offload is True and self.max_staleness:
            yield "offload: with max_staleness servers generate while the ranks train; set max_staleness to 0"
