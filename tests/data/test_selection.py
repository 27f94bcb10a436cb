"""Drawing a step's prompts from a stream."""

import json

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import DataConfig
from dynamo_megatron.config.data import SelectionConfig
from dynamo_megatron.data.selection import PromptSelection
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.types import Prompt

REPLICATES = 8000
ROLLOUTS = 10
SEEN = {"never": 0, "rare": 1, "half": 5, "mostly": 9, "always": 10}  # right ones of ROLLOUTS rollouts


class Run:
    """Draws and observes as a training run does; prompt "p<i>" is solved i of 12 times."""

    def __init__(self, selection, size: int = 12, long=()):
        items = [Prompt(f"p{i}", text="x" * (50 if i in long else 5)) for i in range(size)]
        config = DataConfig(source="a.jsonl", shuffle_seed=0, selection=selection)
        self.stream = PromptStream(items, config, lambda p: [1] * len(p.text), 10)
        self.allocator = RolloutAllocator({"half_life": 1e9})
        self.selection = PromptSelection(config, self.stream, self.allocator.history)

    def step(self, step: int, wanted: int) -> list[str]:
        drawn = [prompt.prompt_id for prompt in self.selection.draw(step, 0, wanted)]
        rng = np.random.default_rng(step)
        self.observe({i: int(rng.binomial(ROLLOUTS, int(i[1:]) / 12)) for i in drawn}, step)
        return drawn

    def observe(self, right: dict[str, int], step: int = 1) -> None:
        success = np.array([k < n for n in right.values() for k in range(ROLLOUTS)])
        self.allocator.observe([i for i in right for _ in range(ROLLOUTS)], success.astype(float), success, step)


def far(measured: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference in standard errors of a frequency."""
    error = np.sqrt(np.maximum(expected * (1 - expected), 1e-12) / REPLICATES)
    return float(np.abs((measured - expected) / error).max())


def stated_priorities(ids: list[str], exponent: float = 0.5) -> np.ndarray:
    """The prior of SEEN by hand: 25 of 50 are right, so its mean is 25.5 / 51 = .5. G = 10 for each of 5 prompts, the
    spread of k/G is .25 + .16 + 0 + .16 + .25 = .82, times 10 is 8.2; excess = 50 - 500 / 50 - 4 = 36, so that
    rho = (8.2 / .25 - 4) / 36 = .8 and the strength 1 / .8 - 1 = .25: Beta(.125, .125)."""
    rate = np.array([(0.125 + SEEN[i]) / 10.25 if i in SEEN else 0.5 for i in ids])
    weight = (rate * (1 - rate)) ** exponent + 0.05
    return weight / weight.sum()


def test_priority_draws_by_the_standard_deviation_and_a_floor():
    ids = [*SEEN, "new", "new too"]
    run, drawn = Run("priority"), np.zeros(len(ids))
    run.observe(SEEN)
    for seed in range(REPLICATES):
        drawn[run.selection.choose(ids, 1, np.random.default_rng(seed))] += 1
    measured = drawn / REPLICATES
    assert far(measured, stated_priorities(ids)) < 4
    assert far(measured, stated_priorities(ids, exponent=1.0)) > 6  # the variance in place of its root


def test_prompts_under_way_are_not_drawn_again_while_there_are_others():
    def drawn(step: int, under_way: set[str]) -> set[str]:
        run = Run({"kind": "priority", "candidates": None})
        return {p.prompt_id for p in run.selection.draw(step, 0, 4, under_way)}

    for step in range(1, 6):
        assert drawn(step, {f"p{i}" for i in range(8)}) == {f"p{i}" for i in range(8, 12)}
        assert len(drawn(step, {f"p{i}" for i in range(9)})) == 4


def test_a_batch_is_distinct_prompts_that_fit():
    run = Run({"kind": "priority", "candidates": 2}, long=[3, 4])  # so that those of a step span two epochs
    for step in range(1, 30):
        drawn = run.selection.draw(step, 0, 3)
        assert all(len(p.tokens) == 5 for p in drawn) and len({p.prompt_id for p in drawn}) == 3


def test_a_resumed_run_draws_the_same():
    straight, resumed, amnesiac = (Run("priority") for _ in range(3))
    for step in range(1, 20):
        straight.step(step, 3)
    states = [json.loads(json.dumps(part.state_dict())) for part in (straight.stream, straight.allocator)]
    for part, state in zip((resumed.stream, resumed.allocator), states, strict=True):
        part.load_state_dict(state)
    amnesiac.stream.load_state_dict(states[0])
    later = [straight.step(step, 3) for step in range(20, 40)]
    assert [resumed.step(step, 3) for step in range(20, 40)] == later
    assert [amnesiac.step(step, 3) for step in range(20, 40)] != later  # it goes by what was seen


def test_a_pool_smaller_than_the_batch_is_drawn_as_without_a_rule():
    run, alone = Run("priority", size=3), Run("uniform", size=3).stream
    for step in range(1, 20):
        drawn = sorted(run.step(step, 7))
        assert drawn == sorted(p.prompt_id for p in alone.next(7))


@pytest.mark.parametrize(("candidates", "drawn"), [(1, 2), (3, 6), (50, 12), (None, 12)])
def test_candidates(candidates, drawn):
    run = Run({"kind": "priority", "candidates": candidates})
    run.selection.draw(1, 0, 2)
    assert run.stream.state_dict()["taken"] == drawn


def test_options_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match="candidates: no option of kind uniform; set it to 8"):
        SelectionConfig(candidates=3)
