"""Checks data and reward: three samples go through the run's own code. Also finds problems that are in both sets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.data.limits import max_prompt_length
from dynamo_megatron.data.templates import lost_characters
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.overlap import overlap_warning, overlaps, problem_text
from dynamo_megatron.evaluation.problems import load_problems
from dynamo_megatron.preflight.findings import Finding, failed, note, ok, skipped
from dynamo_megatron.preflight.subject import Subject
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.types import Prompt

SAMPLES = 3
MEASURED = 1000  # prompts whose length is measured
WRONG = "I do not know."


def data(subject: Subject) -> Iterator[Finding]:
    """Reads all prompts (those of a first step, if the source is read during the run); encodes the first MEASURED."""
    config, prompts = subject.config, subject.prompts
    limit = max_prompt_length(config, subject.spec)
    lengths = {p.prompt_id: len(subject.encode(p)) for p in prompts[:MEASURED]}
    longest = max(lengths, key=lengths.__getitem__)
    long = sum(length > limit for length in lengths.values())
    if long == len(lengths):
        raise InputError(
            f"data.max_prompt_length: all of the first {long} prompts of {config.data.source} have more than {limit} "
            f"tokens (the longest {lengths[longest]}); raise it, or lower rollout.max_new_tokens"
        )
    if long and config.data.on_long_prompt == "error":
        raise InputError(
            f"data.on_long_prompt: prompt {longest!r} has {lengths[longest]} tokens, above the limit of {limit}; "
            "raise data.max_prompt_length or set data.on_long_prompt: skip"
        )
    which = f"{'the first ' if config.data.streamed else ''}{len(prompts):,} prompts"
    yield ok(f"{which} from {config.data.source}, the longest of {len(lengths)} {lengths[longest]}")
    lost = lost_characters([problem_text(prompt) for prompt in prompts], subject.tokenizer)
    for line in [*subject.data_notes, *filter(None, [lost])]:
        yield note(line)
    if long:
        yield note(f"{long} of {len(lengths)} prompts have more than {limit} tokens and will be skipped")
    if len(prompts) < config.batch_prompts:
        yield note(f"data.batch_prompts {config.batch_prompts}: a step has the same prompt more than once")


def reward(subject: Subject) -> Iterator[Finding]:
    """Runs the reward functions on the right answer and on a wrong answer of three prompts, in reward workers and under
    the deadline. A reward model whose servers start with the run is left out."""
    config = subject.config.reward
    if config.servers is not None:
        functions = [name for name in config.outcomes if name != "reward_model"]
        yield skipped("reward_model: its servers start with the run")
        if not functions:
            return
        config = config.model_copy(update={"functions": functions, "servers": None})
    prompts = subject.prompts[:SAMPLES]
    try:
        scores = _score(config, prompts)
    except RewardError as error:
        line = str(error).splitlines()[-1]
        raise InputError(f"{line}; reward.functions must give a finite number for any response: mend it") from None
    bad = False
    for prompt, (right, wrong) in zip(prompts, scores, strict=True):
        for what, score in ((f"its answer {str(prompt.answer)!r:.60}", right), (f"the answer {WRONG!r}", wrong)):
            where = f"reward.functions: {', '.join(config.outcomes)} on prompt {prompt.prompt_id!r} and {what}"
            if score.status == "reward_timeout":
                bad = True
                yield failed(
                    f"{where}: no score within reward.deadline ({config.deadline:g} s), which gives reward 0; make "
                    "the function faster or raise the deadline"
                )
    if bad:
        return
    rewards = [(right.reward, wrong.reward) for right, wrong in scores]
    shown = "; ".join(f"{right:g} and {wrong:g}" for right, wrong in rewards)
    yield ok(f"{', '.join(config.outcomes)} on the answer and on {WRONG!r}: {shown}")
    if all(right == wrong for right, wrong in rewards):
        yield note(
            "the answer itself scores as the wrong one does: if the reward does not ask for a form of its own (tags, "
            "\\boxed{}), data.answer_key names the wrong column"
        )
    elif not any(right.success for right, _ in scores):
        yield note(f"no answer reaches reward.success_threshold {config.success_threshold:g}: nothing counts as solved")


def _score(config: RewardConfig, prompts: list[Prompt]) -> list[tuple[Score, Score]]:
    pool = RewardPool(config.model_copy(update={"workers": min(config.workers, 2 * SAMPLES), "on_error": "raise"}))
    try:
        pool.start()

        async def both(prompt: Prompt) -> tuple[Score, Score]:
            return await pool.score(prompt, str(prompt.answer)), await pool.score(prompt, WRONG)

        async def all_of_them() -> list[tuple[Score, Score]]:
            return await asyncio.gather(*map(both, prompts))

        return asyncio.run(all_of_them())
    finally:
        pool.close()


def evaluation(subject: Subject) -> Iterator[Finding]:
    """Checks the evaluation's problems and their lengths, and notes those that are also in the training data."""
    config = subject.config
    if config.eval.data is None:
        yield skipped("eval.data is not set")
        return
    problems = load_problems(config, subject.encode, max_prompt_length(config, subject.spec, evaluation=True))
    yield ok(f"{len(problems):,} problems from {config.eval.data}")
    if found := overlaps(problems, subject.prompts):
        warning = overlap_warning(config.eval.data, len(problems), found, config.data.source)
        yield note(f"{warning}: take them out of data.source or eval.data")
