"""Checks of what the whole job has in common: layout, model folder, tokenizer, data, reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config, RewardConfig
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.data.templates import encode_prompt, end_token_ids, load_tokenizer, max_prompt_length
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.problems import load_problems, overlap_warnings
from dynamo_megatron.jobs.start_checks import check_layout, check_vocabulary, describe_layout
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.planning.hardware import Cluster, gpu_named
from dynamo_megatron.planning.plan import make_plan, workload
from dynamo_megatron.planning.report import cautions, verdict
from dynamo_megatron.preflight.findings import Finding, failed, note, ok, skipped
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEASURED = 1000  # prompts whose length is measured
SAMPLES, WRONG = 3, "I do not know."  # prompts that are scored, and what is no answer
UNUSED_SHARE = 0.2  # of the embedding's rows may belong to no token; published models pad by a few per cent at most


class Subject:
    """A configuration and the number of its ranks, in all and on this node. Reads model config, tokenizer and prompts
    once each, at the first access. Raises InputError for bad input."""

    def __init__(self, config: Config, ranks: int, ranks_here: int):
        self.config, self.ranks, self.ranks_here = config, ranks, ranks_here
        self.data_notes: list[str] = []  # lines about rows that were left out of `prompts`

    @cached_property
    def spec(self) -> ModelSpec:
        return load_model_config(self.config.model.path, self.config.model.family)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model.path, self.config.data.chat_template)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """All prompts; of a source that is read during the run, those of a first step."""
        data = self.config.data
        if data.streamed:
            data = data.model_copy(update={"limit": self.config.batch_prompts})
        return load_prompts(data, needs_answer=self.config.needs_answers, say=self.data_notes.append)

    def encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(prompt, self.tokenizer, self.config.data)


def layout(subject: Subject) -> Iterator[Finding]:
    """Checks model, layout and the number of ranks as `train` does."""
    spec = check_layout(subject.config, subject.ranks)
    for what, text in describe_layout(subject.config, spec, subject.ranks).items():
        yield ok(f"{what}: {text}")


def plan(subject: Subject) -> Iterator[Finding]:
    """Plans memory, servers and times of the whole run, on the assumption that all its nodes are like this one."""
    if not torch.cuda.is_available():
        yield skipped("no GPU here to reckon with: dynamo-megatron plan takes --gpu and --gpus")
        return
    name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    if (gpu := gpu_named(name, memory)) is None:
        yield skipped(f"{name} with {memory / 1e9:.0f} GB is not in the planner's table (planning/hardware.py)")
        return
    spec = check_layout(subject.config, subject.ranks)
    cluster = Cluster(gpu, subject.ranks, min(subject.ranks, torch.cuda.device_count()))
    made = make_plan(subject.config, spec, cluster, workload(subject.config, spec))
    told = f"{cluster.gpus} x {gpu.name} in {cluster.nodes} node{'s' * (cluster.nodes > 1)}: {verdict(made)}"
    yield failed(f"{told}; `dynamo-megatron plan` has all") if made.fault else ok(told)
    yield from map(note, cautions(made))


def model_config(subject: Subject) -> Iterator[Finding]:
    """What the ranks will build from config.json, which has been read, and with which optional packages."""
    from dynamo_megatron.policy.backend import Fusions  # takes seconds: it imports Megatron

    fusions = Fusions.detect()  # raises where Megatron would fail on a package that is only half there
    yield ok(f"{subject.spec.family}, {subject.spec.num_layers} layers; optional packages: {fusions}")


def weights(subject: Subject) -> Iterator[Finding]:
    """Checks every file of the index, and every tensor's name and shape by the files' headers."""
    with open_weights(subject.config.model.path, subject.spec) as folder:
        yield ok(f"{len(folder.names)} tensors, every name and shape as Megatron needs it")


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Checks the tokenizer's size against the embedding."""
    spec, path, tokenizer = subject.spec, subject.config.model.path, subject.tokenizer
    check_vocabulary(path, spec, tokenizer)
    size = len(tokenizer.get_vocab())
    if size < (1 - UNUSED_SHARE) * spec.vocab_size and spec.vocab_size - size > 128:
        raise InputError(
            f"model.path: the tokenizer in {path} has {size:,} tokens, the embedding {spec.vocab_size:,} rows, far "
            "more than a padding; it is another model's tokenizer: copy the model's own tokenizer files there"
        )

    ends = [f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in end_token_ids(path, tokenizer)]
    yield ok(f"{size:,} tokens for {spec.vocab_size:,} rows; a response ends with {', '.join(ends)}")


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
    shown = subject.tokenizer.decode(subject.encode(prompts[0]))
    shown = shown if len(shown) <= 160 else f"{shown[:80]} ... {shown[-80:]}"
    yield ok(
        f"{which} from {config.data.source}, the longest of {len(lengths)} {lengths[longest]} tokens, at most {limit}; "
        f"the first: {shown!r}"
    )
    yield from map(note, subject.data_notes)
    if long:
        yield note(f"{long} of {len(lengths)} prompts have more than {limit} tokens and will be skipped")
    if len(prompts) < config.batch_prompts:
        yield note(f"data.batch_prompts {config.batch_prompts}: a step has the same prompt more than once")


def reward(subject: Subject) -> Iterator[Finding]:
    """Runs the reward functions on the right answer and on a wrong answer of three prompts, in reward workers and under
    the deadline. A reward model whose servers start with the run is left out."""
    config, prompts = subject.config.reward, subject.prompts[:SAMPLES]
    if config.servers is not None:
        functions = [name for name in config.outcomes if name != "reward_model"]
        yield skipped("reward_model: its servers start with the run")
        if not functions:
            return
        config = config.model_copy(update={"functions": functions, "servers": None})
    try:
        scores = asyncio.run(_score(config, prompts))
    except RewardError as error:
        line = str(error).splitlines()[-1]
        raise InputError(f"{line}; reward.functions must give a finite number for any response: mend it") from None
    functions = ", ".join(config.outcomes)
    for prompt, pair in zip(prompts, scores, strict=True):
        if "reward_timeout" in [score.status for score in pair]:
            raise InputError(
                f"reward.functions: {functions} on prompt {prompt.prompt_id!r}: no score within reward.deadline "
                f"({config.deadline:g} s), which gives reward 0; make the function faster or raise the deadline"
            )
    shown = "; ".join(f"{right.reward:g} and {wrong.reward:g}" for right, wrong in scores)
    yield ok(f"{functions} on the answer and on {WRONG!r}: {shown}")
    if all(right.reward == wrong.reward for right, wrong in scores):
        yield note(
            "the answer itself scores as the wrong one does: if the reward does not ask for a form of its own (tags, "
            "\\boxed{}), data.answer_key names the wrong column"
        )
    elif not any(right.success for right, _ in scores):
        yield note(f"no answer reaches reward.success_threshold {config.success_threshold:g}: nothing counts as solved")


async def _score(config: RewardConfig, prompts: list[Prompt]) -> list[list[Score]]:
    pool = RewardPool(config.model_copy(update={"workers": min(config.workers, 2 * SAMPLES), "on_error": "raise"}))
    try:
        pool.start()
        pairs = (asyncio.gather(*(pool.score(p, text) for text in (str(p.answer), WRONG))) for p in prompts)
        return await asyncio.gather(*pairs)
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
    for warning in overlap_warnings({config.eval.data: problems}, subject.prompts, config.data.source):
        yield note(f"{warning}: take them out of data.source or eval.data")
