"""The turns of one episode as the token ids that were sampled: which request continues which, and what is trained.

Turns form a tree. A turn's ids are those of the turn that it continues, its context (what the agent added), and the
tokens that were sampled for it. A chain of turns is a segment, one sequence in training; a turn whose ids do not go on
where a segment ends begins a new one. Each turn is in one segment as what was sampled there, whatever other segments
have its ids as their context. Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.agents.messages import Message
from dynamo_megatron.rollout.client import Response
from dynamo_megatron.runtime.routes import filled_routes
from dynamo_megatron.types import EpisodeRecord, TurnRecord

# Why a turn begins a segment. branched: another turn has continued the same one already (parallel requests, an answer
# asked for again). history: the messages do not begin with those of any turn (edited, dropped, compacted, or of another
# conversation). template: they do, and the chat template renders them differently now. tools: other tools are offered.


@dataclass(frozen=True, eq=False)
class Place:
    """Where an answer goes: after `parent` (None: after nothing) and `context`. `reason`: why after nothing."""

    parent: Turn | None
    context: list[int]
    messages: list[Message] | None = None  # of the request; None: one of token ids or text
    tools: list[Message] | None = None
    reason: str = "history"

    @property
    def ids(self) -> list[int]:
        """What the model is given."""
        return (self.parent.ids if self.parent is not None else []) + self.context


@dataclass(frozen=True, eq=False)
class Turn:
    """`messages`: the conversation with the answer, as the agent got it; None: of a request without messages.
    `times`: seconds from the episode's start to when it was asked and answered."""

    place: Place
    response: Response
    messages: list[Message] | None
    times: tuple[float, float]

    @property
    def chain(self) -> list[Turn]:
        """Those that it goes on from, the first one first, and itself."""
        chain: list[Turn] = [self]
        while (parent := chain[-1].place.parent) is not None:
            chain.append(parent)
        return chain[::-1]

    @property
    def ids(self) -> list[int]:
        """From the beginning to the end of what was sampled."""
        return [token for turn in self.chain for token in turn.place.context + turn.response.tokens]


@dataclass
class Episode:
    """`turns`: in the order in which their answers came. `segments`: the turns of each."""

    chat: ChatTokens
    turns: list[Turn] = field(default_factory=list)
    segments: list[list[Turn]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # of segments besides the first

    def place_chat(self, messages: list[Message], tools: list[Message] | None) -> Place:
        """Of a request with messages in the form of `normalised`. Raises BadRequest."""
        held = [(turn, turn.messages) for turn in self.turns if turn.messages is not None]
        same = [(turn, h) for turn, h in held if len(h) < len(messages) and messages[: len(h)] == h]
        usable = [(turn, h) for turn, h in same if turn.place.tools == tools]
        for turn, h in sorted(usable, key=lambda pair: (len(pair[1]), self._is_last(pair[0])), reverse=True):
            context = self.chat.added(h, messages[len(h) :], tools, turn.response.tokens[-1])
            if context is not None:
                return Place(turn, context, messages, tools)
        reason = "template" if usable else "tools" if same else "history"
        return Place(None, self.chat.whole(messages, tools), messages, tools, reason)

    def place_tokens(self, tokens: list[int]) -> Place:
        """Of a request with token ids."""
        starts = [(turn, ids) for turn in self.turns if tokens[: len(ids := turn.ids)] == ids]
        if not starts:
            return Place(None, tokens)
        turn, ids = max(starts, key=lambda start: len(start[1]))
        return Place(turn, tokens[len(ids) :])

    def record(
        self, place: Place, response: Response, messages: list[Message] | None, times: tuple[float, float] = (0.0, 0.0)
    ) -> Turn:
        """An answer came. `messages`, `times`: as Turn's."""
        turn = Turn(place, response, messages, times)
        if place.parent is not None and self._is_last(place.parent):
            next(s for s in self.segments if s[-1] is place.parent).append(turn)
        else:
            if self.segments:
                roots = [t.place.context for t in self.turns if t.place.parent is None]
                again = place.parent is not None or place.context in roots
                self.reasons["branched" if again else place.reason] += 1
            self.segments.append([turn])
        self.turns.append(turn)
        return turn

    @property
    def sampled(self) -> int:
        """Tokens of all answers."""
        return sum(len(turn.response.tokens) for turn in self.turns)

    def size_before(self, place: Place) -> int:
        """Tokens of all segments up to an answer there."""
        goes_on = place.parent is not None and self._is_last(place.parent)
        parents = [segment[0].place.parent for segment in self.segments]
        again = sum(len(parent.ids) for parent in parents if parent is not None)
        own = sum(len(turn.place.context) for turn in self.turns) + self.sampled
        return again + own + len(place.context if goes_on else place.ids)

    def _is_last(self, turn: Turn) -> bool:
        """Of its segment."""
        return any(segment[-1] is turn for segment in self.segments)

    @property
    def trained(self) -> Finished:
        """What the episode is in training: all but what its session knows."""
        sequence: list[int] = []
        mask: list[int] = []
        starts: list[int] = []
        spans: dict[Turn, tuple[int, int]] = {}
        routes: list[tuple[np.ndarray | None, int]] = []
        sampled = Response()
        for segment in self.segments:
            starts.append(len(sequence))
            parent = segment[0].place.parent
            for turn in [*(parent.chain if parent is not None else []), *segment]:
                context, tokens, own = turn.place.context, turn.response.tokens, turn in segment
                sequence += context
                if own:
                    spans[turn] = len(sequence), len(sequence) + len(tokens)
                    sampled = sampled.continued(turn.response)
                sequence += tokens
                mask += [0] * len(context) + [int(own)] * len(tokens)
                routes.append((turn.response.routes, len(context) + len(tokens)))
        known = any(of_turn is not None for of_turn, _ in routes)
        turns = [TurnRecord(*spans[turn], *(round(seconds, 3) for seconds in turn.times)) for turn in self.turns]
        return Finished(
            sampled.tokens,
            sampled.logprobs,
            sampled.weight_versions,
            routes=np.concatenate(filled_routes(routes)) if known else None,
            sequence=sequence,
            mask=mask,
            record=EpisodeRecord(starts, {}, turns=turns),
        )


@dataclass(frozen=True)
class Finished(Response):
    """An episode as a response to its prompt: what was sampled in all of its turns. `sequence` and `mask`: as a
    Rollout's tokens and response_mask, the segments one after another. `text`: of the last answer. `reward`: the
    agent's; None: it gives none."""

    sequence: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    record: EpisodeRecord = field(default_factory=lambda: EpisodeRecord([0], {}))
    text: str = ""
    reward: float | None = None
