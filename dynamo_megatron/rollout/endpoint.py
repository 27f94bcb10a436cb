"""A server as the ranks that send it weights see it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Endpoint:
    """One SGLang server of `tp` ranks. `incarnation` grows with every restart; `name` stays ("server-0")."""

    name: str
    incarnation: int
    url: str
    tp: int
    api_key: str = field(repr=False)  # sent as "Authorization: Bearer KEY"; "": the server asks for none
