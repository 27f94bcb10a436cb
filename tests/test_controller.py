"""Dynamic sampling: groups that teach nothing are replaced, recorded and replayed like all others."""

import json

import numpy as np
import pytest
import yaml
from step_sampling import BATCH, Answering, Policy, batch_of, make_controller, sample

from dynamo_megatron.config.files import to_plain
from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.replay.what_if import allocator_of
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.result import RolloutError, RolloutResult, group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Rollout


def failed(step, prompts, counts, first) -> RolloutResult:
    rollouts = [
        Rollout(rollout_id(group_id(step, p), k), "g", "p", step, [], [], [], [], "error", 0.0, False, {}, "failed")
        for p, n in enumerate(counts, first)
        for k in range(n)
    ]
    return RolloutResult.from_rollouts(rollouts, 0.0, ["step 1: 32 of 32 rollouts failed; the first: x"])


@pytest.fixture
def controller(tmp_path):
    """make(prompts, rounds, rollout, selection, advantage, **proof) -> a Controller."""

    def make(prompts: int, rounds: int | None, rollout, selection="uniform", advantage: str = "rloo", **proof):
        algorithm = {"dynamic_sampling": {"rounds": rounds} if rounds else None, "advantage": {"kind": advantage}}
        return make_controller(tmp_path, prompts, rollout, algorithm, {"selection": selection}, {"proof": proof})

    return make


