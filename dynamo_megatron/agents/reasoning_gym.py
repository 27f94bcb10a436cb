"""An agent for problems of reasoning-gym that may try again (docs/agents.md). It needs the trainer's interpreter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from dynamo_megatron.reward.procedural import reasoning_gym_answer


def reasoning_gym_agent(attempts: int = 3) -> Callable[[Any, Any], Awaitable[float]]:
    """The agent for `rollout.agent` on rows of a `reasoning_gym:` source. After an answer that is not right the policy
    gets its score. The reward is the score of the last answer, in [0, 1]."""

    async def agent(prompt: Any, session: Any) -> float:
        messages, score = list(prompt.messages), 0.0
        for attempt in range(attempts):
            try:
                answer = await session.chat(messages)
            except session.LimitReached:
                if attempt == 0:
                    raise
                break
            score = reasoning_gym_answer(prompt, answer["content"] or "")
            if score == 1.0:
                break
            messages += [answer, {"role": "user", "content": f"The score of this answer is {score:g}. Try again."}]
        return score

    return agent


agent = reasoning_gym_agent()
