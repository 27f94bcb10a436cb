"""A proxy on loopback before a rollout server that alters its replies by the grammar of alterations.py, and keeps the
honest ones."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import aiohttp
from alterations import CONTENT, KINDS, TRANSPORT, Alteration, alter

NAME = re.compile(r"(?:alone-)?(r[0-9]+)")  # of a request, in all its ids
EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Attempt:
    """A request of `id` and how it was answered: `meta` is the server's, `alteration` None where it was passed on."""

    id: str
    meta: dict[str, Any] | None
    alteration: Alteration | None


class AlteringProxy:
    """Alters a `share` of the replies of the server at `upstream` to /generate and /v1/loads. Requests are named r0,
    r1... `attempts`: by that name, in order. `altered`: replies by kind."""

    def __init__(self, upstream: str, seed: int, share: float, huge: int = 4 << 20):
        self._upstream, self._share, self._huge = upstream, share, huge
        self._rng = random.Random(seed)
        self.attempts: dict[str, list[Attempt]] = defaultdict(list)
        self.altered: Counter[str] = Counter()
        self.other_hosts: list[bytes] = []  # what followed a redirect

    @contextlib.asynccontextmanager
    async def listening(self):
        """Its URL."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            elsewhere = await asyncio.start_server(self._elsewhere, "127.0.0.1", 0)
            self._redirects_to = f"http://127.0.0.1:{elsewhere.sockets[0].getsockname()[1]}/elsewhere"
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            try:
                yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            finally:
                server.close()
                elsewhere.close()

    async def _elsewhere(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.other_hosts.append(await reader.readline())
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # the client need not read a reply
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split()
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("Content-Length", 0)))
            passed = {k: v for k, v in headers.items() if k in ("Authorization", "Content-Type")}
            async with self._session.request(method, self._upstream + target, data=body, headers=passed) as reply:
                kind, raw = reply.headers.get("Content-Type", "text/plain"), await reply.read()
                honest = Alteration("none", "", raw, reply.status, {"Content-Type": kind})
            made = honest
            if reply.status == 200 and target.startswith(("/generate", "/v1/loads")):
                made = self._alter(honest, target)
            await asyncio.sleep(made.delay)
            writer.write(made.http())
            await writer.drain()
        writer.close()

    def _alter(self, honest: Alteration, target: str) -> Alteration:
        """Perhaps; what is made of /generate is kept."""
        streamed = honest.headers["Content-Type"].startswith(EVENTS)
        kind = self._rng.choice(KINDS) if self._rng.random() < self._share else None
        options = {"elsewhere": self._redirects_to, "huge": self._huge}
        if not target.startswith("/generate"):
            return (
                honest if kind is None else self._made(alter(self._rng, honest.body, kinds=[kind], **options), honest)
            )
        events = [e for e in honest.body.split(b"\n\n") if e] if streamed else [honest.body]
        finished = {i: meta for i, event in enumerate(events) if (meta := _finished(event)) is not None}
        hit: set[int] = set()
        made = honest
        if kind in TRANSPORT:
            hit = set(finished)
            made = self._made(alter(self._rng, honest.body, kinds=[kind], **options), honest)
        elif kind in CONTENT and finished:
            hit = {self._rng.choice(list(finished))}
            (index,) = hit
            prefix = b"data: " if streamed else b""
            altered = alter(self._rng, events[index].removeprefix(prefix), kinds=[kind])
            events[index] = prefix + altered.body
            body = b"\n\n".join(events) + b"\n\n" if streamed else altered.body
            made = self._made(dataclasses.replace(altered, body=body), honest)
        for index, meta in finished.items():
            one = Attempt(meta["id"], meta, made if index in hit else None)
            self.attempts[NAME.match(meta["id"])[1]].append(one)
        return made

    def _made(self, made: Alteration, honest: Alteration) -> Alteration:
        self.altered[made.kind] += 1
        return dataclasses.replace(made, headers=honest.headers | made.headers)


def _finished(event: bytes) -> dict[str, Any] | None:
    """The meta_info of a reply or event that ends a response."""
    text = event.removeprefix(b"data: ")
    if not text.startswith(b"{"):
        return None
    meta = json.loads(text).get("meta_info")
    return meta if meta is not None and meta["finish_reason"] is not None else None
