"""Rounds that are dispatched before their step: by whom, in which order, and after a resume."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from step_sampling import Answering, Policy, make_controller, sample

from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.rounds import check_savable
from dynamo_megatron.types import Prompt

STEPS = 8


class Ahead(Answering):
    """Answers at `collect`; `dispatched`: (step, prompts, counts) in the order in which they came."""

    def __init__(self, store: RolloutStore):
        super().__init__(store)
        self.dispatched: list[tuple[int, list[str], list[int]]] = []

    def dispatch(self, step, prompts, counts, on_poll, first=0):
        self.dispatched.append((step, [p.prompt_id for p in prompts], list(counts)))
        super().dispatch(step, prompts, counts, on_poll, first)


def run(folder, staleness: int, steps: range, states=None, kind: str = "history"):
    """(what was dispatched, ids by step, the controller's states after the last of `steps`)."""
    rollout = Ahead(RolloutStore(folder))
    method = {"advantage": {"kind": kind}, "modulation": None, "loss": {"old": "engine"}}
    sampling = {"max_staleness": staleness, "proof": {"max_mean_gap": None}}
    controller = make_controller(folder, 12, rollout, method, {}, sampling if staleness else {})
    parts = [controller._prompts.stream, controller._allocator.history, controller.ahead]
    for part, state in zip(parts, states or [], strict=False):
        part.load_state_dict(state)
    ids = {}
    for step in steps:
        sampled = sample(controller, step, Policy(lambda rollouts: rollouts.engine_logprobs))
        record = controller.record(step, sampled.rounds)
        baselines = sampled.selection.baseline.mean.tolist()
        ids[step] = sampled.rollouts.prompt_ids, baselines, record.drawing["data/epoch"], record.version
    return rollout.dispatched, ids, [part.state_dict() for part in parts]


@pytest.mark.parametrize("staleness", [1, 3])
def test_steps_are_dispatched_in_order_and_as_early_as_the_bound_allows(tmp_path, staleness):
    dispatched, ids, _ = run(tmp_path, staleness, range(1, STEPS + 1))
    assert [step for step, *_ in dispatched] == list(range(1, STEPS + 1 + staleness))
    assert [version for *_, version in ids.values()] == [max(0, step - 1 - staleness) for step in ids]
    together, alone = (
        [(epoch, *dict.fromkeys(i)) for i, _, epoch, _ in run(tmp_path / n, k, range(1, STEPS + 1))[1].values()]
        for n, k in (("a", staleness), ("b", 0))
    )
    assert together == alone, "the prompts, and what is told of them, are those of the synchronous loop"
    assert alone[-1][0] > 0, "one epoch would not show whose epoch it is"


def test_a_resumed_run_dispatches_what_was_under_way_again(tmp_path):
    whole = run(tmp_path / "whole", 2, range(1, STEPS + 1))
    _, first, states = run(tmp_path / "first", 2, range(1, 5))
    states = json.loads(json.dumps(states, default=np.ndarray.tolist))
    dispatched, second, _ = run(tmp_path / "second", 2, range(5, STEPS + 1), states)
    assert first | second == whole[1]
    assert dispatched == whole[0][4:]


@pytest.mark.parametrize("value", [{1, 2}, b"PNG", "\ud800", np.arange(2)])
def test_a_prompt_that_a_checkpoint_cannot_hold_is_refused_as_it_is_read(value):
    config = SimpleNamespace(rollout=SimpleNamespace(max_staleness=1))
    with pytest.raises(InputError, match=r"the answer or the other columns of prompt 'p' \(a.parquet row 7\) are not"):
        check_savable(Prompt("p", text="", meta={"image": value}, where="a.parquet row 7"), config)
