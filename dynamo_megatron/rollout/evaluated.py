"""The requests of an evaluation, their scored responses, and the result of each problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dynamo_megatron.config import Config
from dynamo_megatron.reward import RewardError, Score
from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.dispatch import ExpectedLengths
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.sampling import Request
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import ProblemResult, Prompt, plain_data

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Evaluated(NamedTuple):
    response: Response
    score: Score
    text: str


def evaluation_requests(config: Config, lengths: ExpectedLengths, by_group: Mapping[str, Prompt]) -> list[Request]:
    """Returns the requests for `eval.samples` responses to each prompt; request k of a group is named GROUP-k."""
    return [
        Request(
            f"{group}-{k}",
            group,
            prompt,
            prompt.tokens,
            lengths(prompt.prompt_id),
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


def rescored(prompt: Prompt, result: ProblemResult, scores: Sequence[Score]) -> ProblemResult:
    """Returns the result with other scores of its responses."""
    return dataclasses.replace(
        result,
        source=prompt.source,
        answer=plain_data(prompt.answer),
        rewards=[s.reward for s in scores],
        successes=[s.success for s in scores],
        statuses=[s.status for s in scores],
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
