"""The rules that draw prompts, one decision at a time."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import DataConfig
from dynamo_megatron.config.data import SelectionConfig
from dynamo_megatron.data.selection import inclusion, open_selection, systematic

REPLICATES = 4000
ROLLOUTS = 10


def history_of(right: dict[str, int]):
    """Of prompts that were visited once: id -> right ones of ROLLOUTS rollouts."""
    allocator = RolloutAllocator({"half_life": 1e9})
    ids = [i for i in right for _ in range(ROLLOUTS)]
    success = [k < n for n in right.values() for k in range(ROLLOUTS)]
    allocator.observe(ids, np.asarray(success, float), success, step=1)
    return allocator.history


def rule(kind: str, right: dict[str, int], **options):
    config = DataConfig(source="a.jsonl", shuffle_seed=0, selection={"kind": kind, **options})
    return open_selection(config, SimpleNamespace(epoch=0, skipped=0), history_of(right))


def frequencies(one, ids: list[str], wanted: int) -> np.ndarray:
    drawn = np.zeros(len(ids))
    for seed in range(REPLICATES):
        taken = one.choose(ids, wanted, np.random.default_rng(seed)).taken
        assert len(taken) == wanted and (np.diff(taken) > 0).all()
        drawn[taken] += 1
    return drawn / REPLICATES


def far(measured: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference in standard errors of a frequency."""
    error = np.sqrt(np.maximum(expected * (1 - expected), 1e-12) / REPLICATES)
    return float(np.abs((measured - expected) / error).max())


def test_inclusion_is_in_proportion_and_never_above_one():
    np.testing.assert_allclose(inclusion(np.array([1.0, 2.0, 3.0, 4.0]), 2), [0.2, 0.4, 0.6, 0.8])
    # 3 of weights 1, 1, 2, 16: 16 would be above 1, then 2 * 2 / 4 is 1 itself
    np.testing.assert_allclose(inclusion(np.array([1.0, 1.0, 2.0, 16.0]), 3), [0.5, 0.5, 1.0, 1.0])
    np.testing.assert_allclose(inclusion(np.array([0.1, 5.0]), 2), [1.0, 1.0])


def test_systematic_draws_each_with_its_probability():
    probability = np.array([1.0, 0.05, 0.95, 0.5, 0.3, 0.2])
    taken = [systematic(probability, np.random.default_rng(seed)) for seed in range(REPLICATES)]
    assert {len(t) for t in taken} == {3}
    drawn = np.bincount(np.concatenate(taken), minlength=6) / REPLICATES
    assert drawn[0] == 1 and far(drawn[1:], probability[1:]) < 4


SEEN = {"never": 0, "rare": 1, "half": 5, "mostly": 9, "always": 10}


def stated_priorities(ids: list[str], wanted: int, exponent: float = 0.5) -> np.ndarray:
    """The prior of SEEN by hand: 25 of 50 are right, so its mean is 25.5 / 51 = .5. G = 10 for each of 5 prompts, the
    spread of k/G is .25 + .16 + 0 + .16 + .25 = .82, times 10 is 8.2; excess = 50 - 500 / 50 - 4 = 36, so that
    rho = (8.2 / .25 - 4) / 36 = .8 and the strength 1 / .8 - 1 = .25: Beta(.125, .125)."""
    rate = np.array([(0.125 + SEEN[i]) / 10.25 if i in SEEN else 0.5 for i in ids])
    weight = (rate * (1 - rate)) ** exponent + 0.05
    return wanted * weight / weight.sum()


def test_priority_draws_by_the_standard_deviation_and_a_floor():
    ids = [*SEEN, "new", "new too"]
    measured = frequencies(rule("priority", SEEN), ids, 2)
    assert far(measured, stated_priorities(ids, 2)) < 4
    assert far(measured, stated_priorities(ids, 2, exponent=1.0)) > 6  # the variance in place of its root
    assert measured[ids.index("half")] > 3 * measured[ids.index("always")]


def test_weights_are_the_uniform_probability_over_the_own():
    ids = [*SEEN, "new"]
    one = rule("priority", SEEN, weights=True)
    stated = 2 / len(ids) / stated_priorities(ids, 2)
    values = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0])
    sums = []
    for seed in range(REPLICATES):
        taken, weights = one.choose(ids, 2, np.random.default_rng(seed))
        np.testing.assert_allclose(weights, stated[taken], rtol=1e-12)
        sums.append((weights * values[taken]).mean())
    error = np.std(sums) / np.sqrt(REPLICATES)
    assert abs(np.mean(sums) - values.mean()) < 4 * error
    plain = rule("priority", SEEN).choose(ids, 2, np.random.default_rng(0))
    assert plain.weights.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["priority", "thompson"])
