"""An agent made from an environment with `reset` and `step`, as Gymnasium's have them (docs/agents.md).

It imports the standard library alone: the environment may be of Gymnasium, or any object with these two methods.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from typing import Any


def gym_agent(
    make: Callable[[], Any], action: Callable[[str], Any] = str.strip, show: Callable[[Any], str] = str, **request: Any
) -> Callable[[Any, Any], Awaitable[float]]:
    """The agent for `rollout.agent`: an episode is one of the environment, whose rewards are added up.

    `make` gives the environment of one episode. `action` reads the policy's answer; where it raises ValueError, the
    policy gets the text of that instead of a step. `show` makes a text of an observation. `request`: fields of every
    request, such as max_tokens. `reset` gets the fields `seed` and `options` of the data's row; without a seed, one
    that follows from the row's id. A limit of the episode ends it with the rewards so far.
    """

    async def agent(prompt: Any, session: Any) -> float:
        environment = make()
        try:
            return await play(environment, prompt, session)
        finally:
            if hasattr(environment, "close"):
                environment.close()

    async def play(environment: Any, prompt: Any, session: Any) -> float:
        seed = prompt.meta.get("seed")
        if seed is None:
            seed = zlib.crc32(prompt.prompt_id.encode())
        observation, _ = environment.reset(seed=seed, options=prompt.meta.get("options"))
        opening = _opening(prompt.messages, show(observation))
        messages, total, ended = [*opening], 0.0, False
        while not ended:
            try:
                answer = await session.chat(messages, **request)
            except session.LimitReached:
                if len(messages) == len(opening):
                    raise
                break
            messages.append(answer)
            try:
                chosen = action(answer["content"] or "")
            except ValueError as error:
                text = str(error)
            else:
                observation, reward, terminated, truncated, _ = environment.step(chosen)
                total, ended, text = total + float(reward), terminated or truncated, show(observation)
            messages.append({"role": "user", "content": text})
        return total

    return agent


def _opening(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The row's messages, and the first observation on a new line of the user's last one."""
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    return [*before, {**last, "content": f"{last['content']}\n{text}" if text else last["content"]}]
