"""Dynamic sampling: groups that teach nothing are replaced, recorded and replayed like all others."""

import json

import numpy as np
import pytest
import yaml

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.dynamic_sampling import informative
from dynamo_megatron.collection import Collector
from dynamo_megatron.config import Config
from dynamo_megatron.config_files import to_plain
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.records import Prompt, Rollout
from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.allocators import base_allocator
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.result import PushNeeded, RolloutError, RolloutResult, group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.tracking.journal import Journal

BATCH = 4


class Answering:
    """Answers as a server would: prompt "p<i>" is always solved (i % 3 == 0), never (1), or every other time (2)."""

    def __init__(self, store: RolloutStore):
        self.store = store

    def generate(self, step, prompts, counts, on_poll, on_count, first):
        rollouts = []
        for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first):
            group, kind = group_id(step, position), int(prompt.prompt_id[1:]) % 3
            for k in range(n):
                right = kind == 0 or (kind == 2 and k % 2 == 0)
                rollouts.append(
                    Rollout(
                        rollout_id=rollout_id(group, k),
                        group_id=group,
                        prompt_id=prompt.prompt_id,
                        step=step,
                        tokens=[*prompt.tokens, k],
                        response_mask=[0] * len(prompt.tokens) + [1],
                        engine_logprobs=[-1.0],
                        weight_versions=[(step - 1, 0, 1)],
                        finish_reason="stop",
                        reward=float(right),
                        success=right,
                        reward_parts={},
                    )
                )
                self.store.append(rollouts[-1])
        return RolloutResult.of(rollouts, times={"generate": 1.0}, notes=[])


def failed(step, prompts, counts, first) -> RolloutResult:
    rollouts = [
        Rollout(
            rollout_id(group_id(step, position), k),
            "g",
            prompt.prompt_id,
            step,
            [],
            [],
            [],
            [],
            "error",
            0.0,
            False,
            {},
            status="failed",
        )
        for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first)
        for k in range(n)
    ]
    return RolloutResult.of(rollouts, times={}, notes=["step 1: 32 of 32 rollouts failed; the first: x"])


@pytest.fixture
def collector(tmp_path):
    """make(prompts, rounds, rollout) -> (Collector, its config)."""

    def make(prompts: int, rounds: int | None, rollout):
        config = Config(
            model={"path": "none"},
            data={"source": "none", "batch_prompts": BATCH},
            rollout={"max_new_tokens": 4},
            algorithm={"dynamic_sampling": {"rounds": rounds} if rounds else None},
            output_dir=str(tmp_path),
        )
        items = [Prompt(f"p{i}", text=f"p{i}") for i in range(prompts)]
        stream = PromptStream(items, config.data, lambda p: [1, int(p.prompt_id[1:])], None)
        return Collector(
            config, stream, RolloutAllocator(config.algorithm.allocation), rollout, Journal(config)
        ), config

    return make


def test_informative():
    rewards, groups = [1, 1, 0.5, 0.5, 0.5, 1, 0], ["a", "a", "b", "b", "b", "c", "d"]
    assert not informative(rewards, groups).any()
    assert informative([1, 1, 0.5, 0.5, 0.4, 1, 0], groups).tolist() == [False, False, True, True, True, False, False]


