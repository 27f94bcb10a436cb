"""What aggregations and advantages estimate under unequal numbers of rollouts: Monte-Carlo against a known gradient.

    python -P tools/estimators.py [--replicates N] [--write]

Prints the tables of docs/estimators.md; --write puts them there. The policy is a table: every answer to a prompt can be
counted out, and so can the gradient of the mean reward. Advantages, weights, counts and loss are the trainer's own.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dynamo_megatron.algorithm.advantages import group_advantages
from dynamo_megatron.algorithm.aggregation import token_weights
from dynamo_megatron.algorithm.allocation import neyman, waterfill
from dynamo_megatron.algorithm.allocators.waterfill import published_priority
from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change
from dynamo_megatron.config.method import AGGREGATIONS, ModulationConfig, PolicyLossConfig
from dynamo_megatron.evaluation.results import markdown_row
from dynamo_megatron.kernels.terms import loss_terms
from dynamo_megatron.kernels.types import METRICS, Statistics, Tokens

PAGE = Path(__file__).parents[1] / "docs" / "estimators.md"
MARKS = "<!-- {}: {} -->"  # around a table of the page: begin or end, and its name
REPLICATES = 20_000  # of the page
CHUNK = 500  # replicates at once

TOKENS, LONGEST, END = 4, 5, 0  # vocabulary; an answer ends with token END or after LONGEST tokens
ANSWERS = [
    answer
    for length in range(1, LONGEST + 1)
    for answer in itertools.product(range(TOKENS), repeat=length)
    if END not in answer[:-1] and (answer[-1] == END or length == LONGEST)
]
LENGTHS = np.array([len(answer) for answer in ANSWERS])
SUCCESS_RATES = (0.02, 0.03, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.97)  # one prompt each
BUDGET, LOW, HIGH = 16 * len(SUCCESS_RATES), 4, 48
ADVANTAGES = ("rloo", "dr_grpo", "grpo")
NAMES = ("uniform", "waterfill", "neyman")
MOVE = 0.3  # length of the step uphill that `moved` has taken
DECAY6, DECAY5 = ModulationConfig(), ModulationConfig(alpha=0.4, tau=0.9)  # the published settings
UNCLIPPED = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9}
# Of the second table: (of updates, name) -> loss.
LOSSES = {
    ("first", "plain"): PolicyLossConfig(),
    ("first", "modulation, decay6"): PolicyLossConfig(modulation=DECAY6),
    ("first", "modulation, decay5"): PolicyLossConfig(modulation=DECAY5),
    ("later", "no clip"): PolicyLossConfig(**UNCLIPPED),
    ("later", "clip 0.2 / 0.2"): PolicyLossConfig(),
    ("later", "clip 0.2 / 0.28"): PolicyLossConfig(clip_ratio_high=0.28),
    ("later", "clip 0.2 / 0.2, modulation, decay6"): PolicyLossConfig(modulation=DECAY6),
}


@dataclass(frozen=True)
class Policy:
    """P prompts share the parameters theta [LONGEST, TOKENS] (d numbers); A answers of at most LONGEST tokens each."""

    probabilities: np.ndarray  # float64 [P, A]
    logprobs: np.ndarray  # float64 [P, A, LONGEST], natural log; 0 past the end
    entropy: np.ndarray  # float64 [P, A, LONGEST], nats
    expected_pi_lambda: np.ndarray  # float64 [P, A, LONGEST]
    collision: np.ndarray  # float64 [P, A, LONGEST], the sum of the squared probabilities
    # float64 [P, A, LONGEST, TOKENS], the gradient of an answer's logprob; row t is the whole gradient of token t's.
    scores: np.ndarray

    @classmethod
    def at(cls, theta: np.ndarray, offsets: np.ndarray) -> Policy:
        """logits [P, LONGEST, TOKENS] = theta + offsets."""
        logits = theta + offsets
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        p = np.exp(log_p)
        entropy = -(p * log_p).sum(-1)
        expected, collision = (p**2 * (log_p + entropy[..., None])).sum(-1), (p**2).sum(-1)
        shape = (len(p), len(ANSWERS), LONGEST)
        logprobs, scores = np.zeros(shape), np.zeros((*shape, TOKENS))
        for a, answer in enumerate(ANSWERS):
            for t, token in enumerate(answer):
                logprobs[:, a, t] = log_p[:, t, token]
                scores[:, a, t] = np.eye(TOKENS)[token] - p[:, t]
        every_answer = (np.broadcast_to(x[:, None], shape) for x in (entropy, expected, collision))
        return cls(np.exp(logprobs.sum(-1)), logprobs, *every_answer, scores)


@dataclass(frozen=True)
class Problem:
    policy: Policy
    moved: Policy  # some updates later, uphill
    rewards: np.ndarray  # float64 [P, A], 0 or 1

    @property
    def success(self) -> np.ndarray:
        """float64 [P]."""
        return (self.policy.probabilities * self.rewards).sum(1)

    def gradient(self, policy: Policy) -> np.ndarray:
        """Of the mean over prompts of the expected reward, float64 [d]."""
        total = np.einsum("pa,pa,patv->tv", policy.probabilities, self.rewards, policy.scores)
        return total.ravel() / len(self.rewards)


def make_problem() -> Problem:
    rng = np.random.default_rng(0)
    prompts = len(SUCCESS_RATES)
    theta, offsets = np.zeros((LONGEST, TOKENS)), rng.normal(0, 0.5, (prompts, LONGEST, TOKENS))
    theta[:, END] = -0.7
    policy = Policy.at(theta, offsets)
    rewards = np.zeros((prompts, len(ANSWERS)))
    for i, rate in enumerate(SUCCESS_RATES):
        # Answers in random order, as long as they keep the rate of the rarer kind, so that there are many of both.
        left, rarer = (rate, 1) if rate <= 0.5 else (1 - rate, 0)
        rewards[i] = 1 - rarer
        for a in rng.permutation(len(ANSWERS)):
            if policy.probabilities[i, a] <= left:
                rewards[i, a] = rarer
                left -= policy.probabilities[i, a]
    problem = Problem(policy, policy, rewards)
    uphill = problem.gradient(policy).reshape(theta.shape)
    return Problem(policy, Policy.at(theta + MOVE * uphill / np.linalg.norm(uphill), offsets), rewards)


def allocations(problem: Problem) -> dict[str, np.ndarray]:
    """Counts, int64 [P], from the success rates: given before a rollout is drawn."""
    p = problem.success
    priority = published_priority(p, p * (1 - p))
    return {
        "uniform": np.full(len(p), BUDGET // len(p)),
        "waterfill": waterfill(np.full(len(p), 16), priority, BUDGET, LOW, HIGH, 8),
        "neyman": neyman(p * (1 - p), BUDGET, LOW, HIGH),
    }


def draws(problem: Problem, counts: np.ndarray, replicates: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(prompt [S], answer [chunk, S]) of mini-batches of S = sum of counts rollouts, `replicates` of them in all."""
    rng = np.random.default_rng(1)
    prompt = np.repeat(np.arange(len(counts)), counts)
    cumulative = problem.policy.probabilities.cumsum(1)
    for start in range(0, replicates, CHUNK):
        uniform = rng.uniform(size=(min(CHUNK, replicates - start), len(prompt)))
        answer = np.empty(uniform.shape, np.int64)
        for i in range(len(counts)):
            own = prompt == i
            answer[:, own] = np.searchsorted(cumulative[i] / cumulative[i, -1], uniform[:, own], side="right")
        yield prompt, answer


