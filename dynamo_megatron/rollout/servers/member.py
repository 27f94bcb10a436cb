"""A server that is up, as the fleet sees it, and where servers come from."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Protocol

from dynamo_megatron.rollout.client import SGLangClient
from dynamo_megatron.rollout.dispatch import Load
from dynamo_megatron.rollout.servers.endpoint import Endpoint


class Source(Protocol):
    """Where servers come from; it notifies the fleet through `up` and `down`."""

    def condemn(self, name: str, incarnation: int, why: str) -> None:
        """Has this incarnation of the server, or an earlier one, restarted."""

    def served(self, name: str) -> None:
        """The server took a push: its failures before that no longer slow a restart."""

    async def run(self) -> None: ...


@dataclass(eq=False)
class Member:
    """A server that is up. `version`: that of its weights, None if they are not the policy's. `gone`: set when it is
    out, to the reason."""

    endpoint: Endpoint
    client: SGLangClient
    source: Source
    version: int | None
    gone: asyncio.Future
    load: Load = field(default_factory=Load)
    refusals: int = 0  # in a row
    moment: float = -math.inf  # monotonic seconds: start of the last `fleet.MOMENT` with lost connections
    lost: int = 0  # connections lost in that moment
    kv_cache: float | None = None  # the largest share in use that was seen since the last report
    tokens: int = 0  # sampled since the last `take_use`
    busy: float = 0.0  # seconds with a request under way, up to the last one's end
    busy_since: float = 0.0  # monotonic seconds: busy time from here on is not in `busy` yet
    rested: asyncio.Event = field(default_factory=asyncio.Event)  # set when nothing is under way any more

    @property
    def name(self) -> str:
        return self.endpoint.name

    def enter(self, tokens: float) -> None:
        """Counts in a request whose response is expected to have `tokens` tokens."""
        if not self.load.requests:
            self.busy_since = time.monotonic()
        self.load.requests += 1
        self.load.tokens += tokens

    def leave(self, tokens: float) -> None:
        self.load.requests -= 1
        self.load.tokens -= tokens
        if not self.load.requests:
            self.busy += time.monotonic() - self.busy_since
            self.rested.set()

    def take_use(self) -> tuple[int, float]:
        """(tokens sampled, seconds with a request under way) since the last call."""
        now = time.monotonic()
        if self.load.requests:
            self.busy += now - self.busy_since
            self.busy_since = now
        use = self.tokens, self.busy
        self.tokens, self.busy = 0, 0.0
        return use
