"""Steps whose rounds look at their own outcomes: sampled, recorded, replayed, killed and resumed."""

import json
from collections import Counter

import numpy as np
import pytest
import yaml
from step_sampling import BATCH, Answering, Policy, batch_of, make_controller, sample

from dynamo_megatron.config.files import to_plain
from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.replay.what_if import allocator_of
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.store import RolloutStore

PILOT = {"kind": "pilot", "round_n": 4, "lower": 0.25}
ADA = {"kind": "reinforce_ada", "round_n": 4}
PLAIN = Policy(lambda rollouts: rollouts.engine_logprobs)


def algorithm(sequential: dict, advantage: str = "rloo") -> dict:
    allocation = {"kind": "uniform", "budget": 40, "rollout_n_max": 12}
    return {"allocation": allocation, "sequential": sequential, "advantage": {"kind": advantage}}


def kinds(prompt_ids) -> set[int]:
    """0: always solved, 1: never, 2: every other time."""
    return {int(p[1:]) % 3 for p in prompt_ids}


def test_a_pilots_budget_goes_to_the_prompts_that_are_sometimes_solved(tmp_path):
    """Each of these gets up to 8 more of the 24 that are left, and all of its rollouts are one group."""
    live = make_controller(tmp_path, 30, Answering(RolloutStore(tmp_path)), algorithm(PILOT))
    for step in (1, 2, 3):
        batch, record = batch_of(live, step)
        first, second = (a.counts.tolist() for a in record.allocations)
        mixed = [p for p in record.allocations[0].prompt_ids if kinds([p]) == {2}]
        more = min(8, 24 // len(mixed))
        assert first == [4] * BATCH and record.allocations[1].prompt_ids == mixed and second == [more] * len(mixed)
        assert record.result.counts["requested"] == 16 + more * len(mixed)
        drawn, known = record.drawn()
        ids = record.allocations[0].prompt_ids
        assert drawn.tolist() == [4 + more * (p in mixed) for p in ids] and not known.any()
        rollouts, n = batch.rollouts, 4 + more
        assert Counter(rollouts.prompt_ids) == dict.fromkeys(mixed, n)
        assert len(set(rollouts.group_ids)) == len(mixed)
        advantage = n / 2 / (n - 1)
        np.testing.assert_allclose(batch.advantages, np.where(rollouts.successes, advantage, -advantage), rtol=1e-12)
        np.testing.assert_allclose(batch.weights, 1 / (len(mixed) * n * 4), rtol=1e-12)  # prompt_mean, 4 new tokens
        assert [row.get("round", 0) for row in record.allocation_rows()] == [0] * BATCH + [1] * len(mixed)


def test_what_is_left_out_is_in_the_baseline(tmp_path):
    """Every fourth is right: 3 of 12, of which 2 and 2 wrong ones are kept."""

    class Seldom(Answering):
        def generate(self, step, prompts, counts, on_poll, on_count, first):
            result = super().generate(step, prompts, counts, on_poll, on_count, first)
            result.batch.rewards[:] = result.batch.successes[:] = np.arange(len(result.batch.rewards)) % 4 == 3
            return result

    live = make_controller(tmp_path, 30, Seldom(RolloutStore(tmp_path)), algorithm(ADA))
    batch, record = batch_of(live, 1)
    assert len(record.allocations) == 2, "two rounds have two right ones of each"
    np.testing.assert_allclose(batch.advantages, np.where(batch.rollouts.successes, 6 / 7, -2 / 7), rtol=1e-12)


@pytest.mark.parametrize("sequential", [PILOT, ADA])
def test_a_recorded_run_repeats_its_rounds(tmp_path, sequential):
    method = algorithm(sequential)
    live = make_controller(tmp_path, 5, Answering(RolloutStore(tmp_path)), method)  # every prompt comes again
    recorded = RecordedRollouts(tmp_path, 1 << 31)
    replayed = make_controller(tmp_path, 5, recorded, method)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_plain(live.config)))
    for step in (1, 2, 3):
        (batch, record), (again, _) = batch_of(live, step), batch_of(replayed, step)
        assert again.rollouts.rollout_ids == batch.rollouts.rollout_ids
        assert again.rollouts.group_ids == batch.rollouts.group_ids
        for name in ("advantages", "weights", "mini_batches"):
            np.testing.assert_equal(getattr(again, name), getattr(batch, name))
        with (tmp_path / "allocation.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in record.allocation_rows())
    record = read_run(tmp_path)
    assert sorted({step.step for step in record.steps}) == [1, 2, 3] and len(record.steps) > 3
    assert what_if.first_difference(record.steps, what_if.replay(record.steps, allocator_of(record))) is None


def test_a_prompts_history_is_from_before_the_step(tmp_path):
    """All rounds of a prompt have the baseline of the first one."""
    live = make_controller(tmp_path, 300, Answering(RolloutStore(tmp_path)), algorithm(PILOT, advantage="history"))
    sampled = sample(live, 1, PLAIN)
    known, first = sampled.selection.baseline, len(sampled.rounds[0].result.batch.rollout_ids)
    assert (sampled.selection.rows >= first).any() and not known.strength.any(), "nothing was known of any prompt"
