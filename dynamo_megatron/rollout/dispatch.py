"""A request for a rollout, and which server it goes to: pure policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_megatron.rollout.client import Response
from dynamo_megatron.types import Prompt


@dataclass
class Siblings:
    """What the requests of a group share: how many they are, and the server that the last one went to."""

    count: int = 0
    home: str | None = None


@dataclass(eq=False)
class Request:
    """`seed`: as in `SGLangClient.generate`; the same for every server and every attempt. `temperature` and
    `max_new_tokens`: None for the config's. `stop`: in addition to the config's. `routes_from`: as in
    `SGLangClient.generate`. `order`: which of the waiting requests is sent first. The fields below `order` are the
    state of the request."""

    name: str
    group: str
    prompt: Prompt
    tokens: Sequence[int]  # that the model is given
    seed: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    routes_from: int | None = None
    siblings: Siblings = field(default_factory=Siblings)
    order: tuple[int, int] = (0, 0)
    lost: list[str] = field(default_factory=list)  # servers that it was lost with
    refused: list[str] = field(default_factory=list)  # servers that refused it
    limit: float | None = None  # monotonic seconds: when it is aborted; set when first sent
    begun: Response | None = None  # the part of the response that older weights sampled
    syncs: int = 0  # weight syncs that interrupted it


def choose_server(loads: Mapping[str, int], capacity: int, siblings: Siblings) -> str | None:
    """Returns the server with the fewest requests under way, `loads`, if these are fewer than `capacity`, else None.

    The server that the last request of the group went to has the prompt in its prefix cache. It is chosen instead as
    long as it has at most as many requests more than that server as the whole group has.
    """
    free = {name: load for name, load in loads.items() if load < capacity}
    least = min(free, key=lambda name: (free[name], name), default=None)
    if siblings.home in free and free[siblings.home] <= free[least] + siblings.count:
        return siblings.home
    return least
