"""The typed records that packages pass on. Identity travels with the data: nothing is grouped by position."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import PlainValidator, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import to_json

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.routes import filled_routes, packed, unpacked

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_REWARD = 1e18  # in size: advantages square rewards, and float32 ends at 3e38
NOT_TRAINED = ("failed", "rejected")  # statuses of rollouts that neither the policy nor the allocator learns from
# What becomes of a reward function on a response. wrong_format: what came is no score (no number, no reply of the form
# agreed on); timed_out: nothing came within reward.deadline; crashed: it raised, ended, or could not be reached.
REWARD_STATES = ("scored", "wrong_format", "timed_out", "crashed")
WITHOUT_ROUTES = {"routes": False}  # the context of a rollout's validation
LARGEST_VERSION = 2**31 - 1  # of weights, in arrays; a server of somebody else's may name larger ones


@dataclass
class Prompt:
    """One problem of the data.

    `prompt_id` names the problem for as long as the data lives (statistics are kept under it).
    Exactly one of `messages` (chat) and `text` is set; `tokens` is the rendered prompt, set by the prompt stream.
    `where` is its place in the source ("path:line"), for messages. `thinking`: the `<think>` or other marker with which
    the rendered prompt ends, for reward functions, as a response begins after it; "" where it ends otherwise.
    """

    prompt_id: str
    messages: list[dict[str, str]] | None = None
    text: str | None = None
    answer: Any = None
    source: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] | None = None
    where: str = field(default="", compare=False)
    thinking: str = ""

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None):
            raise InputError(f"prompt {self.prompt_id!r}: give either messages or text")

    @property
    def label(self) -> str:
        """The id and, where it is there, the place in the source, for messages."""
        return f"{self.prompt_id!r} ({self.where})" if self.where else repr(self.prompt_id)


def plain_data(value: Any) -> Any:
    """`value` as JSON can hold it: what it has no form for becomes text, half a surrogate pair becomes "?"."""
    text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    return json.loads(text.encode("utf-8", "replace"))


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing: null, or what files have in its place."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list | dict):  # SQuAD's unanswerable questions have {"text": [], "answer_start": []}
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value is None


class TurnRecord(NamedTuple):
    """One answer of an episode: where it stands in the rollout's `tokens`, and seconds from the episode's start."""

    start: int
    end: int
    asked: float
    answered: float


@dataclass
class EpisodeRecord:
    """What a rollout of an agent has besides others (docs/agents.md).

    `starts`: where its segments begin in the rollout's `tokens`; a segment is one sequence in training. `counts`:
    turns, segments, why segments began, limits that were reached. `messages`: the conversation with the last answer,
    in OpenAI's format; None where the agent sent no messages. An answer that was cut short has "finish_reason":
    "length". `tools`: those that it was offered there.
    `turns`: in the order in which the answers came. `reason`: why the episode failed; "" where it did not, and in files
    of earlier versions.
    """

    starts: list[int]
    counts: dict[str, int]
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    reason: str = ""


def _stored_routes(plain: Any, info: ValidationInfo) -> np.ndarray | None:
    if plain is None or info.context == WITHOUT_ROUTES:
        return None
    return unpacked(plain, len(info.data.get("tokens", ())))  # what was read before it


@dataclass
class Rollout:
    """One response to one prompt, or, with an agent, one episode: its response is what was sampled in all of its turns.

    `group_id` names the dispatch: a prompt drawn twice in one batch is two groups. `tokens` is prompt + response,
    `response_mask` is 1 on the response; `engine_logprobs` has one natural-log entry a response token.
    `weight_versions` are (version, start, end) spans over the response tokens; within a segment a version never falls.
    `episode`: None without an agent. With one, `tokens` are the segments one after another, and what was not sampled
    may stand anywhere in them.
    `finish_reason`: "stop" (the stop token is the last token), "length" (truncated), "abort" (timed out, or ended by
    the engine) or "error" (the server refused it).
    `status`: "ok", "reward_timeout", "reward_error", "failed" (no response came) or "rejected" (its server had other
    weights than it said); the last two are not trained on. `server`: the name of the server that it came from.
    `reward_parts`: the value of each reward function that gave one, by its name in `reward.functions`;
    `reward_failures`: the state (one of REWARD_STATES) of each that gave none; one that was not run because another one
    in its worker took all the time is in neither. `step_rewards`: (start, end, reward) spans over the response tokens,
    process rewards of the response's steps; empty where no function gives any.
    `prompt` (what the model was given, special tokens included), `response` (what the reward functions were given) and
    `answer` (plain data) are for people; None in the files of runs from before they were stored.
    `extracted`: what a built-in reward read as the response's answer, "" where it found none; None: no function of the
    run reads one.
    `routes`: as `RolloutBatch.routes`, of its tokens; None: its server returned none. The version of a route is that of
    its token.
    """

    rollout_id: str
    group_id: str
    prompt_id: str
    step: int
    tokens: list[int]
    response_mask: list[int]
    engine_logprobs: list[float]
    weight_versions: list[tuple[int, int, int]]
    finish_reason: str
    reward: float
    success: bool
    reward_parts: dict[str, float]
    status: str = "ok"
    server: str = ""
    prompt: str | None = None
    response: str | None = None
    answer: Any = None
    step_rewards: list[tuple[int, int, float]] = field(default_factory=list)
    reward_failures: dict[str, str] = field(default_factory=dict)
    episode: EpisodeRecord | None = None
    extracted: str | None = None
    routes: Annotated[np.ndarray | None, PlainValidator(_stored_routes)] = field(default=None, compare=False)

    @property
    def response_tokens(self) -> list[int]:
        return list(itertools.compress(self.tokens, self.response_mask))

    @property
    def answer_id(self) -> str:
        """A hash: of `extracted`, else of the response in lower case with single blanks, else of its tokens."""
        text = f"response {self.response_tokens if self.response is None else self.response.lower().split()}"
        if self.extracted is not None:
            text = f"answer {self.extracted}"
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]

    def to_json(self) -> str:
        # 8,000 tokens: json takes 10 times as long, dataclasses.asdict 50 times
        return to_json(vars(self), fallback=packed).decode()

    @classmethod
    def from_json(cls, line: str | bytes, routes: bool = True) -> Rollout:
        """Raises ValueError for text that is not one complete rollout, with a value of the right type in each field.
        `routes`: whether they are wanted; else None, which spares 100 ms a rollout of 8,000 tokens."""
        try:
            return _ROLLOUT.validate_json(line, strict=True, context=None if routes else WITHOUT_ROUTES)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{place}: " for place in [".".join(map(str, first["loc"]))] if place)
            raise InputError(f"not a rollout: {where}{first['msg']}, not {first['input']!r:.40}") from None


_ROLLOUT = TypeAdapter(Rollout)


@dataclass
class ProblemResult:
    """The sampled responses to one problem; entry i of every list is about response i.

    `lengths` are tokens; `finish_reasons`, `statuses`, `prompt` and `answer` as in a Rollout. A response whose status
    is not "ok" counts as wrong, whatever `successes` says.
    """

    prompt_id: str
    source: str
    rewards: list[float]
    successes: list[bool]
    lengths: list[int]
    finish_reasons: list[str]
    statuses: list[str]
    responses: list[str]
    prompt: str | None = None
    answer: Any = None

    @property
    def right(self) -> int:
        """Responses that are right."""
        return sum(s and status == "ok" for s, status in zip(self.successes, self.statuses, strict=True))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> ProblemResult:
        """Raises ValueError for text that is not one complete result."""
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise InputError(f"not a problem's result: {error}") from None


class TokenStats(NamedTuple):
    """Per token, [T], natural log, no gradient, 0 where the label takes no part (-100).

    float32 (float64 where hidden or weight is). p is softmax(z / temperature) over the vocabulary.
    """

    logprobs: Tensor  # log p of the label
    entropy: Tensor  # H = -sum_v p_v log p_v, nats
    expected_pi_lambda: Tensor  # E[pi Lambda] = sum_v p_v^2 (log p_v + H)
    collision: Tensor  # sum_v p_v^2


@dataclass(frozen=True)
class Sequences:
    """S sequences of a prompt and its response, T tokens in all, R of them in responses.

    Sequence s owns `tokens[offsets[s]:offsets[s + 1]]`, of which the first `prompt_lengths[s]` are the prompt. The
    "slot" of a response token is its index in [0, R), through all responses in order.

    With an agent a sequence is an episode of one or more segments, and each segment is a sequence of its own for the
    model. `trained` then says which tokens belong to the response, and `prompt_lengths` counts the others. So it is in
    `sft`, where a conversation has several answers.
    """

    prompt_ids: list[str]
    tokens: np.ndarray  # int64 [T]
    offsets: np.ndarray  # int64 [S + 1]
    prompt_lengths: np.ndarray  # int64 [S]
    trained: np.ndarray | None = field(default=None, kw_only=True)  # bool [T]; None: all after the prompt
    # int64 [G], ascending: indices in `tokens` where segments begin; None: one segment per sequence
    segment_starts: np.ndarray | None = field(default=None, kw_only=True)
    # uint8 or uint16 [T, layers, topk]: the experts that the token before was routed to, from which this one was
    # predicted; `no_route` for the first token of a segment, and where they are not known; one expert several times, as
    # SGLang has it for a layer without a router, is no route either; None: nowhere known
    routes: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 [S], tokens."""
        return np.diff(self.offsets) - self.prompt_lengths

    @property
    def response_offsets(self) -> np.ndarray:
        """int64 [S + 1]: sequence s owns the slots from entry s up to, but without, entry s + 1."""
        return np.concatenate([[0], np.cumsum(self.response_lengths)]).astype(np.int64)

    def name(self, sequence: int) -> str:
        """The sequence's name in messages."""
        return f"prompt {self.prompt_ids[sequence]!r}"

    def check_tokens(self, vocab_size: int) -> None:
        """Raises ValueError naming the first token that is not in [0, vocab_size)."""
        if len(self.tokens) == 0 or (self.tokens.min() >= 0 and self.tokens.max() < vocab_size):
            return
        wrong = int(np.flatnonzero((self.tokens < 0) | (self.tokens >= vocab_size))[0])
        sequence = int(np.searchsorted(self.offsets, wrong, side="right")) - 1
        place = wrong - int(self.offsets[sequence])
        where = "prompt" if place < self.prompt_lengths[sequence] else "response"
        raise InputError(
            f"{self.name(sequence)}: token id {self.tokens[wrong]} at position {place}, in the {where}, is not in the "
            f"model's vocabulary (0 to {vocab_size - 1}); it comes from another tokenizer, or the record is damaged"
        )

    def response(self, sequence: int) -> np.ndarray:
        """int64, the response tokens of `sequence`."""
        own = slice(int(self.offsets[sequence]), int(self.offsets[sequence + 1]))
        if self.trained is not None:
            return self.tokens[own][self.trained[own]]
        return self.tokens[own][self.prompt_lengths[sequence] :]

    @property
    def response_tokens(self) -> np.ndarray:
        """int64 [R], of all responses in order."""
        each = [self.response(s) for s in range(len(self.prompt_ids))]
        return np.concatenate(each) if each else np.zeros(0, np.int64)

    def segments(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns three arrays int64 [g] for the g segments of `sequences`: the index in `sequences` of the sequence
        that each segment belongs to, and where the segment begins and ends in `tokens`."""
        if (starts := self.segment_starts) is None:
            return np.arange(len(sequences)), self.offsets[sequences], self.offsets[sequences + 1]
        first = np.searchsorted(starts, self.offsets[sequences])
        end = np.searchsorted(starts, self.offsets[sequences + 1])
        chosen = np.concatenate([np.arange(i, j) for i, j in zip(first, end, strict=True)] or [np.zeros(0, np.int64)])
        owner = np.repeat(np.arange(len(sequences)), end - first)
        return owner, starts[chosen], np.append(starts[1:], len(self.tokens))[chosen]

    def turns(self) -> tuple[np.ndarray, np.ndarray]:
        """(turns of each sequence, int64 [S]; response tokens of each turn, int64 [K]): a turn is a run of response
        tokens with none of a prompt or environment between. Without an agent each response is one."""
        if self.trained is None:
            counts = (self.response_lengths > 0).astype(np.int64)
            return counts, self.response_lengths[counts > 0]
        starts = self.offsets[:-1] if self.segment_starts is None else self.segment_starts
        begins = self.trained & ~np.append(False, self.trained[:-1])
        begins[starts] = self.trained[starts]
        places = np.flatnonzero(begins)
        counts = np.diff(np.searchsorted(places, self.offsets))
        return counts, np.diff(np.append(self._trained_until[places] - 1, self.trained.sum()))

    def in_response(self, places: np.ndarray, sequences: np.ndarray) -> np.ndarray:
        """bool: whether the tokens at `places` belong to a response. `sequences`: the sequence that owns each token."""
        if self.trained is not None:
            return self.trained[places]
        return places - self.offsets[sequences] >= self.prompt_lengths[sequences]

    def slots(self, places: np.ndarray, sequences: np.ndarray) -> np.ndarray:
        """int64: the slots of the response tokens at `places`. `sequences`: the sequence that owns each token."""
        if self.trained is not None:
            return self._trained_until[places] - 1
        return self.response_offsets[sequences] + places - self.offsets[sequences] - self.prompt_lengths[sequences]

    @cached_property
    def _trained_until(self) -> np.ndarray:
        assert self.trained is not None
        return np.cumsum(self.trained)

    def per_token(self, per_sequence: np.ndarray) -> np.ndarray:
        """Repeats each sequence's value for each of its response tokens: [S] to [R]."""
        return np.repeat(per_sequence, self.response_lengths)


# Fields of a RolloutBatch by what they have one entry for; a list has one for each rollout.
LISTS = ("prompt_ids", "rollout_ids", "group_ids", "finish_reasons", "servers")
PER_ROLLOUT = ("prompt_lengths", "rewards", "successes")
PER_TOKEN = ("tokens", "trained", "routes")
PER_RESPONSE_TOKEN = ("engine_logprobs", "weight_versions", "step_rewards")


@dataclass(frozen=True)
class RolloutBatch(Sequences):
    """The trainable rollouts of one step as arrays, in the order of (prompt position, rollout index)."""

    rollout_ids: list[str]
    group_ids: list[str]
    engine_logprobs: np.ndarray  # float32 [R], natural log
    rewards: np.ndarray  # float64 [S]
    successes: np.ndarray  # bool [S]
    weight_versions: np.ndarray  # int32 [R]: of the weights that each token was sampled from; -1 for an unknown one
    finish_reasons: list[str]
    servers: list[str]  # their names
    # float64 [R]: where a step of the response ends its process reward, NaN elsewhere; None: no rollout has steps
    step_rewards: np.ndarray | None = None
    answers: list[str] | None = None  # `Rollout.answer_id` of each; None: not known

    def name(self, sequence: int) -> str:
        return f"rollout {self.rollout_ids[sequence]} of {super().name(sequence)}"

    @classmethod
    def join(
        cls, batches: Sequence[RolloutBatch], concatenate: Callable[[Sequence[np.ndarray]], np.ndarray] = np.concatenate
    ) -> RolloutBatch:
        """The rollouts of all of `batches`, in order; `concatenate` says where the arrays go. A single batch that has
        any is returned as it is."""
        batches = [b for b in batches if b.prompt_ids]
        if len(batches) < 2:
            return batches[0] if batches else cls.from_rollouts([])
        starts = np.cumsum([0, *(len(b.tokens) for b in batches)])
        offsets = [b.offsets[:-1] + start for b, start in zip(batches, starts, strict=False)]
        fields: dict[str, Any] = {name: [x for b in batches for x in getattr(b, name)] for name in LISTS}
        fields["offsets"] = np.concatenate([*offsets, starts[-1:]])
        for name in ("tokens", *PER_ROLLOUT, "engine_logprobs", "weight_versions"):
            fields[name] = concatenate([getattr(b, name) for b in batches])
        if any(b.step_rewards is not None for b in batches):
            none = (np.full(len(b.engine_logprobs), np.nan) for b in batches)
            steps = [n if b.step_rewards is None else b.step_rewards for b, n in zip(batches, none, strict=True)]
            fields["step_rewards"] = concatenate(steps)
        if any(b.routes is not None for b in batches):
            fields["routes"] = concatenate(filled_routes([(b.routes, len(b.tokens)) for b in batches]))
        known = [b.answers for b in batches if b.answers is not None]
        if len(known) == len(batches):
            fields["answers"] = [answer for answers in known for answer in answers]
        if batches[0].trained is not None:  # of an agent, as all others are
            fields["trained"] = concatenate([b.trained for b in batches if b.trained is not None])
            places = zip(batches, starts, strict=False)
            fields["segment_starts"] = np.concatenate([b.segment_starts + start for b, start in places])
        return cls(**fields)

    def take(self, members: np.ndarray) -> RolloutBatch:
        """The rollouts `members`, int64, ascending; all of them: this batch itself."""
        if len(members) == len(self.prompt_ids):
            return self
        kept = np.zeros(len(self.prompt_ids), bool)
        kept[members] = True
        lengths = np.diff(self.offsets)
        tokens, responses = np.repeat(kept, lengths), self.per_token(kept)
        known = {name: values for name, values in vars(self).items() if values is not None}
        fields: dict[str, Any] = {n: [known[n][s] for s in members] for n in (*LISTS, "answers") if n in known}
        for names, here in ((PER_ROLLOUT, members), (PER_TOKEN, tokens), (PER_RESPONSE_TOKEN, responses)):
            fields |= {name: known[name][here] for name in names if name in known}
        if self.segment_starts is not None:
            starts = self.segment_starts[tokens[self.segment_starts]]
            fields["segment_starts"] = np.cumsum(tokens)[starts] - 1
        return RolloutBatch(offsets=np.append(0, np.cumsum(lengths[members])), **fields)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> RolloutBatch:
        """Packs rollouts in the order given. Raises ValueError where masks, logprobs and tokens disagree in length."""
        prompt_lengths, versions = [], []
        for r in rollouts:
            response = sum(r.response_mask)
            if len(r.response_mask) != len(r.tokens) or len(r.engine_logprobs) != response:
                raise InputError(f"rollout {r.rollout_id}: mask, tokens and engine logprobs disagree in length")
            if r.routes is not None and len(r.routes) != len(r.tokens):
                raise InputError(f"rollout {r.rollout_id}: routes of {len(r.routes)} tokens of {len(r.tokens)}")
            if r.episode is None and any(r.response_mask[: len(r.tokens) - response]):
                raise InputError(f"rollout {r.rollout_id}: the response is not the end of the tokens")
            prompt_lengths.append(len(r.tokens) - response)
            versions.append(np.full(response, -1, np.int32))
            for version, start, end in r.weight_versions:
                versions[-1][start:end] = min(version, LARGEST_VERSION)
        offsets = np.concatenate([[0], np.cumsum([len(r.tokens) for r in rollouts])]).astype(np.int64)
        routed = any(r.routes is not None for r in rollouts)
        return cls(
            rollout_ids=[r.rollout_id for r in rollouts],
            group_ids=[r.group_id for r in rollouts],
            prompt_ids=[r.prompt_id for r in rollouts],
            tokens=np.concatenate([np.asarray(r.tokens, np.int64) for r in rollouts] or [np.zeros(0, np.int64)]),
            offsets=offsets,
            prompt_lengths=np.asarray(prompt_lengths, np.int64),
            engine_logprobs=np.asarray([lp for r in rollouts for lp in r.engine_logprobs], np.float32),
            rewards=np.asarray([r.reward for r in rollouts], np.float64),
            successes=np.asarray([r.success for r in rollouts], bool),
            weight_versions=np.concatenate(versions or [np.zeros(0, np.int32)]),
            finish_reasons=[r.finish_reason for r in rollouts],
            servers=[r.server for r in rollouts],
            step_rewards=_at_their_ends(rollouts),
            answers=[r.answer_id for r in rollouts],
            routes=np.concatenate(filled_routes([(r.routes, len(r.tokens)) for r in rollouts])) if routed else None,
            **_of_episodes(rollouts, offsets),
        )


def _of_episodes(rollouts: Sequence[Rollout], offsets: np.ndarray) -> dict[str, np.ndarray]:
    """`RolloutBatch.trained` and `segment_starts`, where the rollouts are an agent's."""
    if all(r.episode is None for r in rollouts):
        return {}
    starts = [[0] if r.episode is None else r.episode.starts for r in rollouts]
    return {
        "trained": np.concatenate([np.asarray(r.response_mask, bool) for r in rollouts]),
        "segment_starts": np.concatenate([np.asarray(s) + o for s, o in zip(starts, offsets, strict=False)]),
    }


def _at_their_ends(rollouts: Sequence[Rollout]) -> np.ndarray | None:
    """`RolloutBatch.step_rewards`. Rewards of steps that end at the same token add up."""
    if not any(r.step_rewards for r in rollouts):
        return None
    each = [np.full(sum(r.response_mask), np.nan) for r in rollouts]
    for rewards, r in zip(each, rollouts, strict=True):
        for _, end, reward in r.step_rewards:
            rewards[end - 1] = np.nansum([rewards[end - 1], reward])
    return np.concatenate(each)
