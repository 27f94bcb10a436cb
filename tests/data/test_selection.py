"""Drawing a step's prompts from a stream."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import DataConfig
from dynamo_megatron.data import PromptStream, open_stream
from dynamo_megatron.data.selection import open_selection
from dynamo_megatron.types import Prompt

KINDS = ("priority", "thompson", "greso")
FIVE = """
def five():
    return ({"id": n, "problem": f"{n}+1?", "answer": "1"} for n in range(5))
"""


class Run:
    """Draws and observes as a training run does; prompt "p<i>" is solved i of 12 times."""

    def __init__(self, selection, size: int = 12, long=(), stream=None):
        items = [Prompt(f"p{i}", text="x" * (50 if i in long else 5)) for i in range(size)]
        config = DataConfig(source="a.jsonl", shuffle_seed=0, selection=selection)
        self.stream = stream or PromptStream(items, config, lambda p: [1] * len(p.text), 10)
        self.allocator = RolloutAllocator({})
        self.selection = open_selection(config, self.stream, self.allocator.history)

    def draw(self, step: int, wanted: int, round_: int = 0) -> list[Prompt]:
        return self.selection.draw(step, round_, wanted, lambda: None)

    def step(self, step: int, wanted: int) -> list[str]:
        drawn = [prompt.prompt_id for prompt in self.draw(step, wanted)]
        ids = [i for i in drawn for _ in range(4)]
        rng = np.random.default_rng(step)
        right = np.array([rng.random() < int(i[1:]) / 12 for i in ids])
        groups = [f"{step}-{position}" for position in range(len(drawn)) for _ in range(4)]
        self.allocator.observe(ids, right.astype(float), right, step)
        rollouts = SimpleNamespace(prompt_ids=ids, group_ids=groups, rewards=right.astype(float), successes=right)
        self.selection.observe(step, rollouts)
        return drawn

    def parts(self) -> list:
        return [self.stream, self.allocator, self.selection]


def plain(state: dict) -> dict:
    return json.loads(json.dumps(state, default=np.ndarray.tolist))


@pytest.mark.parametrize("kind", ["priority", "thompson"])  # greso draws in the stream's order
def test_prompts_under_way_are_not_drawn_again_while_there_are_others(kind):
    def drawn(step: int, under_way: set[str], **options) -> set[str]:
        run = Run({"kind": kind, "candidates": None, **options})
        return {p.prompt_id for p in run.selection.draw(step, 0, 4, lambda: None, under_way)}

    for step in range(1, 6):
        assert drawn(step, {f"p{i}" for i in range(8)}) == {f"p{i}" for i in range(8, 12)}
        assert len(drawn(step, {f"p{i}" for i in range(9)})) == 4
        if kind == "priority":
            assert drawn(step, {f"p{i}" for i in range(8)}, weights=True) == drawn(step, set(), weights=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_distinct_prompts_that_fit(kind):
    few = {} if kind == "greso" else {"candidates": 2}  # so that those of a step span two epochs
    run = Run({"kind": kind, **few}, long=[3, 4])
    for step in range(1, 30):
        drawn = run.draw(step, 3)
        assert all(len(p.tokens) == 5 and p.weight == 1 for p in drawn)
        ids = run.step(step + 100, 3)
        assert len(ids) == 3 and not {"p3", "p4"} & set(ids)
        if kind != "greso":  # there a batch may span two epochs, as without a rule
            assert len(set(ids)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_draws_the_same(kind):
    straight = Run(kind)
    for step in range(1, 20):
        straight.step(step, 3)
    states = [plain(part.state_dict()) for part in straight.parts()]
    resumed, amnesiac = Run(kind), Run(kind)
    for part, other, state in zip(resumed.parts(), amnesiac.parts(), states, strict=True):
        part.load_state_dict(state)
        if other is amnesiac.stream:
            other.load_state_dict(state)
    later = [straight.step(step, 3) for step in range(20, 40)]
    assert [resumed.step(step, 3) for step in range(20, 40)] == later
    assert [amnesiac.step(step, 3) for step in range(20, 40)] != later  # it goes by what was seen


@pytest.mark.parametrize("kind", ["priority", "thompson"])
def test_a_pool_smaller_than_the_batch_is_drawn_as_without_a_rule(kind):
    run, alone = Run(kind, size=3), Run("uniform", size=3).stream
    for step in range(1, 20):
        assert run.step(step, 7) == [p.prompt_id for p in alone.next(7)]


@pytest.mark.parametrize(("candidates", "looked_at"), [(1, 2), (3, 6), (50, 12), (None, 12)])
def test_candidates(candidates, looked_at):
    run = Run({"kind": "priority", "candidates": candidates})
    run.draw(1, 2)
    assert run.selection.metrics()["data/candidates"] == looked_at


@pytest.mark.parametrize("kind", KINDS)
def test_problems_of_a_function(tmp_path, monkeypatch, kind):
    (tmp_path / f"five_{kind}.py").write_text(FIVE)
    monkeypatch.chdir(tmp_path)
    config = DataConfig(source=f"five_{kind}:five", shuffle_seed=0, batch_prompts=2, selection=kind)
    stream = open_stream(config, lambda p: [1], None)
    run = open_selection(config, stream, RolloutAllocator({}).history)
    drawn = Counter(p.prompt_id for step in range(1, 100) for p in run.draw(step, 0, 2, lambda: None))
    assert len(drawn) == 5 and min(drawn.values()) > 20
    with pytest.raises(ValueError, match="candidates: null needs all problems at the start"):
        DataConfig(source="five:five", selection={"kind": "thompson", "candidates": None})