def advantages_of(problem: Problem, prompt: np.ndarray, answer: np.ndarray, kind: str) -> np.ndarray:
    """float64 [chunk, S]; every mini-batch has groups of its own."""
    groups = np.arange(len(answer))[:, None] * len(problem.rewards) + prompt
    return group_advantages(problem.rewards[prompt, answer].ravel(), groups.ravel(), kind).reshape(answer.shape)


def gradients(problem: Problem, counts: np.ndarray, replicates: int) -> dict[tuple[str, str], np.ndarray]:
    """(aggregation, advantage) -> the gradient of each mini-batch before any update, float64 [replicates, d]."""
    parts: dict[tuple[str, str], list[np.ndarray]] = {}
    for prompt, answer in draws(problem, counts, replicates):
        scores = problem.policy.scores[prompt, answer].reshape(*answer.shape, -1)
        advantages = {kind: advantages_of(problem, prompt, answer, kind) for kind in ADVANTAGES}
        for mode in AGGREGATIONS:
            weights = np.array([token_weights(mode, LENGTHS[a], prompt, max_length=LONGEST) for a in answer])
            for kind, advantage in advantages.items():
                parts.setdefault((mode, kind), []).append(np.einsum("rs,rsd->rd", weights * advantage, scores))
    return {key: np.concatenate(chunks) for key, chunks in parts.items()}


