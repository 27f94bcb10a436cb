"""Which prompt gets how many rollouts: the stateful allocator, and the door to the pure functions behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamo_megatron.algorithm import success
from dynamo_megatron.algorithm.apportion import neyman, spread, waterfill
from dynamo_megatron.algorithm.arrays import to_numpy
from dynamo_megatron.algorithm.success import success_variance
from dynamo_megatron.config import AllocationConfig

__all__ = ["Allocation", "RolloutAllocator", "neyman", "success_variance", "waterfill"]

# The published code's priority for prompts that are solved: this variance, from this success rate on.
SOLVED_RATE = 0.85
SOLVED_VARIANCE = 0.01


@dataclass(frozen=True)
class Allocation:
    """One step's allocation, aligned with the prompts it was asked for."""

    step: int
    prompt_ids: list[str]
    counts: np.ndarray  # int64 [N]
    variance: np.ndarray  # float64 [N]; waterfill: the priority; neyman: with its floor
    history: np.ndarray  # bool [N], the prompt was observed before

    @property
    def history_share(self) -> float:
        return float(self.history.mean()) if len(self.history) else 0.0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of allocation.jsonl."""
        for prompt_id, n, variance, history in zip(
            self.prompt_ids, self.counts, self.variance, self.history, strict=True
        ):
            yield {
                "step": self.step,
                "prompt_id": prompt_id,
                "n": int(n),
                "variance": float(variance),
                "history": bool(history),
            }


@dataclass(frozen=True)
class _Seen:
    """A prompt's rollouts so far; under forgetting the counts are weights and need not be whole."""

    trials: float = 0.0
    successes: float = 0.0
    reward_mean: float = 0.0
    reward_squares: float = 0.0  # sum of squared deviations from reward_mean

    def check(self, prompt_id: str) -> None:
        numbers = (self.trials, self.successes, self.reward_mean, self.reward_squares)
        if not (
            all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)
            and 0 <= self.successes <= self.trials
            and self.trials > 0
            and self.reward_squares >= 0
        ):
            raise ValueError(f"prompt {prompt_id!r}: its statistics contradict each other: {self}")

    def after(self, rewards: Sequence[float], successes: int, keep: float) -> _Seen:
        """With one visit more; what was seen before counts `keep` times. Exact sums: the order does not matter."""
        n = len(rewards)
        mean = math.fsum(rewards) / n
        squares = math.fsum((r - mean) * (r - mean) for r in rewards)
        old = keep * self.trials
        shift = mean - self.reward_mean
        return _Seen(
            trials=old + n,
            successes=keep * self.successes + successes,
            reward_mean=self.reward_mean + shift * n / (old + n),
            reward_squares=keep * self.reward_squares + squares + shift * shift * (old * n / (old + n)),
        )


