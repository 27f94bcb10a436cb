"""Checks of functions and allocators that the user plugs in, for the user's own tests.

A broken contract raises ValueError, one line (`check_allocator` may also raise AssertionError). A check takes a second,
that of an allocator a few.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.arrays import group_index
from dynamo_megatron.algorithm.history import COLUMNS
from dynamo_megatron.algorithm.user_functions import (
    AdvantageInputs,
    LossInputs,
    TokenLosses,
    custom_advantages,
    custom_losses,
    load_advantage,
    load_loss,
)
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.runtime.user_code import UserFunction

__all__ = ["check_advantage", "check_allocator", "check_loss"]

DISTINCT = "forgotten in part"  # weights and rates are real numbers: no two prompts tie
BOUNDS = ((1, 1), (1, 5), (2, 24), (8, 24))
SIZES = (1, 2, 7, 40)
GROUPS = ((1,), (4,), (2, 3), (1, 7, 1, 2), (8, 8, 8, 8))  # rollouts of each group
RESPONSES = ((1,), (9,), (3, 1, 12, 2), (30, 30, 30))  # tokens of each response
DRIFTS = (0.0, 0.3, 6.0)  # std of logprobs - old_logprobs, nats: at the old policy, near it, and far from it
FARTHEST = 20.0  # nats; exp of it squared is still a float32


def check_allocator(config: AllocationConfig | Mapping[str, Any]) -> None:
    """Requests counts from the allocator of `config` in some hundred seeded cases; takes seconds.

    Prompts: one, few, many, one of them twice; with and without history, energies and lengths. Budgets: within the
    bounds, at them, and beyond both. Checked: sum, bounds and dtype; a repeated call and a state that went through JSON
    give the same counts; a prompt's place in the batch changes its count by one rollout at most (ties). Raises
    ValueError naming the class, or AssertionError with the case.
    """
    config = AllocationConfig.model_validate(config)
    rng = np.random.default_rng(0)
    for (low, high), size in itertools.product(BOUNDS, SIZES):
        ids, least, most = [f"p{i}" for i in range(size)], size * low, size * high
        budgets = {
            "clip": [0, least, int(rng.integers(least, most + 1)), most, 2 * most + 1],
            "scale": [size, 2 * most + 1],  # beyond the bounds, which are scaled: `counts` gets the scaled ones
        }
        for (shortfall, asked), (name, state) in itertools.product(budgets.items(), _histories(rng, ids).items()):
            bounds = {"rollout_n_min": low, "rollout_n_max": high, "on_shortfall": shortfall}
            allocator, restored = (RolloutAllocator(config.model_copy(update=bounds)) for _ in range(2))
            allocator.load_state_dict(state)
            restored.load_state_dict(json.loads(json.dumps(state)))
            order = rng.permutation(size) if name == DISTINCT else np.arange(size)
            for budget in asked:
                case = f"{size} prompts, {name}, bounds {low}..{high}, {shortfall}, budget {budget}"
                counts = allocator.allocate(ids, budget, step=1)
                again = restored.allocate(ids, budget, step=1)
                assert np.array_equal(counts, again), f"{case}: {counts}, from the same state {again}"
                moved = allocator.allocate([ids[i] for i in order], budget, step=1)
                same = np.abs(counts[order] - moved).max() <= 1
                assert same, f"{case}: {counts[order]}, in another order {moved}"
                allocator.allocate([*ids[1:], ids[-1]], budget, step=1)  # checks the sum: a prompt may occur twice


def _histories(rng: np.random.Generator, ids: list[str]) -> dict[str, dict[str, Any]]:
    """What an allocator may have seen of the prompts: name of the case -> the state that the allocator resumes from."""
    size = len(ids)
    trials = rng.integers(1, 40, size).astype(float)
    successes = rng.binomial(trials.astype(int), rng.beta(0.3, 0.3, size)).astype(float)
    weights = trials + 40 + rng.uniform(size=size)
    rates = rng.uniform(0.1, 0.8, size)
    zeros, spread = np.zeros(size), successes * (1 - successes / trials)

    right, wrong = rng.gamma(2, 9, size), rng.gamma(2, 30, size)

    def state(seen: int, *columns: np.ndarray, measured: bool = False) -> dict[str, Any]:
        weights, successes = columns[:2]
        failures = weights - successes
        measures = (successes, right * successes, failures, wrong * failures)
        values = (*columns, *(m * measured for m in measures))
        named = {name: x[:seen].tolist() for name, x in zip(COLUMNS, values, strict=True)}
        return {"prompt_ids": ids[:seen], **named, "energy_line": [0.0] * 5}

    real = (weights, rates * weights, rng.normal(size=size), weights * rng.gamma(2, 1, size))
    return {
        "never seen": state(0, zeros, zeros, zeros, zeros),
        "all solved": state(size, trials, trials, zeros + 1, zeros, measured=True),
        "none solved": state(size, trials, zeros, zeros, zeros),
        "all seen": state(size, trials, successes, successes / trials, spread, measured=True),
        "half of them new": state(size // 2, trials, successes, successes / trials, spread, measured=True),
        DISTINCT: state(size, *real, measured=True),
        "no energies": state(size, *real),
    }


def check_advantage(function: Callable | str, prompt_ids: Sequence[str] = ("p0", "p1", "p2")) -> None:
    """Calls `function` ("module:function", or the function) with made-up rollouts of the prompts `prompt_ids`.

    Checked, with groups and rewards of all kinds: the result is finite float64 [S]; a second call returns the same; the
    inputs are not modified; a rollout's value does not depend on the order of the rollouts, beyond rounding.
    """
    user = _user(function, load_advantage)
    rng = np.random.default_rng(0)
    for sizes in GROUPS:
        group = np.repeat(np.arange(len(sizes)), sizes)
        count = len(group)
        rewards = {"0": np.zeros(count), "1": np.ones(count), "0 and 1": rng.integers(0, 2, count).astype(np.float64)}
        for kind, values in {**rewards, "any": rng.normal(0, 3, count)}.items():
            names = tuple(prompt_ids[g % len(prompt_ids)] for g in group.tolist())
            inputs = AdvantageInputs(values, values >= 1, group, names, rng.integers(0, 50, count))
            advantages = custom_advantages(user, inputs)
            order = rng.permutation(count)
            moved = AdvantageInputs(
                values[order],
                inputs.successes[order],
                group_index(group[order], count)[0],
                tuple(names[i] for i in order),
                inputs.response_lengths[order],
            )
            same = np.allclose(advantages[order], custom_advantages(user, moved), rtol=1e-9, atol=1e-9)
            case = f"groups of {', '.join(map(str, sizes))} rollouts with rewards of {kind}"
            user.hold(same, f"gives a rollout another advantage where the batch is in another order ({case})")


def check_loss(
    function: Callable | str, *, reference: bool = False, kl_coef: float = 0.0, context_parallel: bool = False
) -> None:
    """Calls `function` ("module:function", or the function) with made-up tokens.

    `reference`: with logprobs of a reference policy, and with `kl_coef` (algorithm.kl.where: function). Checked, up to
    20 nats from the old policy: losses [r] and their gradient with respect to the logprobs are finite; a second call
    returns the same bits; the inputs are not modified; a response's losses do not depend on the other responses of its
    micro-batch, beyond rounding. `context_parallel`: a token's loss must not depend on the other tokens of its response
    either, since other ranks may have them.
    """
    user = _user(function, load_loss)
    for case, inputs in _loss_cases(reference, kl_coef):
        with _unchanged(user, inputs, f" ({case})"):
            found = custom_losses(user, inputs)
        for name, values in (("a loss", found.loss), ("a derivative by logprobs", found.gradient)):
            if (bad := (~torch.isfinite(values)).nonzero()).numel():
                i = int(bad[0, 0])
                distance = float((inputs.logprobs - inputs.old_logprobs)[i].detach())
                at = f"logprobs - old_logprobs is {distance:.3g} and the advantage {float(inputs.advantages[i]):.3g}"
                user.hold(False, f"gave {name} of {float(values[i])} where {at} ({case})")
        again = custom_losses(user, _part(inputs, torch.ones(len(inputs.response), dtype=torch.bool)))
        same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        user.hold(same, f"gives other losses when called again with the same inputs ({case})")
        alone = [inputs.response == i for i in inputs.response.unique()]
        why = "a loss has to be a function of its own response, or it would depend on micro_batch_tokens"
        _hold_parts(user, inputs, found, alone, f"by itself than beside others: {why} ({case})")
        if context_parallel:
            halves = torch.arange(len(inputs.response)) % 2 == 0
            why = "with parallel.cp above 1 a rank has only a part of its tokens; use cp 1"
            _hold_parts(user, inputs, found, [halves, ~halves], f"whose tokens are apart: {why} ({case})")


def _user(function: Callable | str, load: Callable[[str], UserFunction]) -> UserFunction:
    if isinstance(function, str):
        return load(function)
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))
    return UserFunction(function, f"{module}:{name}")


@contextlib.contextmanager
def _unchanged(function: UserFunction, inputs: LossInputs, case: str = "") -> Iterator[None]:
    before = {name: t.detach().clone() for name, t in vars(inputs).items() if isinstance(t, torch.Tensor)}
    yield
    for name, tensor in before.items():
        function.hold(torch.equal(getattr(inputs, name), tensor), f"changes inputs.{name}{case}")


def _loss_cases(reference: bool, kl_coef: float) -> Iterator[tuple[str, LossInputs]]:
    rng = np.random.default_rng(0)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.float32))

    for lengths in RESPONSES:
        count = sum(lengths)
        old = -rng.exponential(1.5, count)
        moved = np.clip(rng.choice(DRIFTS, count) * rng.normal(size=count), -FARTHEST, FARTHEST)
        inputs = LossInputs(
            logprobs=tensor(old + moved).requires_grad_(),
            entropy=tensor(rng.exponential(0.8, count)),
            old_logprobs=tensor(old),
            engine_logprobs=tensor(old + rng.normal(0, 0.01, count)),
            reference_logprobs=tensor(old + rng.normal(0, 0.3, count)) if reference or kl_coef else None,
            advantages=tensor(rng.normal(size=count) * (rng.random(count) < 0.8)),
            weights=tensor(rng.uniform(0.5, 1, count) * (rng.random(count) < 0.8) / count),
            response=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            kl_coef=kl_coef,
        )
        yield f"{len(lengths)} responses", inputs


def _part(inputs: LossInputs, kept: torch.Tensor) -> LossInputs:
    """Returns the inputs of the tokens `kept` (bool [r]), with their responses renumbered from 0."""
    tensors = {name: t.detach()[kept] for name, t in vars(inputs).items() if isinstance(t, torch.Tensor)}
    tensors["logprobs"].requires_grad_()
    tensors["response"] = tensors["response"].unique(return_inverse=True)[1]
    return replace(inputs, **tensors)


def _hold_parts(
    function: UserFunction, inputs: LossInputs, found: TokenLosses, parts: list[torch.Tensor], what: str
) -> None:
    for kept in parts:
        if kept.any():
            part = custom_losses(function, _part(inputs, kept))
            same = all(torch.allclose(a[kept], b, rtol=1e-4, atol=1e-6) for a, b in zip(found, part, strict=True))
            function.hold(same, f"gives a response other losses {what}")
