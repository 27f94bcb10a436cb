"""The teacher of on-policy distillation as an SGLang server: the logprobs of tokens that the policy has sampled."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from dynamo_megatron.config.method import TeacherConfig
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.types import Sequences

AT_ONCE = 32  # requests
TIMEOUT = 600.0  # seconds, of a request
ATTEMPTS, PAUSE = 4, 2.0  # at a request, and seconds between two
POLL_EVERY = 0.2  # seconds
PROBE = "The answer is 12.5% of x_1, naïve 数学 \\frac{a}{b}\n\tdef f(n): return n ** 2"


def prompt_logprobs(
    teacher: TeacherConfig, sequences: Sequences, on_poll: Callable[[], None] = lambda: None
) -> np.ndarray:
    """float32 [R]: the natural log of the probability that the server's model gives each response token at temperature
    1, after what precedes it in its segment. Raises RolloutError where the server does not answer."""
    found = np.full(int(sequences.response_offsets[-1]), np.nan, np.float32)
    owners, starts, ends = sequences.segments(np.arange(len(sequences.prompt_ids)))

    def ask(owner: int, start: int, end: int) -> None:
        places = np.arange(start + 1, end)
        owner_of = np.full(len(places), owner)
        trained = sequences.in_response(places, owner_of)
        given = {"input_ids": sequences.tokens[start:end].tolist()}
        logprobs = np.asarray(_logprobs_of(teacher, given)[0][1:], np.float32)
        if len(logprobs) != len(places):
            raise RolloutError(f"algorithm.teacher.path: {teacher.path} gave {len(logprobs)} of {len(places)} logprobs")
        found[sequences.slots(places[trained], owner_of[trained])] = logprobs[trained]

    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        waiting = {pool.submit(ask, *map(int, s)) for s in zip(owners, starts, ends, strict=True)}
        while waiting:
            done, waiting = wait(waiting, POLL_EVERY, FIRST_COMPLETED)
            for future in done:
                future.result()
            on_poll()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return found


def check_teacher(teacher: TeacherConfig, tokenizer: Any) -> None:
    """Raises InputError where the teacher does not answer or has another tokenizer."""
    if (name := teacher.api_key_env) is not None and not os.environ.get(name):
        raise InputError(f"algorithm.teacher.api_key_env: the environment variable {name} is not set")
    if teacher.is_url:
        try:
            _, ids = _logprobs_of(teacher, {"text": PROBE}, attempts=1)
        except RolloutError as error:
            raise InputError(str(error)) from None
        same = ids in (tokenizer.encode(PROBE), tokenizer.encode(PROBE, add_special_tokens=False))
    else:
        same = load_tokenizer(teacher.path).get_vocab() == tokenizer.get_vocab()
    if not same:
        raise InputError(
            f"algorithm.teacher.path: {teacher.path} has another tokenizer than the policy, and their tokens cannot be "
            "compared; take a teacher of the policy's model family"
        )


def _logprobs_of(
    teacher: TeacherConfig, given: dict[str, Any], attempts: int = ATTEMPTS
) -> tuple[list[float | None], list[int]]:
    """(logprob of each token, its id); the first has no logprob."""
    body = {**given, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "return_logprob": True}
    data = json.dumps({**body, "logprob_start_len": 0}).encode()
    headers = {"Content-Type": "application/json"}
    if teacher.api_key_env is not None:
        headers["Authorization"] = f"Bearer {os.environ[teacher.api_key_env]}"
    request = urllib.request.Request(f"{teacher.path.rstrip('/')}/generate", data, headers)
    for attempt in range(1, attempts + 1):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                tokens = json.load(reply)["meta_info"]["input_token_logprobs"]
            return [token[0] for token in tokens], [token[1] for token in tokens]
        except (OSError, ValueError, LookupError, TypeError) as error:  # URLError is an OSError
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if attempt == attempts or refused:
                said = error.read(300).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else error
                raise RolloutError(f"algorithm.teacher.path: {teacher.path} gave no logprobs: {said}") from None
        time.sleep(PAUSE)
    raise AssertionError
