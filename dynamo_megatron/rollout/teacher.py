"""The teacher of on-policy distillation as an SGLang server: the logprobs of tokens that the policy has sampled."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import numpy as np

from dynamo_megatron.config.method import TeacherConfig
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.runtime.credentials import without
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.threads import Call
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
    segments = list(zip(*(a.tolist() for a in sequences.segments(np.arange(len(sequences.prompt_ids)))), strict=True))
    free, over = threading.Semaphore(AT_ONCE), threading.Event()

    def ask(owner: int, start: int, end: int) -> None:
        with free:
            if over.is_set():
                return
            places = np.arange(start + 1, end)
            owners = np.full(len(places), owner)
            given = {"input_ids": sequences.tokens[start:end].tolist()}
            logprobs = np.asarray(_logprobs_of(teacher, given, over)[0][1:], np.float32)
            if len(logprobs) != len(places):
                raise RolloutError(
                    f"algorithm.teacher.path: {teacher.path} gave {len(logprobs)} of {len(places)} logprobs"
                )
            trained = sequences.in_response(places, owners)
            found[sequences.slots(places[trained], owners[trained])] = logprobs[trained]

    try:
        waiting: set[Future] = {Call(ask, *segment) for segment in segments}
        while waiting:
            done, waiting = wait(waiting, POLL_EVERY, FIRST_EXCEPTION)
            for call in done:
                call.result()
            on_poll()
    finally:
        over.set()
    return found


def check_teacher(teacher: TeacherConfig, tokenizer: Any) -> None:
    """Raises InputError where the teacher does not answer or has another tokenizer."""
    if (name := teacher.api_key_env) is not None and not os.environ.get(name):
        raise InputError(f"algorithm.teacher.api_key_env: the environment variable {name} is not set")
    if teacher.is_url:
        try:
            _, ids = _logprobs_of(teacher, {"text": PROBE}, threading.Event(), attempts=1)
        except RolloutError as error:
            raise InputError(str(error)) from None
        same = ids in (tokenizer.encode(PROBE), tokenizer.encode(PROBE, add_special_tokens=False))
    else:
        same = load_tokenizer(teacher.path, key="algorithm.teacher.path").get_vocab() == tokenizer.get_vocab()
    if not same:
        raise InputError(
            f"algorithm.teacher.path: {teacher.path} has another tokenizer than the policy, and their tokens cannot be "
            "compared; take a teacher of the policy's model family"
        )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


# A proxy of the environment is for the world outside, not for the cluster's own servers.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def _logprobs_of(
    teacher: TeacherConfig, given: dict[str, Any], over: threading.Event, attempts: int = ATTEMPTS
) -> tuple[list[float | None], list[int]]:
    """(logprob of each token, its id); the first has no logprob. `over`: nobody waits any more."""
    body = {**given, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "return_logprob": True}
    data = json.dumps({**body, "logprob_start_len": 0}).encode()
    key = os.environ[teacher.api_key_env] if teacher.api_key_env is not None else ""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{teacher.path.rstrip('/')}/generate", data, headers)
    for attempt in range(1, attempts + 1):
        try:
            with _opener.open(request, timeout=TIMEOUT) as reply:
                tokens = json.load(reply)["meta_info"]["input_token_logprobs"]
            return [token[0] for token in tokens], [token[1] for token in tokens]
        except (OSError, ValueError, LookupError, TypeError) as error:  # URLError is an OSError
            answer = error if isinstance(error, urllib.error.HTTPError) else None
            refused = answer is not None and answer.code < 500 and answer.code != 429
            if attempt == attempts or refused or over.is_set():
                said = str(error) if answer is None else f"{error}: {answer.read(300).decode(errors='replace')}"
                said = on_one_line(without(said, [key]))
                raise RolloutError(f"algorithm.teacher.path: {teacher.path} gave no logprobs: {said}") from None
        over.wait(PAUSE)
    raise AssertionError
