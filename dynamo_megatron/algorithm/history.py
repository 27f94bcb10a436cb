"""What earlier rollouts showed of every prompt: columns of numbers under stable prompt ids, fast for a million."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.arrays import to_numpy
from dynamo_megatron.algorithm.energy import EnergyLine

COLUMNS = ("trials", "successes", "reward_mean", "reward_squares")
NO_STRATUM = -1


@dataclass(frozen=True)
class Statistics:
    """N prompts and their rollouts so far. Under forgetting the counts are weights and need not be whole."""

    prompt_ids: Sequence[str]
    strata: np.ndarray  # int64 [N]: prompts of one number share a prior; NO_STRATUM: the pool's
    trials: np.ndarray  # float64 [N]; 0 for a prompt without history
    successes: np.ndarray  # float64 [N]
    reward_mean: np.ndarray  # float64 [N]
    reward_squares: np.ndarray  # float64 [N], sum of squared deviations from reward_mean

    def __len__(self) -> int:
        return len(self.trials)


class History:
    """Statistics of all prompts observed so far, and how the energy of their rollouts goes with the reward
    (`energy_line`). `strata`: prompt_id -> any label; None: no strata."""

    def __init__(self, strata: Mapping[str, Hashable] | None = None) -> None:
        labels: dict[Hashable, int] = {}
        self._stratum = {i: labels.setdefault(label, len(labels)) for i, label in (strata or {}).items()}
        self.energy_line = EnergyLine()
        self._start([], np.zeros((len(COLUMNS), 1)))

    def _start(self, prompt_ids: list[str], numbers: np.ndarray) -> None:
        """`numbers` [4, 1 + prompts]: column 0 stands for every prompt that was never seen."""
        self._ids, self._numbers = prompt_ids, numbers
        self._column = {i: n for n, i in enumerate(prompt_ids, 1)}
        self._strata = self._strata_of(prompt_ids)

    def _strata_of(self, prompt_ids: Sequence[str]) -> np.ndarray:
        if not self._stratum:
            return np.full(len(prompt_ids), NO_STRATUM, np.int64)
        return np.fromiter((self._stratum.get(i, NO_STRATUM) for i in prompt_ids), np.int64, len(prompt_ids))

    def of(self, prompt_ids: Sequence[str]) -> Statistics:
        """Aligned with `prompt_ids`, in which a prompt may occur twice."""
        columns = np.fromiter((self._column.get(i, 0) for i in prompt_ids), np.int64, len(prompt_ids))
        return _read_only(prompt_ids, self._strata_of(prompt_ids), self._numbers[:, columns])

    def pool(self) -> Statistics:
        """Every prompt observed so far."""
        return _read_only(self._ids, self._strata.view(), self._numbers[:, 1:])

    def observe(
        self,
        prompt_ids: Sequence[str],
        rewards: Any,
        successes: Any,
        step: int,
        keep: float,
        *,
        only_new: bool = False,
    ) -> None:
        """Takes in finished rollouts; what was seen before of their prompts counts `keep` times.

        `only_new`: those of prompts without history alone.

        Nothing depends on the order of the rollouts. Raises ValueError naming the argument, or the prompt whose reward
        is not finite or whose success is not 0 or 1; then nothing is taken in.
        """
        ids = list(prompt_ids)
        reward, success = to_numpy(rewards, "rewards").astype(np.float64), to_numpy(successes, "successes")
        if not len(ids) == len(reward) == len(success):
            raise ValueError(
                f"prompt_ids: {len(ids)} ids, {len(reward)} rewards and {len(success)} successes at step {step}; "
                "give one of each a rollout"
            )
        if (bad := np.flatnonzero(~np.isfinite(reward))).size:
            j = bad[0]
            raise ValueError(
                f"rewards: prompt {ids[j]!r} has reward {reward[j]} at step {step}; rewards must be finite"
            )
        if (bad := np.flatnonzero((success != 0) & (success != 1))).size:
            j = bad[0]
            raise ValueError(f"successes: prompt {ids[j]!r} has success {success[j]} at step {step}; expected 0 or 1")
        if only_new:
            new_ones = np.fromiter((i not in self._column for i in ids), bool, len(ids))
            ids = [i for i in ids if i not in self._column]
            reward, success = reward[new_ones], success[new_ones]
        if not ids:
            return
        visited: dict[str, int] = {}
        index = np.fromiter((visited.setdefault(i, len(visited)) for i in ids), np.int64, len(ids))
        columns = np.fromiter((self._column.get(i, 0) for i in visited), np.int64, len(visited))
        with np.errstate(over="ignore", invalid="ignore"):
            updated = _merged(self._numbers[:, columns], _visit(index, reward, success.astype(np.float64)), keep)
        _check(list(visited), updated)
        numbers = self._numbers.copy()  # earlier states keep theirs
        if new := sorted(i for i in visited if i not in self._column):
            self._column |= {i: n for n, i in enumerate(new, self._numbers.shape[1])}
            self._ids = self._ids + new
            self._strata = np.concatenate([self._strata, self._strata_of(new)])
            numbers = np.concatenate([self._numbers, np.zeros((len(COLUMNS), len(new)))], axis=1)
            columns = np.fromiter((self._column[i] for i in visited), np.int64, len(visited))
        numbers[:, columns] = updated
        self._numbers = numbers

    def observe_energy(self, rewards: Any, energies: Any, keep: float) -> None:
        """Takes in the energies of finished rollouts, float [S] each; what was seen before counts `keep` times.

        Raises ValueError for an energy that is not finite and 0 or above."""
        reward, energy = (
            to_numpy(x, name).astype(np.float64) for x, name in ((rewards, "rewards"), (energies, "energy"))
        )
        if len(reward) != len(energy):
            raise ValueError(f"energy: {len(energy)} entries for {len(reward)} rollouts; give one a rollout")
        if (bad := np.flatnonzero(~(np.isfinite(energy) & (energy >= 0)))).size:
            raise ValueError(f"energy: entry {bad[0]} is {energy[bad[0]]}; expected a finite number, 0 or above")
        self.energy_line = self.energy_line.after(reward, energy, keep)

    def state_dict(self) -> dict[str, Any]:
        """`prompt_ids` and, aligned with it, float64 [prompts] for each of COLUMNS; `energy_line`, float64 [5].

        Nothing is copied, and nothing of it changes later: a call at every step of a million prompts costs nothing."""
        columns = dict(zip(COLUMNS, self._numbers[:, 1:], strict=True))
        return {"prompt_ids": self._ids, **columns, "energy_line": self.energy_line.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces what was seen; the columns may also be lists. Raises ValueError naming the prompt whose statistics
        contradict each other."""
        if missing := [name for name in ("prompt_ids", *COLUMNS) if name not in state]:
            raise ValueError(f"state: no {', '.join(missing)} in it, only {', '.join(sorted(state))}")
        ids, columns = state["prompt_ids"], [state[name] for name in COLUMNS]
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise ValueError("state: prompt_ids is not a list of texts")
        if len(set(ids)) != len(ids):
            raise ValueError("state: prompt_ids has a duplicate")
        for name, column in zip(COLUMNS, columns, strict=True):
            _check_column(ids, name, column)
        numbers = np.array(columns, np.float64).reshape(len(COLUMNS), len(ids))
        _check(ids, numbers)
        line = np.array(state.get("energy_line", [0.0] * 5), np.float64)  # earlier versions have none
        if line.shape != (5,) or not np.isfinite(line).all():
            raise ValueError("state: energy_line is not 5 finite numbers")
        self.energy_line = EnergyLine(line)
        self._start(ids, np.concatenate([np.zeros((len(COLUMNS), 1)), numbers], axis=1))


