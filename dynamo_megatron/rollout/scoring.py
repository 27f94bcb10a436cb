"""Turns responses into text, scores and rollouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardPool, Score
from dynamo_megatron.rollout.agents.episodes import Finished
from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.step_session import Wanted
from dynamo_megatron.rollout.token_spans import token_spans
from dynamo_megatron.types import Prompt, Rollout, plain_data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AGENT = "agent"  # names the reward that an agent returns, among those of reward functions


class Scoring:
    """`in_thread(function, *arguments)` returns what the function returns, computed in a thread."""

    def __init__(
        self,
        config: RewardConfig,
        pool: RewardPool,
        tokenizer: Tokenizer,
        in_thread: Callable[..., Awaitable[Any]],
    ):
        self._config, self._pool, self._tokenizer, self._in_thread = config, pool, tokenizer, in_thread

    async def score(self, prompt: Prompt, response: Response) -> tuple[str, Score]:
        """Returns the text of the response, and its score. Raises RewardError."""
        episode = response if isinstance(response, Finished) else None
        text = self._tokenizer.decode(response.tokens, skip_special_tokens=True) if episode is None else episode.text
        if response.error:
            return text, Score(0.0, False, status="failed")
        if episode is not None and (reward := episode.reward) is not None:
            return text, Score(reward, reward >= self._config.success_threshold, {AGENT: reward})
        return text, await self._pool.score(prompt, text)

    async def rollout(
        self, step: int, name: str, wanted: Wanted, response: Response, server: str
    ) -> tuple[Rollout, str]:
        """Returns the scored rollout, and how its reward failed ("" where it did not). Raises RewardError."""
        failure, rollout = "", self.unscored(step, name, wanted, response, server)
        if not response.error:
            rollout.response, score = await self.score(wanted.prompt, response)
            rollout.reward, rollout.success = score.reward, score.success
            rollout.reward_parts, rollout.reward_failures = score.parts, score.failures
            rollout.status, failure = score.status, score.failure
            if score.steps and rollout.episode is None:
                located = (score.steps, response.tokens, rollout.response, self._tokenizer)
                rollout.step_rewards = await self._in_thread(token_spans, *located)  # microseconds a token
        return rollout, failure

    def unscored(self, step: int, name: str, wanted: Wanted, response: Response, server: str) -> Rollout:
        prompt, group = wanted
        episode = response if isinstance(response, Finished) else None
        mask = [0] * len(prompt.tokens) + [1] * len(response.tokens)
        return Rollout(
            rollout_id=name,
            group_id=group,
            prompt_id=prompt.prompt_id,
            step=step,
            tokens=prompt.tokens + response.tokens if episode is None else episode.sequence,
            response_mask=mask if episode is None else episode.mask,
            engine_logprobs=response.logprobs,
            weight_versions=response.weight_versions,
            finish_reason=response.finish_reason,
            reward=0.0,
            success=False,
            reward_parts={},
            status="failed",
            server=server,
            prompt=self._tokenizer.decode(prompt.tokens, skip_special_tokens=False),
            response="",
            answer=plain_data(prompt.answer),
            episode=None if episode is None else episode.record,
        )
