"""Statistics of every prompt's earlier rollouts: columns of numbers by stable prompt id, fast for a million prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.arrays import to_numpy
from dynamo_megatron.algorithm.energy import EnergyLine
from dynamo_megatron.errors import InputError

COLUMNS = ("trials", "successes", "reward_mean", "reward_squares")
# A rollout's energy is a sum of squares that float32 may leave this far below 0.
ROUNDING = 1e-2


@dataclass(frozen=True)
class Statistics:
    """N prompts and their rollouts so far. Under forgetting the counts are weights and need not be whole."""

    prompt_ids: Sequence[str]
    trials: np.ndarray  # float64 [N]; 0 for a prompt without history
    successes: np.ndarray  # float64 [N]
    reward_mean: np.ndarray  # float64 [N]
    reward_squares: np.ndarray  # float64 [N], sum of squared deviations from reward_mean

    def __len__(self) -> int:
        return len(self.trials)


def checked(
    prompt_ids: list[str], rewards: Any, successes: Any, step: int, energy: Any = None
) -> dict[str, np.ndarray]:
    """The arguments that are not None as columns by name: one entry a finished rollout, float64 [S] (`successes` bool).
    Raises ValueError naming the argument that does not have one entry per rollout, or the prompt whose reward or energy
    is not finite, whose energy is below 0, or whose success is not 0 or 1."""
    columns = {"rewards": rewards, "successes": successes, "energy": energy}
    observed = {name: to_numpy(x, name).astype(np.float64) for name, x in columns.items() if x is not None}
    if any(len(x) != len(prompt_ids) for x in observed.values()):
        given = ", ".join(f"{len(x)} {name}" for name, x in observed.items())
        raise ValueError(f"prompt_ids: {len(prompt_ids)} ids and {given} at step {step}; give one of each a rollout")
    least = {"rewards": -np.inf, "successes": 0, "energy": -ROUNDING}
    for name, x in observed.items():
        fine = np.isfinite(x) & (x >= least[name]) & ((name != "successes") | (x == 0) | (x == 1))
        if (bad := np.flatnonzero(~fine)).size:
            what = "0 or 1" if name == "successes" else f"a finite number{'' if name == 'rewards' else ', 0 or above'}"
            raise ValueError(f"{name}: prompt {prompt_ids[bad[0]]!r} has {x[bad[0]]} at step {step}; expected {what}")
    observed["successes"] = observed["successes"].astype(bool)
    if energy is not None:
        observed["energy"] = np.maximum(observed["energy"], 0.0)
    return observed


class History:
    """Statistics of all prompts observed so far, and the regression of rollouts' energy on reward (`energy_line`)."""

    def __init__(self) -> None:
        self.energy_line = EnergyLine()
        self._start([], np.zeros((len(COLUMNS), 1)))

    def _start(self, prompt_ids: list[str], numbers: np.ndarray) -> None:
        """`numbers` [COLUMNS, 1 + prompts]: column 0 stands for every prompt that was never seen."""
        self._ids, self._numbers = prompt_ids, numbers
        self._column = {i: n for n, i in enumerate(prompt_ids, 1)}

    def of(self, prompt_ids: Sequence[str]) -> Statistics:
        """Statistics aligned with `prompt_ids`, in which a prompt may occur twice."""
        columns = np.fromiter((self._column.get(i, 0) for i in prompt_ids), np.int64, len(prompt_ids))
        return _read_only(prompt_ids, self._numbers[:, columns])

    def pool(self) -> Statistics:
        """Every prompt observed so far."""
        return _read_only(self._ids, self._numbers[:, 1:])

    def observe(self, prompt_ids: list[str], observed: dict[str, np.ndarray], keep: float) -> None:
        """Adds finished rollouts (`checked`); the weight of earlier observations of their prompts is multiplied by
        `keep`.

        Nothing depends on the order of the rollouts. Raises ValueError naming the prompt whose statistics would not be
        finite; then nothing is added.
        """
        if not prompt_ids:
            return
        visited: dict[str, int] = {}
        index = np.fromiter((visited.setdefault(i, len(visited)) for i in prompt_ids), np.int64, len(prompt_ids))
        columns = np.fromiter((self._column.get(i, 0) for i in visited), np.int64, len(visited))
        with np.errstate(over="ignore", invalid="ignore"):
            updated = _merged(self._numbers[:, columns], _visit(index, observed), keep)
        _check(list(visited), updated)
        numbers = self._numbers.copy()  # a copy: earlier states must not change
        if new := sorted(i for i in visited if i not in self._column):
            self._column |= {i: n for n, i in enumerate(new, self._numbers.shape[1])}
            self._ids = self._ids + new
            numbers = np.concatenate([self._numbers, np.zeros((len(COLUMNS), len(new)))], axis=1)
            columns = np.fromiter((self._column[i] for i in visited), np.int64, len(visited))
        numbers[:, columns] = updated
        self._numbers = numbers

    def state_dict(self) -> dict[str, Any]:
        """`prompt_ids` and, aligned with it, float64 [prompts] for each of COLUMNS; `energy_line`, float64 [5], and
        `rewards_outside` if it is not 0, both of `EnergyLine`. Nothing is copied and nothing changes later."""
        columns = dict(zip(COLUMNS, self._numbers[:, 1:], strict=True))
        outside = {"rewards_outside": self.energy_line.outside} if self.energy_line.outside else {}
        return {"prompt_ids": self._ids, **columns, "energy_line": self.energy_line.sums, **outside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the history; the columns may also be lists. Raises ValueError if they do not fit together, or naming
        the prompt whose statistics contradict each other."""
        if missing := [name for name in ("prompt_ids", *COLUMNS, "energy_line") if name not in state]:
            raise InputError(f"state: no {', '.join(missing)} in it, only {', '.join(sorted(state))}")
        ids = state["prompt_ids"]
        try:
            numbers = np.array([state[name] for name in COLUMNS], np.float64)
            line = np.array(state["energy_line"], np.float64)
            fits = len({i for i in ids if isinstance(i, str)}) == len(ids) and isinstance(ids, list)
        except (TypeError, ValueError):
            fits = False
        fits = fits and numbers.shape == (len(COLUMNS), len(ids)) and line.shape == self.energy_line.sums.shape
        if not fits or not np.isfinite(line).all():
            raise InputError("state: prompt_ids is not a list of distinct texts, or a column not a number for each")
        _check(ids, numbers)
        self.energy_line = EnergyLine(line, int(state.get("rewards_outside", 0)))
        self._start(ids, np.concatenate([np.zeros((len(COLUMNS), 1)), numbers], axis=1))


def _read_only(prompt_ids: Sequence[str], numbers: np.ndarray) -> Statistics:
    numbers = numbers.view()  # the flag must not reach the table itself
    numbers.flags.writeable = False
    return Statistics(prompt_ids, *numbers)


def _visit(index: np.ndarray, observed: dict[str, np.ndarray]) -> np.ndarray:
    """COLUMNS of the rollouts of one call, float64 [columns, prompts]. `index`: int64 [S], each rollout's prompt."""
    rewards = observed["rewards"]
    order = np.lexsort((rewards, index))
    trials, wins = np.bincount(index), np.bincount(index, observed["successes"])
    starts = np.cumsum(trials) - trials
    # Measured from the prompt's lowest reward, equal rewards leave no rounding error behind.
    lowest = rewards[order][starts]
    above = rewards[order] - np.repeat(lowest, trials)
    mean = np.add.reduceat(above, starts) / trials
    squares = np.add.reduceat((above - np.repeat(mean, trials)) ** 2, starts)
    return np.stack([trials, wins, lowest + mean, squares])


def _merged(old: np.ndarray, visit: np.ndarray, keep: float) -> np.ndarray:
    trials, _, mean, squares = old
    weight = keep * trials
    merged = keep * old + visit  # correct for the columns that are sums
    shift = visit[2] - mean
    merged[2] = mean + shift * visit[0] / merged[0]
    merged[3] = keep * squares + visit[3] + shift * shift * (weight * visit[0] / merged[0])
    return merged


def _check(prompt_ids: Sequence[str], numbers: np.ndarray) -> None:
    trials, successes, _, squares = numbers
    fine = np.isfinite(numbers).all(axis=0) & (trials > 0) & (successes >= 0) & (successes <= trials) & (squares >= 0)
    if not fine.all():
        j = int(np.flatnonzero(~fine)[0])
        shown = ", ".join(f"{name} {x}" for name, x in zip(COLUMNS, numbers[:, j], strict=True))
        raise InputError(f"prompt {prompt_ids[j]!r}: its statistics contradict each other: {shown}")