def _check_column(prompt_ids: Sequence[str], name: str, column: list | np.ndarray) -> None:
    if isinstance(column, np.ndarray):
        fits = column.dtype == np.float64 and column.shape == (len(prompt_ids),)
    else:
        fits = isinstance(column, list) and len(column) == len(prompt_ids)
    if not fits:
        raise ValueError(f"state: {name} does not have one number for each of the {len(prompt_ids)} prompts")
    if isinstance(column, list):
        for prompt_id, number in zip(prompt_ids, column, strict=True):
            if not isinstance(number, int | float):
                raise ValueError(f"prompt {prompt_id!r}: {name} is {number!r}, not a number")


def _read_only(prompt_ids: Sequence[str], strata: np.ndarray, numbers: np.ndarray) -> Statistics:
    # A view: the flag must not reach the table itself.
    numbers = numbers.view()
    strata.flags.writeable = numbers.flags.writeable = False
    return Statistics(prompt_ids, strata, *numbers)


def _visit(index: np.ndarray, rewards: np.ndarray, successes: np.ndarray) -> np.ndarray:
    """COLUMNS [4, prompts] of the rollouts of one call; `index` says whose each is."""
    order = np.lexsort((rewards, index))
    trials = np.bincount(index)
    starts = np.cumsum(trials) - trials
    # Measured from the prompt's lowest reward, equal rewards leave no rounding error behind.
    lowest = rewards[order][starts]
    above = rewards[order] - np.repeat(lowest, trials)
    mean = np.add.reduceat(above, starts) / trials
    squares = np.add.reduceat((above - np.repeat(mean, trials)) ** 2, starts)
    return np.stack([trials, np.bincount(index, successes), lowest + mean, squares])


def _merged(old: np.ndarray, visit: np.ndarray, keep: float) -> np.ndarray:
    trials, successes, mean, squares = old
    trials = keep * trials
    total = trials + visit[0]
    shift = visit[2] - mean
    return np.stack(
        [
            total,
            keep * successes + visit[1],
            mean + shift * visit[0] / total,
            keep * squares + visit[3] + shift * shift * (trials * visit[0] / total),
        ]
    )


def _check(prompt_ids: Sequence[str], numbers: np.ndarray) -> None:
    trials, successes, _, squares = numbers
    fine = np.isfinite(numbers).all(axis=0) & (successes >= 0) & (successes <= trials) & (trials > 0) & (squares >= 0)
    if not fine.all():
        j = int(np.flatnonzero(~fine)[0])
        shown = ", ".join(f"{name} {x}" for name, x in zip(COLUMNS, numbers[:, j].tolist(), strict=True))
        raise ValueError(f"prompt {prompt_ids[j]!r}: its statistics contradict each other: {shown}")
