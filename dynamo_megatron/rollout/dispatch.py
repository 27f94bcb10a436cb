"""Decides which request goes next, and to which server: pure policy."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_megatron.rollout.client import Response
from dynamo_megatron.types import Prompt


@dataclass
class Siblings:
    """What the requests of a group share: the expected tokens of all, and the server that the last one went to."""

    tokens: float = 0.0
    home: str | None = None


@dataclass(eq=False)
class Request:
    """`expected`: expected tokens of the response. `seed`: as in `SGLangClient.generate`; the same for every server and
    every attempt. `temperature` and `max_new_tokens`: None for the config's. `stop`: in addition to the config's.
    `routes_from`: as in `SGLangClient.generate`. `order`: which of the waiting requests is sent first. The fields below
    `order` are the state of the request."""

    name: str
    group: str
    prompt: Prompt
    tokens: Sequence[int]  # that the model is given
    expected: float
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


@dataclass
class Load:
    """What a server has under way: the number of requests, and the response tokens that are expected of them."""

    requests: int = 0
    tokens: float = 0.0


class ExpectedLengths:
    """The expected tokens of a response to a prompt: the mean of its earlier responses, else of all responses, else
    `default`.

    The mean of a prompt forgets: a response counts half as much as the next one, since a policy's lengths drift.
    """

    def __init__(self, default: float):
        self._all, self._count = float(default), 0
        self._prompts: dict[str, float] = {}

    def __call__(self, prompt_id: str) -> float:
        return self._prompts.get(prompt_id, self._all)

    def observe(self, prompt_id: str, tokens: int) -> None:
        self._count += 1
        self._all += (tokens - self._all) / min(self._count, 1024)
        mean = self._prompts.get(prompt_id)
        self._prompts[prompt_id] = tokens if mean is None else 0.5 * (mean + tokens)


def dispatch_order(groups: Sequence[Hashable], lengths: Sequence[float]) -> list[int]:
    """Returns the indices of the requests in the order to send them: groups with the longest expected response first,
    the requests of a group together, otherwise in the order passed.

    The request that starts last runs alone at the end, so it should be short (longest processing time first, Graham
    1969).
    """
    longest: dict[Hashable, float] = {}
    first: dict[Hashable, int] = {}
    for index, (group, length) in enumerate(zip(groups, lengths, strict=True)):
        longest[group] = max(longest.get(group, 0.0), length)
        first.setdefault(group, index)
    return sorted(range(len(groups)), key=lambda i: (-longest[groups[i]], first[groups[i]]))


def choose_server(
    loads: Mapping[str, Load], capacity: int, home: str | None = None, group_tokens: float = 0.0
) -> str | None:
    """Returns the server with the fewest expected tokens under way among those with fewer than `capacity` requests, or
    None.

    `home`, the server of the request's group, has the prompt in its prefix cache. It is chosen instead as long as it
    has at most `group_tokens`, the expected tokens of the whole group, more than that server.
    """
    free = {name: load for name, load in loads.items() if load.requests < capacity}
    if not free:
        return None
    least = min(free, key=lambda name: (free[name].tokens, name))
    if home in free and free[home].tokens <= free[least].tokens + group_tokens:
        return home
    return least
