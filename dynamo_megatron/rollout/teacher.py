"""The teacher of on-policy distillation as an SGLang server: the logprobs of tokens that the policy has sampled."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dynamo_megatron.config.method import TeacherConfig
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.http import key_of
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.server_api import Endpoint, ServerError, call_for
from dynamo_megatron.runtime.threads import for_each
from dynamo_megatron.types import Sequences

AT_ONCE = 32  # requests
TIMEOUT = 600.0  # seconds, of a request
ATTEMPTS, PAUSE = 4, 2.0  # at a request, and seconds between two
PROBE = "The answer is 12.5% of x_1, naïve 数学 \\frac{a}{b}\n\tdef f(n): return n ** 2"


def prompt_logprobs(
    teacher: TeacherConfig, sequences: Sequences, on_poll: Callable[[], None] = lambda: None
) -> np.ndarray:
    """float32 [R]: the natural log of the probability that the server's model gives each response token at temperature
    1, after what precedes it in its segment. Raises RolloutError where the server does not answer."""
    found = np.full(int(sequences.response_offsets[-1]), np.nan, np.float32)
    segments: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
    for segment in zip(*(a.tolist() for a in sequences.segments(np.arange(len(sequences.prompt_ids)))), strict=True):
        segments.put(segment)
    over = threading.Event()

    def ask(_: int) -> None:
        with contextlib.suppress(queue.Empty):
            while not over.is_set():
                owner, start, end = segments.get_nowait()
                places = np.arange(start + 1, end)
                owners = np.full(len(places), owner)
                logprobs, _ = _logprobs_of(teacher, {"input_ids": sequences.tokens[start:end].tolist()}, over)
                trained = sequences.in_response(places, owners)
                values = np.asarray(logprobs[1:], np.float32)
                found[sequences.slots(places[trained], owners[trained])] = values[trained]

    try:
        _, failed = for_each(range(AT_ONCE), ask, on_poll)
    finally:
        over.set()
    if failed:
        raise RolloutError(failed[0][1])
    return found


def check_teacher(teacher: TeacherConfig, tokenizer: Any, rows: int, longest: int) -> str | None:
    """Raises InputError where the teacher does not answer or has another tokenizer. `rows`: of the policy's embedding,
    beyond which a tokenizer may have tokens that no server takes. Returns a warning, one line, where a server does not
    take sequences of `longest` tokens."""
    warning = None
    if teacher.is_url:
        endpoint = _endpoint(teacher)
        added = tokenizer.get_added_vocab()
        text = PROBE + "".join(token for token in sorted(added, key=added.get) if added[token] < rows)
        try:
            _, ids = _logprobs_of(teacher, {"text": text}, threading.Event(), attempts=1)
        except RolloutError as error:
            lacks = "; a teacher's server needs its tokenizer: start it without --skip-tokenizer-init"
            raise InputError(f"{error}{lacks if 'tokenizer' in str(error) else ''}") from None
        same = ids in (tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False))
        (most,) = call_for(endpoint, "/server_info", None, TIMEOUT, "max_req_input_len")
        if longest >= most:
            warning = (
                f"algorithm.teacher.path: {teacher.path} takes fewer than {most} tokens, and a sequence may have "
                f"{longest}, which would end the run; lower model.max_length or data.max_prompt_length, or start the "
                "teacher with a larger --context-length"
            )
    else:
        same = load_tokenizer(teacher.path, key="algorithm.teacher.path").get_vocab() == tokenizer.get_vocab()
    if not same:
        raise InputError(
            f"algorithm.teacher.path: {teacher.path} has another tokenizer than the policy, and their tokens cannot be "
            "compared; take a teacher of the policy's model family"
        )
    return warning


def _logprobs_of(
    teacher: TeacherConfig, given: dict[str, Any], over: threading.Event, attempts: int = ATTEMPTS
) -> tuple[list[float | None], list[int]]:
    """(logprob of each token, its id); the first has no logprob. `over`: nobody waits any more."""
    endpoint = _endpoint(teacher)
    body = {**given, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "return_logprob": True}
    for left in reversed(range(attempts)):
        try:
            (about,) = call_for(endpoint, "/generate", {**body, "logprob_start_len": 0}, TIMEOUT, "meta_info")
            tokens = about["input_token_logprobs"]
            return [token[0] for token in tokens], [token[1] for token in tokens]
        except (ServerError, LookupError, TypeError) as error:
            said = str(error)
        if not left or over.wait(PAUSE):
            break
    over.set()  # the other requests end, too
    raise RolloutError(f"algorithm.teacher.path: {teacher.path} gave no logprobs: {said}")


def _endpoint(teacher: TeacherConfig) -> Endpoint:
    key = key_of(teacher.api_key_env, "algorithm.teacher.api_key_env")
    return Endpoint("teacher", 0, teacher.path.rstrip("/"), 1, key)
