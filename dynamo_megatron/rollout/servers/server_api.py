"""A server as all see it that talk to it, and what a sending rank says to it about weights: SGLang's HTTP calls,
synchronous, each with a timeout."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.runtime.plain_text import on_one_line

CACHES = ("kv_cache", "cuda_graph")  # tags of memory that a server may release and resume without losing anything
CONTROL_TIMEOUT = 60.0  # seconds, for calls that move no weights
TRANSFER_TIMEOUT = 300.0  # seconds, for one bucket
CHECK_TIMEOUT = 600.0  # seconds, for a checksum of all weights
LONGEST = 300  # characters of what a server says


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


class ServerError(RolloutError):
    """A server refused, failed or did not answer; the message names the call."""


def call(endpoint: Endpoint, path: str, payload: dict[str, Any] | None, timeout: float) -> Any:
    """POSTs `payload` (None: GETs), returns what the server says. Raises ServerError."""
    status, reply = request(endpoint, path, payload, timeout)
    if status != 200:
        raise ServerError(f"{path} said {status}: {endpoint.own_words(reply)}")
    return reply


def call_for(
    endpoint: Endpoint, path: str, payload: dict[str, Any] | None, timeout: float, *names: str
) -> tuple[Any, ...]:
    """As `call`: what the server's reply has under `names`. Raises ServerError also where it has not."""
    reply = call(endpoint, path, payload, timeout)
    if not isinstance(reply, dict) or not reply.keys() >= set(names):
        raise ServerError(f"{path} said nothing of {', '.join(names)}: {endpoint.own_words(reply)}")
    return tuple(reply[name] for name in names)


def request(endpoint: Endpoint, path: str, payload: dict[str, Any] | None, timeout: float) -> tuple[int, Any]:
    """As `call`, with the status whatever it is. Raises ServerError where no reply comes within `timeout` seconds."""
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    data = None if payload is None else json.dumps(payload).encode()
    asked = urllib.request.Request(endpoint.url + path, data=data, headers=headers)
    try:
        try:
            reply = _opener.open(asked, timeout=timeout)
        except urllib.error.HTTPError as refusal:  # a reply too, whose body may break off like any other's
            reply = refusal
        with reply:
            raw = reply.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            raise ServerError(f"{path} had no answer within {timeout:g} s") from None
        raise ServerError(f"{path}: no answer ({endpoint.own_words(error) or type(error).__name__})") from None
    try:
        return reply.status, from_json(raw)
    except ValueError:
        return reply.status, raw.decode(errors="replace")


def open_session(endpoint: Endpoint) -> None:
    """Opens the server's weight-update session. A session that an interrupted sync left open is closed first."""
    for _ in range(2):
        status, reply = request(endpoint, "/begin_weight_update", {}, CONTROL_TIMEOUT)
        if status == 200:
            return
        if "already open" not in endpoint.own_words(reply):
            break
        call(endpoint, "/end_weight_update", {}, CONTROL_TIMEOUT)
    raise ServerError(f"/begin_weight_update said {status}: {endpoint.own_words(reply)}")


def rest(endpoint: Endpoint) -> None:
    """Ends all requests under way and drops cached prefixes. Raises ServerError."""
    call(endpoint, "/abort_request", {"abort_all": True}, CONTROL_TIMEOUT)
    flush(endpoint)


def flush(endpoint: Endpoint) -> None:
    """Drops cached prefixes, once no request is under way. Raises ServerError."""
    call(endpoint, f"/flush_cache?timeout={CONTROL_TIMEOUT / 2:g}", {}, CONTROL_TIMEOUT)


def set_version(endpoint: Endpoint, version: int) -> None:
    """Tells the server its weight version and hears it back. Drops what was cached since the fleet stopped the server's
    traffic: /health, which needs no key, generates from token 0 with whatever weights are there."""
    flush(endpoint)
    payload = {"new_version": str(version), "abort_all_requests": False}
    call(endpoint, "/update_weight_version", payload, CONTROL_TIMEOUT)
    check_version(endpoint, version)


def check_version(endpoint: Endpoint, version: int) -> None:
    (reported,) = call_for(endpoint, "/model_info", None, CONTROL_TIMEOUT, "weight_version")
    if reported != str(version):
        raise ServerError(f"/model_info says weight version {endpoint.own_words(reported)!r}, not {version}")


# A proxy of the environment is for the world outside, not for the cluster's own servers.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