@pytest.mark.parametrize("prompts", [30, 5])  # of five one teaches, and is drawn four times in a step
def test_a_batch_is_filled_with_groups_that_teach(controller, tmp_path, prompts):
    live = controller(prompts, 30, Answering(RolloutStore(tmp_path)))
    replayed = controller(prompts, 30, RecordedRollouts(tmp_path, 1 << 31))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_plain(live.config)))
    for step in (1, 2):
        batch, record = batch_of(live, step)
        rollouts = batch.rollouts
        assert len(set(rollouts.group_ids)) == BATCH and {int(p[1:]) % 3 for p in rollouts.prompt_ids} == {2}
        assert len(record.allocations) > 1 and record.result.counts["requested"] == sum(
            a.counts.sum() for a in record.allocations
        )
        assert (batch.advantages != 0).all()
        rounds = [row.get("round", 0) for row in record.allocation_rows()]
        assert rounds == sorted(rounds) and rounds[:BATCH] == [0] * BATCH and rounds[-1] == len(record.allocations) - 1
        with (tmp_path / "allocation.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in record.allocation_rows())
        again, _ = batch_of(replayed, step)
        assert again.rollouts.rollout_ids == rollouts.rollout_ids
        np.testing.assert_array_equal(again.rollouts.tokens, rollouts.tokens)
        np.testing.assert_array_equal(again.weights, batch.weights)
    record = read_run(tmp_path)
    assert len(record.steps) > 2 and {step.step for step in record.steps} == {1, 2}
    counts = what_if.replay(record.steps, allocator_of(record))
    assert what_if.first_difference(record.steps, counts) is None


def test_further_rounds_choose_other_prompts_while_there_are_some(controller, tmp_path):
    live = controller(30, 30, Answering(RolloutStore(tmp_path)), {"kind": "priority", "candidates": None})
    for step in (1, 2, 3):
        rounds, seen = sample(live, step, Policy(lambda rollouts: rollouts.engine_logprobs)).rounds, set()
        for ids in ({prompt.prompt_id for prompt in now.prompts} for now in rounds):
            assert seen.isdisjoint(ids) or len(seen) + len(ids) > 30
            seen |= ids
        assert len(rounds) > 1


def test_a_batch_that_teaches_nothing_stays_whole(controller, tmp_path):
    batch, record = batch_of(controller(1, 2, Answering(RolloutStore(tmp_path))), 1)
    assert set(batch.rollouts.prompt_ids) == {"p0"} and len(record.allocations) == 3
    assert not batch.advantages.any()


def test_a_step_without_a_response_is_an_error_that_says_why(controller):
    class Silent(Answering):
        def generate(self, step, prompts, counts, on_poll, on_count, first):
            return failed(step, prompts, counts, first)

    with pytest.raises(RolloutError, match=r"none of 96 rollouts can be trained on; 32 of 32 rollouts failed"):
        batch_of(controller(30, 2, Silent(None)), 1)


def test_what_was_sampled_from_other_weights_teaches_nobody(controller, tmp_path):
    """Every third rollout has garbage logprobs: groups, allocator and rounds are as if it had not come."""

    class Garbled(Answering):
        def generate(self, *arguments):
            result = super().generate(*arguments)
            result.batch.engine_logprobs[::3] = -9.0
            return result

    class Without(Answering):
        def generate(self, *arguments):
            result = super().generate(*arguments)
            return result.without(range(0, len(result.batch.rollout_ids), 3), [])

    policy = {"logprobs": lambda rollouts: np.full(len(rollouts.engine_logprobs), -1.0, np.float32)}
    garbled, without = Garbled(RolloutStore(tmp_path / "a")), Without(RolloutStore(tmp_path / "b"))
    one, other = controller(30, 30, garbled), controller(30, 30, without)
    for step in (1, 2):
        (batch, record), (same, seen) = batch_of(one, step, **policy), batch_of(other, step, **policy)
        assert batch.rollouts.rollout_ids == same.rollouts.rollout_ids
        for name in ("advantages", "mini_batches", "weights"):
            np.testing.assert_equal(getattr(batch, name), getattr(same, name))
        assert [a.counts.tolist() for a in record.allocations] == [a.counts.tolist() for a in seen.allocations]
        counts = record.result.counts
        assert counts == seen.result.counts and counts["requested"] == counts["completed"] + counts["rejected"]
    assert set(garbled.rejected) and not without.rejected
    note = record.result.notes[0]
    assert note.startswith("step 2: 11 of 32 rollouts rejected; the first, 000002-0000-000: logprobs 1 nats from")


@pytest.mark.parametrize(
    ("share", "servers"),
    [(0.25, [""]), (0.4, [""]), (0.25, ["server-1", "server-0", "server-0"])],  # all rejected ones are server-1's
)
def test_too_many_rejected_rollouts_end_the_run(controller, tmp_path, share, servers):
    class Stale(Answering):
        def generate(self, *arguments):
            result = super().generate(*arguments)
            result.batch.weight_versions[::3] = 7  # of one token each
            result.batch.servers[:] = (32 * servers)[:32]
            return result

    made = controller(30, None, Stale(RolloutStore(tmp_path)), max_rejected_share=share)
    if (share, len(servers)) == (0.25, 1):
        said = r"step 1: 11 of 32 rollouts rejected; .*-000: sampled from weight version 7, not 0\. That is more than"
        with pytest.raises(RolloutError, match=said):
            batch_of(made, 1)
    else:
        assert batch_of(made, 1)[1].result.counts["rejected"] == 11


@pytest.mark.parametrize("rounds", [None, 2])
def test_baselines_are_those_of_the_prompts_before_their_rollouts(controller, tmp_path, rounds):
    """Every prompt's rollouts have what its earlier visits said, whatever of them is left out, in every round."""
    made = controller(12, rounds, Answering(RolloutStore(tmp_path)), advantage="history")
    policy = Policy(lambda rollouts: rollouts.engine_logprobs)
    seen: dict[str, list[float]] = {}
    strengths = []
    for step in range(1, 7):
        sampled = sample(made, step, policy)
        known = sampled.selection.baseline
        for prompt, mean, strength in zip(sampled.rollouts.prompt_ids, known.mean, known.strength, strict=True):
            before = seen.get(prompt, [])
            strengths.append(strength)
            if not before:
                assert strength in (0, 1)  # nothing at all, or the pool
            else:
                assert strength > 1 and abs(mean - np.mean(before)) < 0.1  # the kinds are 0, 0.5 and 1
        for r in sampled.rounds:
            batch = r.result.batch
            for prompt, reward in zip(batch.prompt_ids, batch.rewards, strict=True):
                seen.setdefault(prompt, []).append(reward)
        assert len(known.mean) == len(sampled.rollouts.rewards)
    assert max(strengths) > 8 and min(strengths) == 0