@dataclass(frozen=True)
class Figures:
    """How mini-batch gradients relate to the gradient of the mean reward, up to a factor that a learning rate absorbs.

    `bias`: the part of the expected gradient that stands at a right angle to the true one, by its length in percent of
    the part that lies along it, with a 95 % interval. `variance`: trace of the covariance over the squared length of
    the part along it. `scale`: the part along it over the true gradient, with a 95 % interval.
    """

    bias: tuple[float, float, float]  # estimate, low, high
    variance: float
    scale: tuple[float, float, float]

    @classmethod
    def of(cls, estimates: np.ndarray, gradient: np.ndarray) -> Figures:
        n, length = len(estimates), np.linalg.norm(gradient)
        along = estimates @ gradient / length
        across = estimates - np.outer(along, gradient / length)
        mean, covariance = across.mean(0), np.atleast_2d(np.cov(across.T))
        # |mean|^2 without the part that noise alone gives it, and its standard error
        squared = mean @ mean - np.trace(covariance) / n
        error = np.sqrt(4 * mean @ covariance @ mean / n + 2 * (covariance**2).sum() / n**2)
        part = along.mean()
        interval = (squared, squared - 1.96 * error, squared + 1.96 * error)
        bias = tuple(100 * np.sqrt(max(0.0, x)) / part for x in interval)
        half = 1.96 * along.std(ddof=1) / np.sqrt(n)
        variance = (np.trace(covariance) + along.var(ddof=1)) / part**2
        return cls(bias, variance, tuple(x / length for x in (part, part - half, part + half)))


def measure(replicates: int) -> dict[tuple[str, str, str], Figures]:
    """(aggregation, advantage, allocation) -> Figures."""
    problem = make_problem()
    gradient = problem.gradient(problem.policy)
    return {
        (mode, kind, name): Figures.of(estimates, gradient)
        for name, counts in allocations(problem).items()
        for (mode, kind), estimates in gradients(problem, counts, replicates).items()
    }


def token_gradients(
    problem: Problem, counts: np.ndarray, replicates: int, policy: Policy, loss: PolicyLossConfig
) -> tuple[np.ndarray, dict[str, float]]:
    """(gradient of each mini-batch at `policy`, float64 [replicates, d], shares of tokens) under the head's loss.

    rloo, prompt_mean; the rollouts are from `problem.policy`. The shares are those clipped, damped and boosted.
    """
    parts, tokens = [], 0
    shares = dict.fromkeys(("clipped", "damped", "boosted"), 0)
    clip = (loss.clip_ratio_low, loss.clip_ratio_high)
    for prompt, answer in draws(problem, counts, replicates):
        # [chunk, S, LONGEST]: the tokens past an answer's end are there, with weight and advantage 0.
        live = np.arange(LONGEST) < LENGTHS[answer][..., None]
        weights = np.array([token_weights("prompt_mean", LENGTHS[a], prompt, max_length=LONGEST) for a in answer])
        advantages = advantages_of(problem, prompt, answer, "rloo")
        old, mask = _flat(problem.policy.logprobs[prompt, answer]), _flat(live)
        own = Tokens(_flat(advantages[..., None] * live), _flat(weights[..., None] * live), old)
        logprobs, entropy, expected = (
            _flat(x[prompt, answer]) for x in (policy.logprobs, policy.entropy, policy.expected_pi_lambda)
        )
        change = entropy_change(own.advantages, logprobs, entropy, old, mask, *clip, expected_pi_lambda=expected)
        ranges = ModulationRanges(  # of each mini-batch
            torch.where(mask, entropy, torch.inf).amin(1, keepdim=True),
            torch.where(mask, entropy, -torch.inf).amax(1, keepdim=True),
            change.amax(1, keepdim=True),
        )
        terms = loss_terms(loss, Statistics(None, None, logprobs, entropy, expected, None), own, expected, ranges)
        pull = -terms.grad_logprobs.numpy().reshape(live.shape)
        parts.append(np.einsum("rst,rstv->rtv", pull, policy.scores[prompt, answer]).reshape(len(answer), -1))
        tokens += int(mask.sum())
        for name in shares:  # a token past an answer's end has advantage 0: neither clipped, damped nor boosted
            shares[name] += int(terms.sums[METRICS.index(name)])
    return np.concatenate(parts), {name: n / tokens for name, n in shares.items()}