class RolloutAllocator:
    """Allocates a step's rollouts to prompts from what their earlier rollouts showed (DynaMO, arXiv 2602.19208).

    `config` is an AllocationConfig or a mapping of its keys. `uniform` spreads evenly; `waterfill` is the published
    procedure; `neyman` minimises sum_i v_i / n_i exactly, with v_i by `config.variance`. For `neyman` the statistics
    forget (half-life in visits; a visit is one `observe` that contains the prompt), and a Beta prior fitted to all
    prompts seen so far stands in for what a prompt has not shown. Deterministic: the same calls give the same counts.
    """

    def __init__(self, config: AllocationConfig | Mapping[str, Any]) -> None:
        self.config = AllocationConfig.model_validate(config)
        self.last: Allocation | None = None
        self._seen: dict[str, _Seen] = {}

    def allocate(self, prompt_ids: Sequence[str], budget: int, *, step: int) -> np.ndarray:
        """Rollouts of each prompt, int64 [N], aligned with `prompt_ids`, in which a prompt may occur twice.

        Their sum is `budget` and each is within the configured bounds; `on_shortfall` says what happens to a budget
        that does not fit them (ValueError by default). `last` keeps what was decided and from what.
        """
        ids = list(prompt_ids)
        budget, low, high = self.config.fit(len(ids), budget)
        seen = [self._seen.get(i, _Seen()) for i in ids]
        trials, successes, squares = _columns(seen)
        if self.config.kind == "waterfill":
            variance = self._priority(trials, successes)
            counts = waterfill(trials, variance, budget, low, high, self.config.initial_budget)
        else:
            variance = self._variance(trials, successes, squares)
            counts = spread(len(ids), budget)
            if self.config.kind == "neyman" and len(ids):
                variance = variance + self.config.variance_floor * variance.mean()
                counts = neyman(variance if variance.any() else np.ones(len(ids)), budget, low, high)
        self.last = Allocation(step, ids, counts, variance, trials > 0)
        return counts

    def observe(
        self, prompt_ids: Sequence[str], rewards: Sequence[float], successes: Sequence[bool], step: int
    ) -> None:
        """Takes in finished rollouts, one entry each, in any order: float [S] rewards and bool [S] successes.

        Raises ValueError naming the argument, or the prompt whose reward is not finite or whose success is not 0 or 1.
        """
        ids = list(prompt_ids)
        reward, success_ = to_numpy(rewards, "rewards").tolist(), to_numpy(successes, "successes").tolist()
        if not len(ids) == len(reward) == len(success_):
            raise ValueError(
                f"prompt_ids: {len(ids)} ids, {len(reward)} rewards and {len(success_)} successes at step {step}; "
                "give one of each a rollout"
            )
        visits: dict[str, tuple[list[float], list[bool]]] = {}
        for i, r, s in zip(ids, reward, success_, strict=True):
            if not math.isfinite(r):
                raise ValueError(f"rewards: prompt {i!r} has reward {r} at step {step}; rewards must be finite")
            if s not in (0, 1):
                raise ValueError(f"successes: prompt {i!r} has success {s} at step {step}; expected 0 or 1")
            visit = visits.setdefault(i, ([], []))
            visit[0].append(r)
            visit[1].append(s)
        # The published statistics never forget.
        keep = 1.0 if self.config.kind == "waterfill" else 0.5 ** (1 / self.config.half_life)
        updated = {i: self._seen.get(i, _Seen()).after(r, int(sum(s)), keep) for i, (r, s) in visits.items()}
        for i, seen in updated.items():
            seen.check(i)
        self._seen.update(updated)

    def _variance(self, trials: np.ndarray, successes: np.ndarray, squares: np.ndarray) -> np.ndarray:
        all_trials, all_successes, all_squares = _columns(list(self._seen.values()))
        if self.config.variance == "empirical":
            return success.empirical(squares, trials, all_squares, all_trials)
        a, b = success.beta_prior(all_successes, all_trials)
        model = success.bernoulli if self.config.variance == "bernoulli" else success.surprise
        return model(a + successes, b + trials - successes)

    def _priority(self, trials: np.ndarray, successes: np.ndarray) -> np.ndarray:
        variance = np.nan_to_num(success_variance(successes, trials))  # fewer than two rollouts: none, exploring is due
        solved = successes / np.maximum(trials, 1) >= SOLVED_RATE
        priority = np.where(solved, SOLVED_VARIANCE, variance)
        return np.sqrt(priority) if self.config.power == "sigma" else priority

    def state_dict(self) -> dict[str, Any]:
        """Plain data that survives JSON: prompt_id -> [trials, successes, reward mean, sum of squared deviations]."""
        return {"prompts": {i: [s.trials, s.successes, s.reward_mean, s.reward_squares] for i, s in self._seen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces what was seen. Raises ValueError naming the prompt whose statistics contradict each other."""
        if "prompts" not in state:
            raise ValueError(f"state: no allocator statistics in it, only {sorted(state)}")
        seen = {}
        for prompt_id, numbers in state["prompts"].items():
            if len(numbers) != 4:
                raise ValueError(f"prompt {prompt_id!r}: expected 4 numbers in its statistics, got {numbers}")
            seen[prompt_id] = _Seen(*numbers)
            seen[prompt_id].check(prompt_id)
        self._seen = seen


def _columns(seen: Sequence[_Seen]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(trials, successes, reward_squares), float64 [N] each."""
    return (
        np.array([s.trials for s in seen], np.float64),
        np.array([s.successes for s in seen], np.float64),
        np.array([s.reward_squares for s in seen], np.float64),
    )