@pytest.mark.parametrize("right", [{}, dict.fromkeys("abcdef", 0), dict.fromkeys("abcdef", ROLLOUTS)])
def test_prompts_that_are_alike_are_drawn_alike(kind, right):
    """No history at all, none solved, all solved: uniform."""
    measured = frequencies(rule(kind, right), list("abcdef"), 2)
    assert far(measured, np.full(6, 1 / 3)) < 4


def test_thompson_draws_what_is_nearest_to_the_target():
    ids = [*SEEN, "new"]
    half = frequencies(rule("thompson", SEEN), ids, 2)
    assert half.argmax() == ids.index("half") and half[ids.index("half")] > 0.7
    assert half[ids.index("never")] < 0.05 < half[ids.index("new")]
    solved = frequencies(rule("thompson", SEEN, target=1.0), ids, 2)
    assert solved.argmax() == ids.index("always") and solved[ids.index("half")] < 0.1


def observe(one, step: int, **rewards: list[float]) -> None:
    """Groups by prompt."""
    ids = [i for i, values in rewards.items() for _ in values]
    values = np.array([r for values in rewards.values() for r in values])
    groups = [f"{step}-{i}" for i in ids]
    one.observe(step, SimpleNamespace(prompt_ids=ids, group_ids=groups, rewards=values, successes=values == 1))


def bases(one) -> list[float]:
    return [one.metrics()[f"data/draw_{kind}"] for kind in ("solved", "unsolved")]


def greso(**options):
    return rule("greso", {}, **options)


def test_greso_skips_by_the_length_of_a_streak():
    one = greso()
    for step in range(1, 4):
        observe(one, step, easy=[1, 1], hard=[0, 0], mixed=[0, 1], partial=[0.5, 0.5], alone=[1])
    # Two adjustments, of which each time 1 of 4 groups is solved and 2 are not: both more than aimed at.
    assert bases(one) == pytest.approx([0.48, 0.48])
    ids = ["easy", "hard", "partial", "mixed", "alone", "new"]
    drawn = np.zeros(len(ids))
    for seed in range(REPLICATES):
        drawn[one.choose(ids, len(ids), np.random.default_rng(seed)).taken] += 1
    expected = 0.48**3
    assert far(drawn[:3] / REPLICATES, np.full(3, expected)) < 4 and (drawn[3:] == REPLICATES).all()
    assert far(drawn[:3] / REPLICATES, np.full(3, 0.48**2)) > 10
    observe(one, 4, easy=[1, 0], hard=[1, 1])
    seeds = range(REPLICATES)
    drawn = sum(
        np.bincount(one.choose(["easy", "hard"], 2, np.random.default_rng(s)).taken, minlength=2) for s in seeds
    )
    assert drawn[0] == REPLICATES and abs(drawn[1] / REPLICATES - 0.47) < 0.04  # a streak of one, of the other kind


def test_greso_aims_at_its_share_of_equal_groups():
    """Of prompts seen before alone, once a step whatever its rounds, within the bounds."""
    one = greso(zero_variance=0.3)  # .1 solved, .2 unsolved
    observe(one, 1, a=[1, 1], b=[0, 0])
    assert bases(one) == [0.5, 0.5]
    observe(one, 2, a=[1, 1], c=[1, 1], d=[0, 0])  # of the one seen before: all solved, none unsolved
    assert bases(one) == pytest.approx([0.49, 0.51])
    observe(one, 2, b=[0, 0])  # a second round: half solved, half unsolved
    assert bases(one) == pytest.approx([0.49, 0.49])
    for step in range(3, 60):
        observe(one, step, a=[1, 1])
    assert bases(one) == pytest.approx([0.05, 0.95])


def test_greso_goes_on_from_its_state():
    one, resumed = greso(), greso()
    for step in (1, 2):
        observe(one, step, easy=[1, 1], hard=[0, 0], mixed=[0, 1])
    state = one.state_dict()
    resumed.load_state_dict(json.loads(json.dumps({**state, "streaks": state["streaks"].tolist()})))
    observe(one, 3, easy=[1, 1], hard=[1, 0])
    assert state["streaks"].tolist() == [2, -2, 0]  # a state does not change later
    observe(resumed, 3, easy=[1, 1], hard=[1, 0])
    assert resumed.metrics() == one.metrics()
    assert resumed.state_dict()["streaks"].tolist() == one.state_dict()["streaks"].tolist() == [3, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "greso", "weights": True}, "weights: no option of kind greso"),
        ({"kind": "thompson", "weights": True}, "weights: no option of kind thompson"),
        ({"kind": "greso", "candidates": 3}, "candidates: no option of kind greso; set it to 8"),
        ({"target": 0.3}, "target: no option of kind uniform; set it to 0.5"),
        ({"kind": "priority", "exploration": 0.0}, "greater than 0"),
    ],
)
def test_options_of_other_kinds_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SelectionConfig(**options)
