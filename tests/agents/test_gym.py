"""Environments with `reset` and `step` as agents."""

import asyncio
import zlib
from types import SimpleNamespace

import pytest

from dynamo_megatron.agents.gym import gym_agent


class Count:
    """Counts to 3; an odd number is worth 1. `closed`: how many have been."""

    closed = 0

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return f"seed {seed}, options {options}", {}

    def step(self, action):
        self.at = self.at + 1 if self.at + 1 == action else 9
        return self.at, action % 2, self.at == 3, self.at > 3, {"unused": True}

    def close(self):
        Count.closed += 1


class Session:
    """Answers with `texts`, and then refuses. `asked`: the messages of each request; `options`: the last one's rest."""

    def __init__(self, *texts):
        self._texts, self.asked = list(texts), []

    class LimitReached(RuntimeError):
        pass

    async def chat(self, messages, **options):
        self.asked.append([dict(message) for message in messages])
        self.options = options
        if not self._texts:
            raise self.LimitReached("the episode has had its turns")
        return {"role": "assistant", "content": self._texts.pop(0)}


def play(session, agent=None, messages=(("user", "Count."),), **meta):
    prompt = SimpleNamespace(
        prompt_id="p", meta=meta, messages=[{"role": role, "content": text} for role, text in messages]
    )
    return asyncio.run((agent or gym_agent(Count, int))(prompt, session))


def said(session):
    return [(m["role"], m["content"]) for m in session.asked[-1]]


def test_an_episode_ends_with_the_environment_and_adds_up_its_rewards():
    session, before = Session("1", "2", "3", "4"), Count.closed
    assert play(session, seed=7, options={"a": 1}) == 2.0
    assert [text for _, text in said(session)] == ["Count.\nseed 7, options {'a': 1}", "1", "1", "2", "2"]
    assert Count.closed == before + 1


def test_an_answer_that_is_no_action_gets_the_reason():
    session = Session("one", None, "1", "2", "3")
    assert play(session, seed=None) == 2.0
    assert said(session)[0][1] == f"Count.\nseed {zlib.crc32(b'p')}, options None", "the same for a row's rollouts"
    assert said(session)[2][1] == "invalid literal for int() with base 10: 'one'"
    assert [role for role, _ in said(session)] == ["user", "assistant"] * 4 + ["user"]


def test_a_limit_ends_it_with_the_rewards_so_far():
    before = Count.closed
    assert play(Session("1", "2")) == 1.0
    with pytest.raises(RuntimeError, match="had its turns"):  # the reason is the failed episode's
        play(Session())
    assert Count.closed == before + 2


def test_observations_are_shown_and_actions_read_as_the_user_says():
    session = Session("step 1", "step 9")
    agent = gym_agent(Count, lambda text: int(text.split()[1]), lambda observation: f"<{observation}>", max_tokens=4)
    assert play(session, agent, messages=[("system", "Count.")], seed=0) == 2.0
    assert said(session) == [
        ("system", "Count."),
        ("user", "<seed 0, options None>"),
        ("assistant", "step 1"),
        ("user", "<1>"),
    ]
    assert session.options == {"max_tokens": 4}
