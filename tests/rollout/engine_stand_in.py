"""A server whose tokens say which weights have made them, and the trainer's loop before it."""

import asyncio

from aiohttp import web
from stand_ins import ABORTED, Server, name_of, reply

from dynamo_megatron.types import Prompt

PROMPT = 2  # tokens of every prompt
PROMPTS = [Prompt(f"q{i}", text="?", tokens=[1 + i, 30]) for i in range(6)]
COUNTS = [2] * len(PROMPTS)
FIRST = 40  # the token that version 0 makes; version 1 makes the next one, and so on
VERSIONS = 80  # different tokens


def length(prompt: list[int]) -> int:
    """Of a response to one of PROMPTS: 4 to 39 tokens."""
    return 7 * prompt[0] - 3


class Engine(Server):
    """Makes a token of each request every `seconds`. `length(prompt's tokens)`: of a whole response, whatever of it the
    request has already; its last token is `end`, where one is given. Aborted, a request is answered with its tokens so
    far and one more, as SGLang does."""

    def __init__(self, length, seconds: float = 0.01, end: int | None = None):
        super().__init__()
        self.length, self.seconds, self.end, self.version = length, seconds, end, 0
        self.broken = False  # it breaks all connections
        self.holds: set[str] = set()  # rollouts whose requests stop half way until a push aborts them or waits for them
        self.begun: dict[str, int] = {}  # request -> tokens of its response that it came with

    def progress(self, name: str, tokens: list[int]) -> tuple[int, int]:
        """Tokens of the response that a request came with, and of the whole one."""
        return len(tokens) - PROMPT, self.length(tokens[:PROMPT])

    async def generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        rid, tokens, most = payload["rid"], payload["input_ids"], payload["sampling_params"]
        if isinstance(rid, list):
            return web.json_response({"error": {"message": "no lists"}}, status=400)
        self.asked.append(name_of(rid))
        begun, whole = self.progress(name_of(rid), tokens)
        self.begun[name_of(rid)] = begun
        left, made = whole - begun, []
        assert 0 < left <= most["max_new_tokens"], f"{rid}: {left} tokens are left of the response"
        aborted = asyncio.get_running_loop().create_future()
        self.running.append((rid, aborted))
        try:
            while len(made) < left:
                while len(made) == left // 2 and name_of(rid)[:15] in self.holds and not aborted.done():
                    await asyncio.sleep(self.seconds)
                over = aborted.done()
                await asyncio.sleep(self.seconds)
                if self.broken and request.transport is not None:
                    request.transport.close()
                last = self.end is not None and len(made) == left - 1
                made.append(self.end if last else FIRST + self.version % VERSIONS)
                if over:
                    break
        finally:
            self.running.remove((rid, aborted))
        ends_by_itself = self.end is None and len(made) == left < most["max_new_tokens"]
        return web.json_response(self._reply(rid, made, aborted.done() and not ends_by_itself, left))

    def _reply(self, rid: str, made: list[int], aborted: bool, left: int) -> dict:
        finish = {"type": "stop", "matched": self.end}
        sent = reply(rid, len(made), ABORTED if aborted else finish)
        sent["meta_info"]["output_token_logprobs"] = [[-1.0, token, None] for token in made]
        sent["meta_info"]["weight_versions"] = [{"version": str(self.version), "start": 0, "end": len(made)}]
        return sent


def run_steps(engines, steps: int, staleness: int, first: int = 1, ends=None, prompts=PROMPTS):
    """Work for `with_generator`, whose result is {step: its result}: a loop as the trainer's, with two rollouts of each
    of `prompts` in each step. The last one of every later step is under way at the first push after its dispatch.
    `ends`: a step, and what the loop waits for in it before it ends."""
    counts = [2] * len(prompts)

    async def pushed(generator, version, held):
        while not held <= {name_of(rid)[:15] for engine in engines for rid, _ in engine.running}:
            await asyncio.sleep(0.001)
        for engine in engines:
            engine.holds = set()
        endpoints = await generator.begin_sync(version)
        assert not any(engine.running for engine in engines if not engine.broken), "a push while something is under way"
        for engine in engines:
            engine.version = version
        await generator.end_sync(version, dict.fromkeys(endpoints))

    async def work(generator, push):
        results, dispatched = {}, first - 1
        await pushed(generator, first - 1, set())
        for step in range(first, steps + 1):
            new = range(dispatched + 1, min(step + staleness, steps) + 1)
            held = {f"{n:06d}-{len(prompts) - 1:04d}-001" for n in new if n > step}
            for engine in engines:
                engine.holds = held
            for dispatched in new:
                await generator.dispatch(dispatched, prompts, counts)
            if ends is not None and step == ends[0]:
                while not ends[1]():
                    await asyncio.sleep(0.001)
                return results
            results[step] = await generator.collect(step)
            await pushed(generator, step, held)
        return results

    return work
