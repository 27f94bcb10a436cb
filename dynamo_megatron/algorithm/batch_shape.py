"""The number of prompts of a step: `data.batch_prompts`, or with `auto` chosen by the measured gradient noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.gradient_noise import Noise
from dynamo_megatron.config import Config

HALF_LIFE = 32.0  # measurements
PATIENCE = 8  # measurements before the first change, and from one change to the next
LEAST_GAIN = 0.05  # the share of variance times cost that a change has to save
CERTAINTY = 2.0  # standard errors by which the gain must exceed LEAST_GAIN
# The cost of a token besides its generation, in forward passes: one for the logprobs, three for the update.
TRAINING_PASSES = 4.0


def prefill_cost(prompt_tokens: float, response_tokens: float) -> float:
    """The cost of the prefill of one more prompt, in rollouts, if servers compute it once for all of its rollouts.

    It counts tokens: a generated token is assumed to cost as much as a prefilled one, so this is rather too high."""
    return prompt_tokens / (response_tokens + TRAINING_PASSES * (prompt_tokens + response_tokens))


def expense(prompts: float, budget: int, prompt_cost: float) -> np.ndarray:
    """The factors of `between` and `within`, float64 [2], in the variance of the gradient times the cost of a step with
    `budget` rollouts of `prompts` prompts: (between / prompts + within / budget) (prompt_cost prompts + budget)."""
    return (prompt_cost * prompts + budget) * np.array([1 / prompts, 1 / budget])


class BatchShape:
    """Minimises variance times cost, since a step of half the variance is worth two. If a prompt costs c rollouts, the
    best number of rollouts per prompt is sqrt(c within / between). The number of prompts changes by factors of 2, and
    only if the gain exceeds LEAST_GAIN by CERTAINTY standard errors of the measurements so far. Earlier measurements
    count less.
    """

    def __init__(self, config: Config):
        self.prompts = config.batch_prompts
        self._chooses, self._bounds = config.chooses_shape, config.prompt_bounds
        self._budget = config.rollout_budget
        self._prompt_cost = config.data.shape.prompt_cost
        if self._prompt_cost is None and "--disable-radix-cache" in config.rollout.server_args:
            self._prompt_cost = 0.0  # every rollout computes its prompt's prefill
        self._waited = 0
        # Sums over the measurements, weighted by age: the weight, its square, between, within, between^2,
        # between * within, within^2, tokens of prompts, tokens of responses.
        self._sums = np.zeros(9)

    def observe(self, noise: Noise | None, prompt_tokens: float, response_tokens: float) -> str | None:
        """Adds a step's noise and the mean tokens of a rollout's prompt and response. If it changes `prompts` for the
        next step, it returns a message about the change, else None."""
        if not self._chooses or noise is None:
            return None
        b, w, keep = noise.between, noise.within, 0.5 ** (1 / HALF_LIFE)
        ages = np.array([keep, keep**2, *[keep] * 7])
        self._sums = ages * self._sums + [1, 1, b, w, b * b, b * w, w * w, prompt_tokens, response_tokens]
        self._waited += 1
        return self._choose() if self._waited >= PATIENCE else None

    def _choose(self) -> str | None:
        weight, squared, *sums = self._sums
        between, within, bb, bw, ww, *tokens = np.array(sums) / weight
        cost = prefill_cost(*tokens) if self._prompt_cost is None else self._prompt_cost
        covariance = np.array([[bb - between**2, bw - between * within], [bw - between * within, ww - within**2]])
        if within <= 0:  # by chance: no decision yet
            return None
        fewest, most = self._bounds
        now, found = expense(self.prompts, self._budget, cost), []
        for prompts in {max(self.prompts // 2, fewest), min(2 * self.prompts, most)} - {self.prompts}:
            gain = (1 - LEAST_GAIN) * now - expense(prompts, self._budget, cost)
            mean = gain @ [between, within]
            error = np.sqrt(max(gain @ covariance @ gain, 0.0) * squared) / weight
            if mean > CERTAINTY * error:
                found.append((float(mean), prompts))
        if not found:
            return None
        before, (_, self.prompts) = self.prompts, max(found)
        self._waited = 0
        ratio = (expense(self.prompts, self._budget, cost) @ [between, within]) / (now @ [between, within])
        return (
            f"batch shape: {self.prompts} prompts with {self._budget / self.prompts:.3g} rollouts each in place of "
            f"{before} with {self._budget / before:.3g}: the gradient's variance between prompts is "
            f"{between / within:.2g} of that of a rollout within one, a prompt costs {cost:.2g} rollouts; variance "
            f"times cost {ratio:.2f} of what it was"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.prompts, "waited": self._waited, "sums": self._sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prompts, self._waited = state["prompts"], state["waited"]
        self._sums = np.array(state["sums"], np.float64)
