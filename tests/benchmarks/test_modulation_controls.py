"""The controls of the modulation's evidence have its factors, but for what each of them leaves out."""

from pathlib import Path

import pytest
import torch
from modulation_controls import MODULATION, factors, modulated, permuted, tilted

from dynamo_megatron.algorithm.custom_shaping import TokenInputs, load_shaping
from dynamo_megatron.comparison.spec import planned_runs, read_spec
from dynamo_megatron.config.files import identity, to_plain
from dynamo_megatron.testing import check_shaping

LENGTHS = (3, 1, 6, 2, 6)
SIGNS = (0.5, -1.0, 0.25, 0.0, -2.0)  # advantages


def tokens(order: torch.Tensor | None = None) -> TokenInputs:
    """`order`: of the tokens' statistics."""
    generator = torch.Generator().manual_seed(0)
    p = (3 * torch.randn(sum(LENGTHS), 7, generator=generator)).softmax(1)
    p = p if order is None else p[order]
    entropy = -(p * p.log()).sum(1)
    expected = (p**2 * (p.log() + entropy[:, None])).sum(1)
    response = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    advantages = torch.tensor(SIGNS, dtype=torch.float64)[response]
    names = tuple(f"000001-{i:04}-000" for i in range(len(LENGTHS)))
    return TokenInputs(advantages, p[:, 0].log(), entropy, expected, (p**2).sum(1), response, names)


def by_hand(inputs: TokenInputs) -> torch.Tensor:
    """beta_comp of alpha 1."""
    h = inputs.entropy
    return torch.where(inputs.advantages > 0, 1 + (h.max() - h) / (h.max() - h.min()), 1.0)


def test_the_permuted_factors_are_the_same_ones_of_each_sign():
    inputs = tokens()
    ours, theirs = (f(inputs) / inputs.advantages for f in (permuted, modulated))
    for tokens_of in (inputs.advantages > 0, inputs.advantages < 0):
        assert ours[tokens_of].sort().values.tolist() == pytest.approx(theirs[tokens_of].sort().values.tolist())
        assert len(set(theirs[tokens_of].tolist())) > 1
        assert ours[tokens_of].tolist() != pytest.approx(theirs[tokens_of].tolist())
    assert not permuted(inputs)[inputs.advantages == 0].any()


def test_the_permutation_has_nothing_to_do_with_the_entropy():
    """Over many steps a token's factor goes with its entropy no more than another token's."""
    inputs, total = tokens(), 0.0
    positive = inputs.advantages > 0
    for step in range(400):
        names = tuple(f"{step:06}-{i:04}-000" for i in range(len(LENGTHS)))
        total = total + permuted(TokenInputs(**{**vars(inputs), "rollout_ids": names}))[positive]
    factor = total / 400 / inputs.advantages[positive]
    mean = (modulated(inputs) / inputs.advantages)[positive].mean()
    assert factor.tolist() == pytest.approx([float(mean)] * len(factor), abs=0.08)
    assert by_hand(inputs)[positive].std() > 0.25


def test_the_tilt_is_the_mean_of_the_compensation_and_knows_no_entropy():
    inputs = tokens()
    positive = inputs.advantages > 0
    factor = tilted(inputs) / inputs.advantages
    assert factor[positive].tolist() == pytest.approx([float(by_hand(inputs)[positive].mean())] * 9)
    assert torch.equal(tilted(inputs)[~positive], inputs.advantages[~positive])
    order = torch.arange(len(positive))
    order[positive] = order[positive].flip(0)
    moved = tokens(order)
    assert not torch.allclose(modulated(moved), modulated(inputs))
    assert torch.allclose(tilted(moved), tilted(inputs))


def test_the_factors_are_those_of_alpha_1():
    inputs = tokens()
    assert factors(inputs).beta_comp.tolist() == pytest.approx(by_hand(inputs).tolist())
    assert factors(inputs).beta_stab.min() < 0.9 < factors(inputs).beta_stab.max()


@pytest.mark.parametrize("function", [modulated, permuted, tilted])
def test_the_contract(function):
    check_shaping(function)


@pytest.mark.parametrize("task", ["class", "sums"])
def test_the_arms_differ_from_the_control_in_what_they_are_named_after(task, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    spec = read_spec(f"compare/modulation_{task}")
    first = {run.arm: identity(plain := to_plain(run.config), list(plain)) for run in reversed(planned_runs(spec))}
    control, found = first.pop("history"), {}
    for arm, own in first.items():
        changed = {key: own.get(key) for key in own.keys() | control.keys() if own.get(key) != control.get(key)}
        del changed["output_dir"]
        found[arm] = changed
    assert all(key.startswith("algorithm.modulation") for arm in ("defaults", "alpha_1") for key in found[arm])
    assert [found[arm]["algorithm.modulation.alpha"] for arm in ("defaults", "alpha_1")] == [0.2, MODULATION.alpha]
    assert list(found["again"]) == ["data.source"]
    for arm, function in (("permuted", permuted), ("tilted", tilted)):
        ((key, name),) = found[arm].items()
        assert key == "algorithm.advantage.entropy_shaping"
        assert load_shaping(name).function.__code__.co_name == function.__name__
    assert len(spec.seeds) == 16 and not spec.wide()
