"""A session whose answers a test writes, and the endpoint before it."""

import asyncio
import contextlib

import numpy as np
from agents_chat import make_tokenizer

from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.agents.episode import Episode
from dynamo_megatron.rollout.agents.service import SessionService
from dynamo_megatron.rollout.agents.session import Limits, Session, tool_calls
from dynamo_megatron.rollout.client import Response

TOKENIZER = make_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
LIMITS = {"turns": 8, "tokens": 400, "length": 2000, "vocab_size": len(TOKENIZER), "trained": 9000}
QUESTION = [{"role": "user", "content": "how much is 3 + 4?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


class Scripted:
    """Answers with texts in turn, each cut to the tokens asked for. A token's route names the turn and its position."""

    def __init__(self, *texts: str, **limits):
        self.texts, self.asked = list(texts), []
        chat = ChatTokens(TOKENIZER, [END])
        self.session = Session(Episode(chat), Limits(**{**LIMITS, **limits}), self.sample, self.parse)
        self.delay, self.cancelled = 0.0, 0

    async def sample(self, ids, most, stop, number, known):
        self.asked.append((ids, most, stop, number))
        text = self.texts.pop(0)
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if text == "FAIL":
            return Response(error="the server refused it")
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        stopped = any(s in text for s in stop)
        tokens = tokens if stopped else [*tokens, END]
        finish = "stop" if len(tokens) <= most else "length"
        tokens = tokens[:most]
        routes = np.array([[[number, place]] for place in range(known, len(ids) + len(tokens))], np.uint8)
        return Response(tokens, [-1.0] * len(tokens), [(0, 0, len(tokens))], finish, routes=routes)

    async def parse(self, text, tools):
        if "<tool_call>" not in text:
            return text, []
        head = text.partition("<tool_call>")[0].strip()
        return tool_calls({"normal_text": head, "calls": [{"name": "add", "parameters": '{"a": 3, "b": 4}'}]})


@contextlib.asynccontextmanager
async def endpoint(scripted):
    """The session's base_url."""
    service = SessionService()
    await service.start()
    try:
        key, url = service.open(scripted.session)
        yield url
        service.close(key)
    finally:
        await service.stop()
