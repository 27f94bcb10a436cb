"""A server as all see it that talk to it: the fleet, and the ranks that send weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dynamo_megatron.runtime.plain_text import on_one_line

LONGEST = 300  # characters


@dataclass(frozen=True)
class Endpoint:
    """One SGLang server of `tp` ranks. `incarnation` grows with every restart; `name` stays ("server-0")."""

    name: str
    incarnation: int
    url: str
    tp: int
    api_key: str = field(repr=False)  # sent as "Authorization: Bearer KEY"; "": the server asks for none

    def own_words(self, reply: Any) -> str:
        """What the server says went wrong, in one line as a terminal may show it: error replies have several shapes."""
        if isinstance(reply, dict):
            error = reply.get("error")
            reply = error.get("message") if isinstance(error, dict) else reply.get("message", reply)
        return on_one_line(str(reply)[: 10 * LONGEST], LONGEST)
