"""Turns responses into text, scores, rollouts and the results of an evaluation's problems."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dynamo_megatron.config import Config, RewardConfig
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.reward.extraction import opened_thinking, response_decoder
from dynamo_megatron.rollout.agents.episode import Finished
from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.dispatch import Request
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.token_spans import token_spans
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import ProblemResult, Prompt, Rollout, plain_data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AGENT = "agent"  # names the reward that an agent returns, among those of reward functions
PROMPT_END = 16  # tokens of a prompt in which a marker of thinking is looked for


class Scoring:
    """Scores responses by the functions of `pool`, or as their agents did."""

    def __init__(self, config: RewardConfig, pool: RewardPool, tokenizer: Tokenizer):
        self._config, self._pool, self._tokenizer = config, pool, tokenizer
        self._decode = response_decoder(tokenizer)

    async def score(self, prompt: Prompt, response: Response) -> tuple[str, Score]:
        """Returns the text of the response, and its score. Raises RewardError."""
        episode = response if isinstance(response, Finished) else None
        text = self._decode(response.tokens) if episode is None else episode.text
        if response.error:
            return text, Score(0.0, False, status="failed")
        if episode is not None and (reward := episode.reward) is not None:
            return text, Score(reward, reward >= self._config.success_threshold, {AGENT: reward})
        end = self._tokenizer.decode(prompt.tokens[-PROMPT_END:], skip_special_tokens=False)
        return text, await self._pool.score(replace(prompt, thinking=opened_thinking(end)), text)

    async def rollout(self, step: int, request: Request, response: Response, server: str) -> tuple[Rollout, str]:
        """Returns the scored rollout, and how its reward failed ("" where it did not). Raises RewardError."""
        failure, rollout = "", self._unscored(step, request, response, server)
        if not response.error:
            rollout.response, score = await self.score(request.prompt, response)
            rollout.reward, rollout.success = score.reward, score.success
            rollout.reward_parts, rollout.reward_failures = score.parts, score.failures
            rollout.status, failure, rollout.extracted = score.status, score.failure, score.answer
            if score.steps:
                tokens, before = response.tokens, 0
                if rollout.episode is not None:  # the text is that of the last answer
                    last = rollout.episode.turns[-1]
                    tokens, before = rollout.tokens[last.start : last.end], sum(rollout.response_mask[: last.start])
                located = (score.steps, tokens, rollout.response, self._decode)
                if self._decode(tokens).startswith(rollout.response):  # not without its tool calls
                    spans = await asyncio.to_thread(token_spans, *located)  # microseconds a token
                    rollout.step_rewards = [(before + start, before + end, reward) for start, end, reward in spans]
        return rollout, failure

    def _unscored(self, step: int, request: Request, response: Response, server: str) -> Rollout:
        prompt = request.prompt
        episode = response if isinstance(response, Finished) else None
        mask = [0] * len(prompt.tokens) + [1] * len(response.tokens)
        return Rollout(
            rollout_id=request.name,
            group_id=request.group,
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
            routes=response.routes,
        )


class Evaluated(NamedTuple):
    response: Response
    score: Score
    text: str


def evaluation_requests(config: Config, by_group: Mapping[str, Prompt]) -> list[Request]:
    """Returns the requests for `eval.samples` responses to each prompt; request k of a group is named GROUP-k."""
    return [
        Request(
            f"{group}-{k}",
            group,
            prompt,
            prompt.tokens,
            derived_seed(config.seed, "eval", prompt.prompt_id, str(k)),
            config.eval.temperature,
            config.eval.max_new_tokens,
        )
        for group, prompt in by_group.items()
        for k in range(config.eval.samples)
    ]


def check_evaluation(outcomes: Mapping[str, Evaluated]) -> None:
    """Raises RolloutError where not one response came, RewardError where not one could be scored."""
    failed = [outcome.response.error for outcome in outcomes.values() if outcome.response.error]
    if len(failed) == len(outcomes):
        raise RolloutError(f"evaluation: none of {len(outcomes)} responses came; the first: {failed[0]}")
    failures = [outcome.score.failure for outcome in outcomes.values() if outcome.score.failure]
    if failures and len(failures) == len(outcomes) - len(failed):
        raise RewardError(
            f"evaluation: not one of {len(failures)} responses could be scored; the last failure: {failures[-1]}"
        )


def problem_result(prompt: Prompt, outcomes: Sequence[Evaluated], tokenizer: Tokenizer) -> ProblemResult:
    responses, scores, texts = zip(*outcomes, strict=True)
    return ProblemResult(
        prompt_id=prompt.prompt_id,
        source=prompt.source,
        rewards=[s.reward for s in scores],
        successes=[s.success for s in scores],
        lengths=[len(r.tokens) for r in responses],
        finish_reasons=[r.finish_reason for r in responses],
        statuses=[s.status for s in scores],
        responses=list(texts),
        prompt=tokenizer.decode(prompt.tokens, skip_special_tokens=False),
        answer=plain_data(prompt.answer),
    )
