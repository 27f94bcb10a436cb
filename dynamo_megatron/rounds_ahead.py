"""Rounds that are dispatched before the step that trains on them (`rollout.max_staleness`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.allocation import Allocation
from dynamo_megatron.algorithm.baseline import Baseline
from dynamo_megatron.errors import InputError
from dynamo_megatron.rounds import Round
from dynamo_megatron.types import Prompt, plain_data


class RoundsAhead:
    """The first round of each step that has been drawn and not yet been trained on, by step."""

    def __init__(self) -> None:
        self.rounds: dict[int, Round] = {}

    def add(self, step: int, round_: Round) -> None:
        """Adds the first round of `step`. Raises ValueError for a prompt that a checkpoint could not hold."""
        for prompt in round_.prompts:
            if plain_data([prompt.answer, prompt.meta]) != [prompt.answer, prompt.meta]:
                raise InputError(
                    f"rollout.max_staleness: prompts under way are saved with the checkpoint, and the answer or the "
                    f"other columns of prompt {prompt.label} are not plain data (JSON)"
                )
        self.rounds[step] = round_

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": {str(step): _plain(round_) for step, round_ in self.rounds.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rounds = {int(step): _round(plain) for step, plain in state["rounds"].items()}


def _plain(round_: Round) -> dict[str, Any]:
    baseline = round_.baseline
    return {
        "prompts": [vars(prompt) for prompt in round_.prompts],
        "allocation": _lists(vars(round_.allocation)),
        "baseline": None if baseline is None else _lists(vars(baseline)),
        "version": round_.version,
        "drawing": round_.drawing,
    }


def _lists(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def _round(plain: Mapping[str, Any]) -> Round:
    try:
        prompts = [Prompt(**fields) for fields in plain["prompts"]]
        allocation = Allocation(**_arrays(plain["allocation"], {"counts": np.int64, "history": bool}))
        baseline = plain["baseline"] and Baseline(**_arrays(plain["baseline"], {}))
    except (KeyError, TypeError) as error:
        raise InputError(f"the checkpoint's rounds under way are damaged: {error}") from None
    origin = np.arange(len(prompts))
    drawing = plain.get("drawing")
    return Round(prompts, allocation, baseline, 0, origin, version=plain["version"], drawing=drawing)


ARRAYS = ("counts", "variance", "history", "tokens", "mean", "strength")


def _arrays(fields: Mapping[str, Any], dtypes: Mapping[str, type]) -> dict[str, Any]:
    return {
        name: np.asarray(value, dtypes.get(name, np.float64)) if name in ARRAYS and value is not None else value
        for name, value in fields.items()
    }
