"""Problems of reasoning-gym with feedback."""

import asyncio

import pytest

from dynamo_megatron.agents.reasoning_gym import reasoning_gym_agent
from dynamo_megatron.config import DataConfig
from dynamo_megatron.data import load_prompts
from dynamo_megatron.rollout.agents.worker import LimitReached, Prompt


class Session:
    """Answers with `texts`, and then refuses. `asked`: the messages of each request."""

    def __init__(self, *texts):
        self._texts, self.asked = list(texts), []

    LimitReached = LimitReached

    async def chat(self, messages):
        self.asked.append(list(messages))
        if not self._texts:
            raise LimitReached("the episode has had its turns")
        return {"role": "assistant", "content": self._texts.pop(0)}


def play(session, attempts=3):
    spec = "reasoning_gym:prime_factorization?size=1&seed=42&min_value=12&max_value=12"
    (prompt,) = load_prompts(DataConfig(source=spec))
    messages = [{"role": "user", "content": prompt.text}]
    given = Prompt(prompt.prompt_id, messages, prompt.text, prompt.answer, prompt.source, prompt.meta)
    return asyncio.run(reasoning_gym_agent(attempts)(given, session))


def test_it_is_told_its_score_and_tries_again():
    session = Session("banana", "<answer>4 × 3</answer>", "<answer>2 × 2 × 3</answer>", "more")
    assert play(session) == 1.0
    said = [m["content"] for m in session.asked[-1][1:]]
    assert said[1::2] == ["The score of this answer is 0. Try again.", "The score of this answer is 0.5. Try again."]


def test_a_limit_ends_it_with_the_last_score():
    assert play(Session("<answer>4 × 3</answer>")) == 0.5
    with pytest.raises(LimitReached):  # the reason is the failed episode's
        play(Session())
