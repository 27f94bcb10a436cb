"""Servers and training ranks that share GPUs take turns with their memory.

This has run on one GPU. On a CPU a server frees nothing; the tests have a server that loses what it releases
(tests/e2e/poisoning_saver).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from dynamo_megatron.policy.offload import PARTS, Offload
from dynamo_megatron.rollout.servers.server_api import CACHES, CONTROL_TIMEOUT, Endpoint, call, rest
from dynamo_megatron.runtime.threads import for_each

if TYPE_CHECKING:
    from dynamo_megatron.policy.policy import Policy
    from dynamo_megatron.rollout.worker import RolloutWorker

TAGS = ("weights", *CACHES)  # in the order in which they come back
# What is on the device in each phase of a run: the server's tags, the policy's parts, the critic's; other phases leave
# the memory as it is. A server that releases its weights has lost them: after "update" it needs a weight sync.
PHASES = {
    **dict.fromkeys(("generate", "evaluate"), (TAGS, (), ())),
    **dict.fromkeys(("logprobs", "weight sync"), (("weights",), ("weights",), ())),  # more may be generated meanwhile
    "values": (("weights",), (), ("weights",)),
    "update": ((), PARTS, ()),
    "critic": ((), (), PARTS),
    **dict.fromkeys(("save", "export"), (("weights",), PARTS, PARTS)),
    "failed step": ((), ("weights",), ()),  # written without the optimizer, after the servers have ended
}


class DeviceMemory:
    """Releases and resumes memory in each phase, on every rank. `rollout`: on rank 0 only, None elsewhere; it restarts
    a server that does not do its part. `critic`: None where there is none."""

    def __init__(self, policy: Policy, rollout: RolloutWorker | None, critic: Policy | None = None):
        self._layout, self._rollout = policy.layout, rollout
        self._offloads = [Offload(model) for model in (policy, critic) if model is not None]
        self._released: dict[Endpoint, set[str]] = {}  # the tags that each known server lacks; empty except on rank 0
        self._seconds = 0.0  # spent in `enter` since they were last taken

    def allocate_ahead(self) -> None:
        """`Offload.allocate_ahead` of every model."""
        for offload in self._offloads:
            offload.allocate_ahead()

    def close(self) -> None:
        for offload in self._offloads:
            offload.close()

    def set_servers(self, endpoints: Sequence[Endpoint]) -> None:
        """Sets the servers there are now. A new one comes without its caches (rollout/servers/supervisor.py)."""
        if self._rollout is not None:
            self._released = {e: self._released.get(e, set(CACHES)) for e in endpoints}

    def enter(self, phase: str) -> None:
        """Collective over all ranks: what the phase does not need is released everywhere, then what it needs comes
        back."""
        start, (tags, *parts) = time.monotonic(), PHASES[phase]
        offloads = list(zip(self._offloads, parts, strict=False))
        self._ask("release", [t for t in TAGS if t not in tags])
        dist.barrier(group=self._layout.host)
        for offload, needed in offloads:
            offload.release([p for p in PARTS if p not in needed])
        dist.barrier(group=self._layout.host)
        for offload, needed in offloads:
            offload.resume(needed)
        self._ask("resume", tags)
        dist.barrier(group=self._layout.host)
        self._seconds += time.monotonic() - start

    def take_seconds(self) -> float:
        """Returns the seconds spent in `enter` since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _ask(self, what: str, tags: Sequence[str]) -> None:
        """Asks every server that still has (or, to resume, lacks) some of `tags`: SGLang dies of being asked twice."""
        due = {e: [t for t in tags if (t in lacks) == (what == "resume")] for e, lacks in self._released.items()}

        def ask(endpoint: Endpoint) -> None:
            if what == "release" and "kv_cache" in due[endpoint]:
                rest(endpoint)  # SGLang dies of a release during a request, even one just aborted
            call(endpoint, f"/{what}_memory_occupation", {"tags": due[endpoint]}, CONTROL_TIMEOUT)

        done, failed = for_each([e for e, tags in due.items() if tags], ask, None)
        for endpoint, _ in done:
            self._released[endpoint].symmetric_difference_update(due[endpoint])
        for endpoint, _ in failed:
            del self._released[endpoint]
        if failed:
            self._rollout.condemn({e: f"it did not {what} its memory: {why}" for e, why in failed})
