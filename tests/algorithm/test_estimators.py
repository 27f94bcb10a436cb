"""The Monte-Carlo figures of docs/estimators.md, and what the theory promises of them."""

import math
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dynamo_megatron.algorithm.advantages import group_advantages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "estimators.py")))


@pytest.fixture(scope="module")
def quick(tool):
    return tool.measure(1000)


def test_the_policy_is_what_the_page_says(tool):
    problem = tool.make_problem()
    right = problem.rewards.sum(1)
    assert len(tool.ANSWERS) >= 64 and right.min() >= 8 and (len(tool.ANSWERS) - right).min() >= 8
    np.testing.assert_allclose(problem.success, tool.SUCCESS_RATES, atol=2e-3)
    np.testing.assert_allclose(problem.policy.probabilities.sum(1), 1)
    assert set(tool.LENGTHS) == {1, 2, 3, 4, 5}


def test_the_gradient_is_exact(tool):
    """Against finite differences of the mean reward."""
    problem = tool.make_problem()
    offsets = np.random.default_rng(0).normal(0, 0.5, (len(problem.rewards), tool.LONGEST, tool.TOKENS))

    def reward(theta):
        return (tool.Policy.at(theta, offsets).probabilities * problem.rewards).sum(1).mean()

    theta = np.zeros((tool.LONGEST, tool.TOKENS))
    theta[:, tool.END] = -0.7
    steps = 1e-5 * np.eye(theta.size).reshape(-1, *theta.shape)
    differences = [(reward(theta + s) - reward(theta - s)) / 2e-5 for s in steps]
    np.testing.assert_allclose(problem.gradient(problem.policy), differences, atol=1e-9)


def test_the_theory_preset_is_unbiased_and_less_noisy_than_uniform(tool, quick):
    for name in tool.NAMES:
        figures = quick["prompt_mean", "rloo", name]
        low, high = figures.scale[1:]
        assert figures.bias[1] == 0, f"{name}: 0 is within the interval"
        assert low <= 1 / tool.LONGEST <= high, f"{name}: prompt_mean divides by the longest length and nothing else"
    ratio = quick["prompt_mean", "rloo", "neyman"].variance / quick["prompt_mean", "rloo", "uniform"].variance
    assert ratio < 0.95


def test_other_combinations_point_elsewhere(quick):
    for aggregation in ("token_mean", "sequence_sum", "constant_length"):
        assert quick[aggregation, "rloo", "uniform"].bias[1] == 0
        assert quick[aggregation, "rloo", "neyman"].bias[1] > 5, "prompts count by their rollouts"
    assert quick["sequence_mean", "rloo", "uniform"].bias[1] > 30, "short answers count more"
    assert quick["prompt_mean", "grpo", "uniform"].bias[1] > 3


@pytest.mark.parametrize(
    ("rate", "rollouts", "factor"), [(0.02, 7, 2.2), (0.02, 24, 4.2), (0.5, 7, 1.7), (0.5, 24, 1.9)]
)
def test_what_grpo_makes_a_prompt_count(rate, rollouts, factor):
    """The page's figures: the factor on a prompt's gradient, over all numbers k of right rollouts."""
    total = 0.0
    for k in range(1, rollouts):
        chance = math.comb(rollouts, k) * rate**k * (1 - rate) ** (rollouts - k)
        advantage = group_advantages(np.repeat([1.0, 0.0], [k, rollouts - k]), [0] * rollouts, "grpo")
        # An advantage A of a rollout with reward r pulls by A (r - p) / (p (1 - p)) along the gradient of p.
        rewards = np.repeat([1.0, 0.0], [k, rollouts - k])
        total += chance * (advantage * (rewards - rate)).mean() / (rate * (1 - rate))
    assert total == pytest.approx(factor, abs=0.05)


def test_later_updates_against_the_exact_expectation(tool):
    """rloo's sign is the reward's, so what the clip stops does not depend on the other rollouts."""
    problem = tool.make_problem()
    old, new = problem.policy, problem.moved
    centred = problem.rewards - problem.success[:, None]
    ratio, gradient = np.exp(new.logprobs - old.logprobs), problem.gradient(new)
    measured = tool.measure_losses(500)
    for name, low, high in (("no clip", 1.0, 1e9), ("clip 0.2 / 0.2", 0.2, 0.2), ("clip 0.2 / 0.28", 0.2, 0.28)):
        right = centred[..., None] > 0
        stopped = np.where(right, ratio > 1 + high, ratio < 1 - low)
        pull = np.where(stopped, 0, ratio)
        exact = np.einsum("pa,pat,patv->tv", old.probabilities * centred, pull, new.scores).ravel() / len(centred)
        along = exact @ gradient / (gradient @ gradient)
        across = np.linalg.norm(exact - along * gradient) / np.linalg.norm(along * gradient)
        figures = measured["later", name][0]
        assert figures.bias[1] <= 100 * across <= figures.bias[2], name
        assert figures.scale[1] <= along / tool.LONGEST <= figures.scale[2], name


def figures_in(table: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(the rows without their numbers, the numbers, one in the last place of each)."""
    number = r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])"
    rows = table.splitlines()[2:]
    found = re.findall(number, "\n".join(rows))
    places = np.array([10.0 ** -len(text.partition(".")[2]) for text in found])
    return [re.sub(number, "#", row) for row in rows], np.array([float(text) for text in found]), places


def test_the_page_agrees_with_a_few_replicates(tool, quick):
    """The table of the page, at its full count, lies within what these few leave open."""
    page = tool.in_page(tool.PAGE.read_text(encoding="utf-8"), "allocation")[0]
    labels, numbers, _ = figures_in(page)
    here, _, _ = figures_in(tool.allocation_table(quick))
    assert labels == here
    unit = quick["prompt_mean", "rloo", "uniform"].variance
    for row, (key, figures) in zip(numbers.reshape(-1, 4), tool.in_table_order(quick), strict=True):
        _, low, high = figures.bias
        assert low - 2 <= row[0] <= high + 2, key
        assert row[3] == pytest.approx(figures.variance / unit, rel=0.15), key


@pytest.mark.full
def test_the_page_is_what_the_tool_prints(tool):
    page = tool.PAGE.read_text(encoding="utf-8")
    for name, table in tool.tables(tool.REPLICATES).items():
        labels, numbers, places = figures_in(tool.in_page(page, name)[0])
        here, now, _ = figures_in(table)
        assert labels == here
        # One in the last place: another machine may round a sum otherwise.
        assert (np.abs(numbers - now) < 1.1 * places).all()
