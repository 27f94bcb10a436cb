"""The addresses of a reward service: a fixed list, or those of servers that come and go."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynamo_megatron.reward.outcomes import NoScore

POLL_EVERY = 0.2  # seconds


@dataclass(frozen=True)
class Address:
    """`api_key` is sent as "Authorization: Bearer KEY"; with "" no such header is sent."""

    url: str
    api_key: str = field(default="", repr=False)


class Addresses:
    """The addresses that requests go to, in turn. One thread may change them while others read."""

    def __init__(self, given: Iterable[Address] = (), restarts_within: float = 0.0) -> None:
        """`restarts_within`: how long to wait for a server while none is up, in seconds; 0: the addresses are fixed."""
        self._up = {address.url: address for address in given}  # replaced by a new dict, never changed in place
        self.keys = {address.api_key for address in self._up.values()}  # all so far
        self.restarts_within = restarts_within
        self._turns = itertools.count()
        self._why_none = "none has come up"
        self._final = False

    @property
    def fixed(self) -> bool:
        return not self.restarts_within

    @property
    def known(self) -> list[Address]:
        return list(self._up.values())

    def up(self, name: str, address: Address) -> None:
        self.keys = self.keys | {address.api_key}  # a new set: another thread may be iterating over the old one
        self._up = {**self._up, name: address}

    def down(self, name: str, why: str, final: bool = False) -> None:
        """Removes the server `name`; `why` is for error messages. `final`: no server will come up again."""
        self._up = {other: address for other, address in self._up.items() if other != name}
        self._why_none, self._final = f"{name}: {why}", final

    async def next(self) -> Address:
        """Returns the next address; waits while no server is up. Raises NoScore where none comes up in time."""
        end = time.monotonic() + self.restarts_within
        while not (known := self.known):
            if self._final or time.monotonic() > end:
                raise NoScore(f"no server of the reward model is up; {self._why_none}", "crashed")
            await asyncio.sleep(POLL_EVERY)
        return known[next(self._turns) % len(known)]