@pytest.mark.parametrize("prompts", [30, 5])  # of five one teaches, and is drawn four times in a step
def test_a_batch_is_filled_with_groups_that_teach(collector, tmp_path, prompts):
    live, config = collector(prompts, 30, Answering(RolloutStore(tmp_path)))
    replayed, _ = collector(prompts, 30, RecordedRollouts(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    for step in (1, 2):
        batch, collected = live.collect(step, lambda: None)
        rollouts = batch.rollouts
        assert len(set(rollouts.group_ids)) == BATCH and {int(p[1:]) % 3 for p in rollouts.prompt_ids} == {2}
        assert len(collected.allocations) > 1 and collected.result.counts["requested"] == collected.counts.sum()
        assert (batch.advantages != 0).all()
        rounds = [row.get("round", 0) for row in collected.allocation_rows()]
        assert (
            rounds == sorted(rounds) and rounds[:BATCH] == [0] * BATCH and rounds[-1] == len(collected.allocations) - 1
        )
        with (tmp_path / "allocation.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in collected.allocation_rows())
        again, _ = replayed.collect(step, lambda: None)
        assert again.rollouts.rollout_ids == rollouts.rollout_ids
        np.testing.assert_array_equal(again.rollouts.tokens, rollouts.tokens)
        np.testing.assert_array_equal(again.weights, batch.weights)
    record = read_run(tmp_path)
    assert len(record.steps) > 2 and record.step_numbers.tolist() == [1, 2] and set(record.step_index) == {0, 1}
    counts = what_if.replay(record.steps, base_allocator(record))
    assert what_if.first_difference(record.steps, counts) is None


@pytest.mark.parametrize(("rounds", "prompts"), [(None, BATCH), (1, 2 * BATCH)])
def test_rounds_are_bounded(collector, tmp_path, rounds, prompts):
    """One round of replacement at most; without dynamic sampling nothing is left out."""
    batch, collected = collector(300, rounds, Answering(RolloutStore(tmp_path)))[0].collect(1, lambda: None)
    assert len(collected.counts) <= prompts
    teaching = {p for p in collected.result.batch.prompt_ids if int(p[1:]) % 3 == 2}
    sampled = set(collected.result.batch.prompt_ids)
    assert set(batch.rollouts.prompt_ids) == (teaching if rounds else sampled)
    assert 0 < len(teaching) < BATCH < len(sampled) + (rounds is None)


def test_a_batch_that_teaches_nothing_stays_whole(collector, tmp_path):
    batch, collected = collector(1, 2, Answering(RolloutStore(tmp_path)))[0].collect(1, lambda: None)
    assert set(batch.rollouts.prompt_ids) == {"p0"} and len(collected.allocations) == 3
    assert not batch.advantages.any()


def test_a_later_round_without_a_response_costs_its_groups_alone(collector, tmp_path):
    class Failing(Answering):
        def generate(self, step, prompts, counts, on_poll, on_count, first):
            result = super().generate(step, prompts, counts, on_poll, on_count, first)
            return result if first == 0 else failed(step, prompts, counts, first)

    batch, collected = collector(300, 2, Failing(RolloutStore(tmp_path)))[0].collect(1, lambda: None)
    assert len(collected.allocations) == 3 and 0 < len(set(batch.rollouts.group_ids)) < BATCH


def test_a_step_without_a_response_is_an_error_that_says_why(collector):
    class Silent:
        def generate(self, step, prompts, counts, on_poll, on_count, first):
            return failed(step, prompts, counts, first)

    with pytest.raises(RolloutError, match=r"none of 96 rollouts can be trained on; 32 of 32 rollouts failed"):
        collector(30, 2, Silent())[0].collect(1, lambda: None)


def test_a_step_goes_on_after_a_push_with_the_prompts_it_had(collector, tmp_path):
    """The servers are lost in the first round and again in the second one."""

    class Losing(Answering):
        asked = 0

        def generate(self, step, prompts, counts, on_poll, on_count, first):
            self.asked += 1
            if self.asked in (1, 3):
                raise PushNeeded("server-0: signal 9")
            return super().generate(step, prompts, counts, on_poll, on_count, first)

    def collect(rollout) -> tuple:
        collecting, lost = collector(300, 1, rollout)[0], 0
        while True:
            try:
                return *collecting.collect(1, lambda: None), collecting.collect(2, lambda: None)[1], lost
            except PushNeeded:
                lost += 1

    batch, collected, after, lost = collect(Losing(RolloutStore(tmp_path)))
    plain, steady, after_steady, _ = collect(Answering(RolloutStore(tmp_path)))
    assert lost == 2 and len(collected.allocations) == 2
    assert list(collected.result.outcomes) == list(steady.result.outcomes)
    np.testing.assert_array_equal(batch.rollouts.tokens, plain.rollouts.tokens)
    assert after.result.batch.prompt_ids == after_steady.result.batch.prompt_ids
