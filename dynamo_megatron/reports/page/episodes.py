"""An agent's rollout as the page shows it: who said what, and which tokens are whose answer."""

from __future__ import annotations

import json
from typing import Any

from dynamo_megatron.reports.page.token_texts import Decode
from dynamo_megatron.types import EpisodeRecord, Rollout, TurnRecord

MOST_TEXT = 4000  # characters of a message, or of what stands before an answer


def episode_view(rollout: Rollout, decode: Decode | None) -> dict[str, Any] | None:
    """Plain data; None for a rollout without an agent.

    `turns`: of each answer, as the episode got them, which tokens of the response it has (`first`, `count`), and the
    seconds `asked` and `answered`. `conversation`: the messages of the one with the last answer; `turn` is the answer
    that a message is, None where the agent wrote it. `others`: answers in other conversations, with their segment and
    the text `before` them in it ("" without a tokenizer).
    """
    if (record := rollout.episode) is None:
        return None
    shown = {turn.message: k for k, turn in enumerate(record.turns) if turn.message is not None}
    return {
        "counts": record.counts,
        "turns": [_turn(turn, rollout.response_mask) for turn in record.turns],
        "conversation": [_message(m, shown.get(i)) for i, m in enumerate(record.messages or [])],
        "others": [
            {"turn": k, **_before(turn, record, rollout.tokens, decode)}
            for k, turn in enumerate(record.turns)
            if turn.message is None
        ],
    }


def _turn(turn: TurnRecord, mask: list[int]) -> dict[str, Any]:
    first, count = mask[: turn.start].count(1), mask[turn.start : turn.end].count(1)
    return {"first": first, "count": count, "asked": turn.asked, "answered": turn.answered}


def _message(message: dict[str, Any], turn: int | None) -> dict[str, Any]:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return {"role": message["role"], "text": _cut("\n".join(filter(None, [message["content"], *calls]))), "turn": turn}


def _before(turn: TurnRecord, record: EpisodeRecord, tokens: list[int], decode: Decode | None) -> dict[str, Any]:
    segment = sum(start <= turn.start for start in record.starts) - 1
    earlier = [each.end for each in record.turns if each.end <= turn.start]
    begin = max([*record.starts[: segment + 1], *earlier])
    return {"segment": segment, "before": "" if decode is None else _cut(decode(tokens[begin : turn.start]))}


def _cut(text: str) -> str:
    """Beginning and end, with a note of what is left out between them."""
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]}\n[cut: {len(text) - 2 * half:,} characters]\n{text[-half:]}"
