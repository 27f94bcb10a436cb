"""Responses of a model's first evaluation, kept between runs: methods are compared from one number.

What is kept are responses, not scores: reward functions may change without a change of name, so every run scores anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.results import read_results, write_results
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.types import ProblemResult, Prompt

FORMAT = 2  # of the key and of what is kept
VERSION_TIMEOUT = 30.0  # seconds for an interpreter to start and read a package's metadata
SETTLED = 2.0  # seconds: a file changed later than this may change again without another mtime


def cache_file(config: Config, prompts: Sequence[Prompt], on_poll: Callable[[], None]) -> Path:
    """Where the responses of `model.path` to `prompts` (tokenized) are kept: named by all that they depend on. Reads
    those of the model's files whole (1 to 2 GB/s) that have changed since the last time; `on_poll` is called after
    each. Raises ValueError where the servers' version of SGLang is not known."""
    evaluation, rollout = config.eval, config.rollout
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
        "engine": [_sglang_version(rollout.python), rollout.tp, rollout.server_args, config.trainer.deterministic],
        "quantization": rollout.quantization,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    return cache_folder() / f"{name}.jsonl"


def cache_folder() -> Path:
    """DYNAMO_MEGATRON_CACHE, else dynamo-megatron in the user's cache folder."""
    if own := os.environ.get("DYNAMO_MEGATRON_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynamo-megatron"


def _sglang_version(python: str | None) -> str:
    """Of the interpreter that runs the servers; None: this one. Raises ValueError."""
    asked = [python or sys.executable, "-P", "-c", "from importlib import metadata; print(metadata.version('sglang'))"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=VERSION_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"rollout.python: {asked[0]} does not tell its version of sglang ({error})") from None
    if done.returncode:
        raise InputError(f"rollout.python: {asked[0]} has no sglang ({done.stderr.strip().splitlines()[-1:]})")
    return done.stdout.strip()


def _content(folder: Path, on_poll: Callable[[], None]) -> list[tuple[str, str]]:
    """(name, SHA-256) of every file that is not hidden: weights, configuration and tokenizer. The digests are kept by
    the folder's path, and those of files whose size, time of change (ns) and inode are the same are taken from there.
    """
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    memory = cache_folder() / f"digests-{place}.json"
    try:
        kept = json.loads(memory.read_text())
    except (OSError, ValueError):  # none yet, or damaged: it is written anew
        kept = {}
    found, settled = {}, {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            status = path.stat()
            state = [status.st_size, status.st_mtime_ns, status.st_ino]
            *before, digest = kept.get(str(name), [None])
            if before != state:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                on_poll()
            found[str(name)] = digest
            if time.time() - status.st_mtime > SETTLED:
                settled[str(name)] = [*state, digest]
    if settled != kept:
        with contextlib.suppress(OSError):  # it only saves time
            memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(memory, shared=True) as whole:
                whole.write(json.dumps(settled).encode())
    return list(found.items())


def read_cached(file: Path, prompts: Sequence[Prompt], samples: int) -> list[ProblemResult] | None:
    """None where there is none. Raises ValueError for a file that does not hold `samples` responses to each prompt."""
    if not file.is_file():
        return None
    results = read_results(file)
    asked = [(prompt.prompt_id, samples) for prompt in prompts]
    if [(result.prompt_id, len(result.responses)) for result in results] != asked:
        raise InputError(f"{file}: does not have {samples} responses to each of the {len(prompts)} problems")
    return results


def write_cached(file: Path, results: Sequence[ProblemResult]) -> None:
    """Nothing where a response failed: the next run asks again. Several processes may write at once. Raises OSError."""
    if any(reason not in ("stop", "length") for result in results for reason in result.finish_reasons):
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_results(file, results, shared=True)
