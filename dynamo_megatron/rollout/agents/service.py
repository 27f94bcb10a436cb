"""The HTTP endpoint of sessions, on the loopback interface of the rollout process. A secret in the path names one."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from dynamo_megatron.rollout.agents.messages import BadRequest, LimitReached, reading
from dynamo_megatron.rollout.agents.session import Session, events
from dynamo_megatron.runtime.plain_text import error_line

LARGEST = 1 << 28  # bytes of a request
STATUS = 400  # of what is refused: clients do not send it again
LIMIT_CODE = "episode_limit"  # of the error, where a limit of the episode refuses the request

Ask = Callable[[Session, dict[str, Any]], Awaitable[dict[str, Any]]]


class SessionService:
    """Use `start`, then `open` and `close` for each session, and `stop`."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._base = ""
        app = web.Application(client_max_size=LARGEST)
        app.router.add_post("/{key}/v1/chat/completions", functools.partial(self._answer, ask=Session.chat))
        app.router.add_post("/{key}/v1/completions", functools.partial(self._answer, ask=Session.complete))
        app.router.add_get("/{key}/v1/models", self._models)
        # An agent that goes away, or closes its connection, does not want the answer any more.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._base = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    def open(self, session: Session) -> tuple[str, str]:
        """Its key, and its URL."""
        key = secrets.token_urlsafe(16)
        self._sessions[key] = session
        return key, f"{self._base}/{key}/v1"

    def close(self, key: str) -> None:
        del self._sessions[key]

    async def _answer(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        if (session := self._sessions.get(request.match_info["key"])) is None:
            return _error("the episode has ended", 404)
        try:
            with reading("the request"):
                asked = await request.json()
            if not isinstance(asked, dict):
                raise BadRequest("the request is no object")
            answer = await ask(session, asked)
        except ValueError as error:  # JSON's, and BadRequest
            return _error(str(error), STATUS, LIMIT_CODE if isinstance(error, LimitReached) else None)
        except (TypeError, LookupError, AttributeError, RuntimeError) as error:
            session.failure = session.failure or f"a request of the agent failed: {error_line(error)}"
            return _error(session.failure, 500)
        if not asked.get("stream"):
            return web.json_response(answer)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        options = asked.get("stream_options")
        for event in events(answer, isinstance(options, dict) and bool(options.get("include_usage"))):
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0}]})


def _error(message: str, status: int, code: str | None = None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
