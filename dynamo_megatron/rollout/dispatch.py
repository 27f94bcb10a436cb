"""Which request goes next, and to which server: pure policy."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Load:
    """What a server has under way: requests, and the tokens that they are expected to come to."""

    requests: int = 0
    tokens: float = 0.0


class ExpectedLengths:
    """How long a response to a prompt will be: the mean of its earlier ones, else of all, else `default` tokens.

    The mean of a prompt forgets: an earlier response counts half as much as the next one (a policy's lengths drift).
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
    """Requests of the longest expected responses first, those of a group together, else in the order given.

    What starts last runs alone at the end: it had better be short (longest processing time first, Graham 1969).
    """
    longest: dict[Hashable, float] = {}
    for group, length in zip(groups, lengths, strict=True):
        longest[group] = max(longest.get(group, 0.0), length)
    first: dict[Hashable, int] = {}
    for index, group in enumerate(groups):
        first.setdefault(group, index)
    key = [(-longest[group], first[group]) for group in groups]
    return [int(i) for i in np.lexsort(([k[1] for k in key], [k[0] for k in key]))]


def choose_server(
    loads: Mapping[str, Load], capacity: int, home: str | None = None, group_tokens: float = 0.0
) -> str | None:
    """The server with the fewest expected tokens under way among those with fewer than `capacity` requests, or None.

    `home`, where the request's group is, keeps it (its prompt is in that server's prefix cache) as long as it has no
    more than `group_tokens`, the whole group's, above the least.
    """
    free = {name: load for name, load in loads.items() if load.requests < capacity}
    if not free:
        return None
    least = min(free, key=lambda name: (free[name].tokens, name))
    if home in free and free[home].tokens <= free[least].tokens + group_tokens:
        return home
    return least
