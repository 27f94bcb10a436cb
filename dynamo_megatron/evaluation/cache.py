"""Responses of a model's first evaluation, kept between runs: methods are compared from one number.

What is kept are responses, not scores: reward functions may change without a change of name, so every run scores anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch

from dynamo_megatron.config import Config
from dynamo_megatron.evaluation.results import ProblemResult, read_results, write_results
from dynamo_megatron.records import Prompt

FORMAT = 1  # of the key and of what is kept


def cache_file(config: Config, prompts: Sequence[Prompt], on_poll: Callable[[], None]) -> Path:
    """Where the responses of `model.path` to `prompts` (tokenized) are kept: named by all that they depend on. Reads
    the model's files whole (1 to 2 GB/s); `on_poll` is called between them."""
    evaluation, rollout = config.eval, config.rollout
    try:
        sglang = metadata.version("sglang")
    except metadata.PackageNotFoundError:  # rollout.python has it
        sglang = None
    identity = {
        "format": FORMAT,
        "model": _content(Path(config.model.path), on_poll),
        "settings": config.model.model_dump(exclude={"path"}),
        "problems": [(prompt.prompt_id, prompt.tokens) for prompt in prompts],
        "samples": evaluation.samples,
        "temperature": rollout.temperature if evaluation.temperature is None else evaluation.temperature,
        "max_new_tokens": evaluation.max_new_tokens or rollout.max_new_tokens,
        "stop": rollout.stop,
        "seed": config.seed,
        "engine": [sglang, rollout.python, rollout.tp, rollout.server_args, rollout.urls, config.trainer.deterministic],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    return cache_folder() / f"{name}.jsonl"


def cache_folder() -> Path:
    """DYNAMO_MEGATRON_CACHE, else dynamo-megatron in the user's cache folder."""
    if own := os.environ.get("DYNAMO_MEGATRON_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynamo-megatron"


def _content(folder: Path, on_poll: Callable[[], None]) -> list[tuple[str, str]]:
    """(name, SHA-256) of every file that is not hidden: weights, configuration and tokenizer."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            with path.open("rb") as file:
                found.append((str(name), hashlib.file_digest(file, "sha256").hexdigest()))
            on_poll()
    return found


def read_cached(file: Path, prompts: Sequence[Prompt], samples: int) -> list[ProblemResult] | None:
    """None where there is none. Raises ValueError for a file that does not hold `samples` responses to each prompt."""
    if not file.is_file():
        return None
    results = read_results(file)
    asked = [(prompt.prompt_id, samples) for prompt in prompts]
    if [(result.prompt_id, len(result.responses)) for result in results] != asked:
        raise ValueError(f"{file}: does not have {samples} responses to each of the {len(prompts)} problems")
    return results


def write_cached(file: Path, results: Sequence[ProblemResult]) -> None:
    """Nothing where a response failed: the next run asks again. Several processes may write at once. Raises OSError."""
    if any(reason not in ("stop", "length") for result in results for reason in result.finish_reasons):
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = file.with_name(f"{uuid.uuid4().hex}.jsonl")
    write_results(aside, results)
    aside.rename(file)
