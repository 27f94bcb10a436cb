"""Rules that look at a step's outcomes, by hand: who gets a next round, and what is trained on."""

import numpy as np
import pytest
from pydantic import ValidationError

from dynamo_megatron.algorithm.advantages import history_advantages
from dynamo_megatron.algorithm.sequential import Outcomes, SequentialRule
from dynamo_megatron.algorithm.success import Baseline
from dynamo_megatron.config import Config
from dynamo_megatron.config.method import SequentialConfig


def seen(*rounds: list[str], asked: list[int] | None = None) -> Outcomes:
    """Each round: "1101" a prompt, "" where it has no rollout in this round."""
    parts = [(p, mark == "1") for texts in rounds for p, text in enumerate(texts) for mark in text]
    prompt, success = (np.array(x) for x in zip(*parts, strict=True))
    came = np.bincount(prompt, minlength=len(rounds[0]))
    return Outcomes(came if asked is None else np.array(asked), len(rounds), prompt, success)


def rule(budget: int, low: int, high: int, **config) -> SequentialRule:
    return SequentialRule(SequentialConfig(**config), budget, low, high)


def after(rule: SequentialRule, outcomes: Outcomes) -> tuple[list[int], int] | None:
    """(prompts, budget) of the next round."""
    found = rule.next_round(outcomes)
    return found and (found.prompts.tolist(), found.budget)


def test_a_pilot_commits_to_middling_prompts():
    """Published thresholds: at least 1/8 right, at least 1/4 wrong."""
    pilot = rule(64, 2, 24, kind="pilot", round_n=8)
    first = seen(["00000000", "10000000", "11110000", "11111100", "11111110", "11111111"])
    assert after(pilot, first) == ([1, 2, 3], 64 - 48)
    second = seen(["00000000", "10000000", "11110000", "11111100"], ["", "10", "01", "11"])
    assert after(pilot, second) is None
    assert np.bincount(second.prompt[pilot.trained(second)], minlength=4).tolist() == [0, 10, 10, 10]


def test_a_pilot_keeps_to_its_budget_and_bounds():
    first = seen(["1010", "1100", "0011"])
    assert after(rule(100, 2, 16, kind="pilot", round_n=4), first) == ([0, 1, 2], 36), "at most 16 a prompt"
    assert after(rule(17, 2, 16, kind="pilot", round_n=4), first) == ([0, 1], 5), "at least 2 a prompt"
    assert after(rule(13, 2, 16, kind="pilot", round_n=4), first) is None, "one rollout is no second round"


def test_rollouts_that_did_not_come_say_nothing():
    pilot = rule(64, 2, 24, kind="pilot", round_n=4)
    first = seen(["", "10", "1"], asked=[4, 4, 4])  # 1 of 2 right; of the others nothing is right and wrong
    assert after(pilot, first) == ([1], 20)


def test_a_pilot_without_a_middling_prompt_trains_on_what_there_is():
    pilot, first = rule(64, 2, 24, kind="pilot", round_n=4), seen(["0000", "1111"])
    assert after(pilot, first) is None and pilot.trained(first).tolist() == list(range(8))


def test_rounds_go_on_until_a_prompt_has_a_signal():
    ada = rule(1, 2, 12, kind="reinforce_ada", round_n=4)
    first = seen(["0000", "1000", "1100", "1110", "0101", ""], asked=[4] * 6)
    assert after(ada, first) == ([0, 1, 3, 5], 16)
    second = seen(["0000", "1000", "1100"], ["0000", "1000", ""])
    assert after(ada, second) == ([0], 4), "two right and six wrong ones are a signal"
    third = seen(["0000", "1000"], ["0000", "1000"], ["0000", ""])
    assert after(ada, third) is None, "12 are the most"


def test_half_of_what_is_kept_is_right_where_there_are_so_many():
    ada = rule(1, 2, 8, kind="reinforce_ada", round_n=4)
    both = seen(["0001", "0111", "0000", "1111", "10"], ["0110", "0000", "0000", "", ""], asked=[8, 8, 8, 4, 4])
    rows = ada.trained(both)
    kept = {p: [] for p in range(5)}
    for row in rows:
        own = np.flatnonzero(both.prompt == both.prompt[row])
        kept[int(both.prompt[row])].append(int(np.flatnonzero(own == row)[0]))
    assert kept[0] == [0, 1, 3, 5], "the first two right and the first two wrong ones, whatever the round"
    assert kept[1] == [0, 1, 2, 4]
    assert kept[2] == [0, 1, 2, 3] == kept[3], "of one kind alone the first four"
    assert kept[4] == [0, 1]


def test_rollouts_that_are_left_out_stay_in_the_baseline():
    """3 of 8 right, 2 of them and 2 wrong ones kept: a right one is compared with 2 of 7 others, a wrong one with 3."""
    known = Baseline(np.zeros(1), np.zeros(1)).with_rollouts(np.array([1.0]), np.array([4]))
    assert (known.mean[0], known.strength[0]) == (0.25, 4)
    advantages = history_advantages([1.0, 1.0, 0.0, 0.0], ["g"] * 4, [known.mean[0]] * 4, [known.strength[0]] * 4)
    np.testing.assert_allclose(advantages, [5 / 7, 5 / 7, -3 / 7, -3 / 7], rtol=1e-12)
    nothing = Baseline(np.zeros(1), np.zeros(1)).with_rollouts(np.zeros(1), np.zeros(1, int))
    assert (nothing.mean[0], nothing.strength[0]) == (0, 0)


def config(sequential: dict, **algorithm) -> Config:
    tree = {"allocation": {"kind": "uniform", "budget": 40}, "sequential": sequential} | algorithm
    return Config(model={"path": "m"}, data={"source": "s", "batch_prompts": 4}, output_dir="o", algorithm=tree)


PILOT, ADA = {"kind": "pilot", "round_n": 4}, {"kind": "reinforce_ada", "round_n": 8}


@pytest.mark.parametrize(
    ("sequential", "algorithm", "said"),
    [
        (PILOT | {"keep": 8}, {}, "keep: no option of kind pilot; set it to 4"),
        (PILOT | {"lower": 0.6, "upper": 0.5}, {}, "more than 1"),
        (PILOT | {"round_n": 23}, {}, "round_n: 23 leaves no second round"),
        (PILOT | {"round_n": 10}, {}, "leave 0 of the budget of 40; give allocation.budget 42 or more"),
        (ADA | {"round_n": 7}, {}, "round_n: 7 does not divide allocation.rollout_n_max, 24"),
        (PILOT, {"dynamic_sampling": {}}, "does not go with algorithm.dynamic_sampling"),
        (
            PILOT,
            {"allocation": {"kind": "neyman", "budget": 40}},
            "set algorithm.allocation.kind to uniform, not neyman",
        ),
        (ADA, {"advantage": {"kind": "grpo"}}, "reinforce_ada needs a baseline of other rollouts"),
        (ADA, {"advantage": {"kind": "rloo", "overlong_buffer": 0.2}}, "advantage.overlong_buffer: reinforce_ada has"),
    ],
)
def test_what_does_not_fit_is_refused(sequential, algorithm, said):
    with pytest.raises(ValidationError, match=said):
        config(sequential, **algorithm)