def _flat(values: np.ndarray) -> torch.Tensor:
    """All tokens of a mini-batch in a row."""
    return torch.from_numpy(values.reshape(len(values), -1))


def measure_losses(replicates: int) -> dict[tuple[str, str], tuple[Figures, dict[str, float]]]:
    """LOSSES' keys -> (Figures, shares of tokens), with neyman allocation."""
    problem = make_problem()
    counts = allocations(problem)["neyman"]
    result = {}
    for (when, name), loss in LOSSES.items():
        policy = problem.policy if when == "first" else problem.moved
        estimates, shares = token_gradients(problem, counts, replicates, policy, loss)
        result[when, name] = Figures.of(estimates, problem.gradient(policy)), shares
    return result


def in_table_order(
    measured: dict[tuple[str, str, str], Figures],
) -> Iterator[tuple[tuple[str, str, str], Figures]]:
    for key in itertools.product(AGGREGATIONS, ADVANTAGES, NAMES):
        yield key, measured[key]


def allocation_table(measured: dict[tuple[str, str, str], Figures]) -> str:
    unit = measured["prompt_mean", "rloo", "uniform"].variance
    head = ["aggregation", "advantage", *(f"{name}: bias, % | variance" for name in NAMES)]
    rows = [markdown_row(head), markdown_row(["---"] * 2 + ["---:"] * 2 * len(NAMES))]
    for (mode, kind), row in itertools.groupby(in_table_order(measured), key=lambda entry: entry[0][:2]):
        cells = (f"{_bias(figures)} | {figures.variance / unit:.2f}" for _, figures in row)
        rows.append(markdown_row([mode, kind, *cells]))
    return "\n".join(rows)


def loss_table(measured: dict[tuple[str, str], tuple[Figures, dict[str, float]]]) -> str:
    unit = measured["first", "plain"][0].variance
    head = ["update", "loss", "bias, %", "along, %", "variance", "clipped, %", "damped, %", "boosted, %"]
    rows = [markdown_row(head), markdown_row(["---"] * 2 + ["---:"] * 6)]
    for (when, name), (figures, shares) in measured.items():
        along = f"{100 * LONGEST * figures.scale[0]:.0f}"
        cells = [_bias(figures), along, f"{figures.variance / unit:.2f}"]
        rows.append(markdown_row([when, name, *cells, *(f"{100 * share:.1f}" for share in shares.values())]))
    return "\n".join(rows)


def tables(replicates: int) -> dict[str, str]:
    """The page's tables in Markdown, by name."""
    return {
        "allocation": allocation_table(measure(replicates)),
        "loss": loss_table(measure_losses(replicates)),
    }


def _bias(figures: Figures) -> str:
    estimate, low, high = figures.bias
    return f"{estimate:.1f} ({low:.1f} to {high:.1f})"


def in_page(page: str, name: str, table: str | None = None) -> tuple[str, str]:
    """(the table of that name in the page, the page with `table` in its place)."""
    begin, end = MARKS.format("begin", name), MARKS.format("end", name)
    found = re.search(f"{re.escape(begin)}\n\n(.*?)\n\n{re.escape(end)}", page, re.DOTALL)
    if found is None:
        raise ValueError(f"docs/estimators.md: no table between {begin} and {end}")
    return found[1], page[: found.start(1)] + (found[1] if table is None else table) + page[found.end(1) :]


def write_tables(tables: Callable[[int], dict[str, str]], description: str, replicates: int) -> None:
    """The command line of a tool whose `tables` (of a number of replicates; by name, in Markdown) are on the page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicates", type=int, default=replicates, help="mini-batches drawn for each figure")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/estimators.md")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8") if options.write else ""
    for name, table in tables(options.replicates).items():
        print(f"{table}\n")
        if options.write:
            page = in_page(page, name, table)[1]
    if options.write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_tables(tables, __doc__, REPLICATES)
