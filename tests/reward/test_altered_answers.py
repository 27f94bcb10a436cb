"""A reward service whose every answer is altered: none ends the run, none gives a reward that the service did not say.

Of an altered answer a sample gets the reward of the honest answer, or none: a failure that is counted and that names
the service. The one exception is a service that says another number in the place of a reward (NUMBERS): there is
nothing in an answer to tell it by, and only the sample of that place may get that number.
"""

import asyncio
import contextlib
import json
import random
import re
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from alterations import KINDS, Alteration, alter

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.types import Prompt

PROMPT = Prompt("p7", text="?", answer="1")
NUMBERS = {"true", "false", "1.0", "-1", "2147483648", "1099511627776", "1.5", "-0.5", "1e-400"}
SEVERAL = 3  # samples of a request


def honest(response: str) -> float:
    return zlib.crc32(response.encode()) % 1000 / 7


@dataclass
class Altered:
    alteration: Alteration
    responses: list[str]

    def said_instead(self) -> tuple[str, float] | None:
        """(response, reward), where the alteration puts a number in the place of its reward."""
        match = re.fullmatch(r"rewards\[(\d+)\]: (.+)", self.alteration.what)
        if match is None or match[2] not in NUMBERS:
            return None
        return self.responses[int(match[1])], float(json.loads(match[2]))


class Service:
    """Answers every request with an altered reply."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.replies: list[Altered] = []
        self.redirected = 0
        self._ready, self._done = threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "Service":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=256)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
        self._ready.set()
        await self._done.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.redirected += "/elsewhere" in head.splitlines()[0]
            length = int(re.search(r"Content-Length: (\d+)", head)[1])
            responses = [s["response"] for s in json.loads(await reader.readexactly(length))["samples"]]
            body = json.dumps({"rewards": [honest(r) for r in responses]}).encode()
            altered = alter(self._rng, body, elsewhere=f"{self.url}/elsewhere", huge=3 << 20, longest_delay=0.05)
            self.replies.append(Altered(altered, responses))
            await asyncio.sleep(altered.delay)
            writer.write(altered.http())
            await writer.drain()
        writer.close()


@pytest.fixture
def quick(monkeypatch):
    for name, value in {"BATCH": SEVERAL, "FIRST_PAUSE": 0.01, "LONGEST_PAUSE": 0.01}.items():
        monkeypatch.setattr(f"dynamo_megatron.reward.http.{name}", value)


def rounds(pool: RewardPool, service: Service, wanted: int) -> Iterator[tuple[str, Score]]:
    """(response, score), until the service has given `wanted` altered replies."""

    async def score(responses: list[str]) -> list[Score]:
        return await asyncio.gather(*(pool.score(PROMPT, response) for response in responses))

    number = 0
    while len(service.replies) < wanted:
        responses = [f"{number}-{k}" for k in range(8 * SEVERAL)]
        yield from zip(responses, asyncio.run(asyncio.wait_for(score(responses), 60)), strict=True)
        number += 1


@pytest.mark.parametrize("replies", [300, pytest.param(5000, marks=pytest.mark.full)])
def test_no_altered_answer_ends_the_run_or_changes_a_reward(quick, replies):
    outcomes, failures = Counter(), Counter()
    with Service(seed=18) as service:
        pool = RewardPool(RewardConfig(functions=[service.url], on_error="zero", deadline=2.0))
        pool.start()
        scores = dict(rounds(pool, service, replies))
        pool.close()
    asked = {}  # response -> the replies that it was in
    for altered in service.replies:
        for response in altered.responses:
            asked.setdefault(response, []).append(altered)
    assert asked.keys() == scores.keys() and len(service.replies) >= replies and not service.redirected
    for response, score in scores.items():
        last = asked[response][-1]
        outcomes[last.alteration.kind, score.status] += 1
        if score.status == "ok":
            said = last.said_instead()
            right = said[1] if said is not None and said[0] == response else honest(response)
            assert score.reward == right, last.alteration
            assert score.success == (right >= 1) and score.parts == {service.url: right}
        else:
            failures[re.sub(r"\d+", "N", score.failure.removeprefix(service.url))[:50]] += 1
            assert (score.reward, score.success, score.parts) == (0.0, False, {}), last.alteration
            assert score.failure.startswith(f"{service.url}: ") and score.failure.isprintable(), last.alteration
            assert len(score.failure) < len(service.url) + 320, last.alteration
    assert {altered.alteration.kind for altered in service.replies} == set(KINDS)
    assert not any(
        status == "ok" for kind, status in outcomes if kind in ("nesting", "redirect", "huge", "page", "cut")
    )
    print(f"{len(service.replies)} altered answers to {len(scores)} samples")
    for (kind, status), count in sorted(outcomes.items()):
        print(f"{kind:15} {status:15} {count}")
    for text, count in failures.most_common():
        print(f"{count:6} {text}")


def test_where_errors_are_raised_an_altered_answer_is_one_that_names_the_service(quick):
    with Service(seed=7) as service:
        pool = RewardPool(RewardConfig(functions=[service.url], on_error="raise", deadline=2.0))
        pool.start()

        async def score() -> list:
            return await asyncio.gather(*(pool.score(PROMPT, f"{k}") for k in range(60)), return_exceptions=True)

        results = asyncio.run(score())
        pool.close()
    errors = [result for result in results if not isinstance(result, Score)]
    assert len(errors) > 20 and all(isinstance(error, RewardError) for error in errors)
    for error in errors:
        last = str(error).splitlines()[-1]
        assert last.startswith(f"reward function {service.url} failed on prompt 'p7': ") and last.isprintable()
