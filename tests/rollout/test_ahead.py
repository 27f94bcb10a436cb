"""Rollouts of later steps are generated while the ranks train, and every token is of the weights that it names."""

import numpy as np
import pytest
from engine_stand_in import COUNTS, FIRST, PROMPTS, VERSIONS, Engine, length, run_steps

from dynamo_megatron.rollout.store import RolloutStore, read_lines, read_rollouts, step_file
from dynamo_megatron.types import Rollout


def names(step: int) -> list[str]:
    return [f"{step:06d}-{i:04d}-{k:03d}" for i, n in enumerate(COUNTS) for k in range(n)]


def check_tokens(batch) -> None:
    np.testing.assert_array_equal(batch.tokens[response_of(batch)] - FIRST, batch.weight_versions % VERSIONS)


def response_of(batch) -> np.ndarray:
    """bool, of each token."""
    pairs = zip(batch.prompt_lengths, batch.response_lengths, strict=True)
    return np.concatenate([np.arange(p + r) >= p for p, r in pairs])


@pytest.mark.parametrize(("staleness", "at_sync"), [(1, "drain"), (3, "partial")])
def test_every_token_is_of_the_weights_it_names_and_none_is_too_old(with_generator, tmp_path, staleness, at_sync):
    engines = [Engine(length, 0.004), Engine(length, 0.009)]
    options = {"max_staleness": staleness, "at_sync": at_sync, "max_new_tokens": 40, "concurrency": 5}
    results = with_generator(run_steps(engines, 6, staleness), *engines, **options)
    oldest, mixed = [], 0
    for step, result in results.items():
        batch = result.batch
        result.check_accounts(sum(COUNTS))
        assert batch.rollout_ids == names(step)
        assert batch.response_lengths.tolist() == [length(p.tokens) for p in PROMPTS for _ in range(2)]
        check_tokens(batch)
        assert (batch.weight_versions < step).all() and (batch.weight_versions >= step - 1 - staleness).all()
        oldest.append(step - 1 - batch.weight_versions.min())
        starts = np.cumsum(batch.response_lengths) - batch.response_lengths
        newest, least = (f.reduceat(batch.weight_versions, starts) for f in (np.maximum, np.minimum))
        mixed += (newest > least).sum()
        stored = {r.rollout_id: r for r in read_rollouts(step_file(tmp_path, step))}
        assert sorted(stored) == names(step)
        for rollout in stored.values():
            spans = [FIRST + version for version, start, end in rollout.weight_versions for _ in range(start, end)]
            assert rollout.tokens[2:] == spans
    assert max(oldest) > 0, "nothing was sampled ahead"
    assert (mixed > 0) == (at_sync == "partial")


def test_servers_are_asked_for_a_step_once_those_before_it_have_been_asked_for(with_generator):
    engine = Engine(lambda prompt: 20, 0.002)

    async def work(generator, push):
        for step in (1, 2, 3):
            await generator.dispatch(step, PROMPTS, COUNTS)
        for step in (1, 2, 3):
            (await generator.collect(step)).check_accounts(sum(COUNTS))

    with_generator(work, engine, max_staleness=2, max_new_tokens=40, concurrency=2)
    steps = [name[:6] for name in engine.asked]
    assert steps == sorted(steps) and len(steps) == 3 * sum(COUNTS)


def test_a_killed_run_generates_nothing_again_that_its_checkpoint_s_weights_finished(with_generator, tmp_path):
    """The run ends in step 4, whose checkpoint was of step 2: what versions up to 2 have sampled is kept."""
    engine, again = Engine(length, 0.02), Engine(length, 0.005)
    ends = 4, lambda: all(step_file(tmp_path, n).exists() for n in (4, 5))
    with_generator(run_steps([engine], 8, 2, ends=ends), engine, max_staleness=2, max_new_tokens=40)
    left = [r for step in (3, 4, 5) for r in read_lines(step_file(tmp_path, step))]
    newest = {r.rollout_id: max(version for version, _, _ in r.weight_versions) for r in left}
    finished = {name for name, version in newest.items() if version <= 2}
    assert finished
    results = with_generator(run_steps([again], 5, 2, first=3), again, max_staleness=2, max_new_tokens=40)
    asked = {name[:15] for name in again.asked}
    assert not finished & asked, "a finished rollout was generated again"
    assert newest.keys() - finished <= asked, "weights after the checkpoint's do not come again"
    for step, result in results.items():
        result.check_accounts(sum(COUNTS))
        check_tokens(result.batch)
        assert sorted(r.rollout_id for r in read_rollouts(step_file(tmp_path, step))) == names(step)
        assert result.batch.response_lengths.tolist() == [length(p.tokens) for p in PROMPTS for _ in range(2)]


def test_what_a_resumed_run_discards_no_later_one_finds(with_generator, tmp_path):
    """The first run left one line of versions 11 and 12, and one of a rollout that is not wanted any more."""
    made = {"reward": 77.0, "success": True, "reward_parts": {}, "weight_versions": [(11, 0, 1), (12, 1, 2)]}
    made |= {"tokens": [1, 30, 7, 8], "response_mask": [0, 0, 1, 1], "engine_logprobs": [-1.0] * 2}
    made |= {"group_id": "000013-0000", "prompt_id": "q0", "step": 13, "finish_reason": "length"}
    store = RolloutStore(tmp_path)
    store.append(Rollout("000013-0000-000", **made))
    store.append(Rollout("000013-0000-001", **(made | {"prompt_id": "q9"})))
    rewards, left = [], []
    for checkpoint in (10, 12):  # the second run is killed before it has sampled anew

        async def work(generator, push, checkpoint=checkpoint):
            await push(checkpoint)
            await generator.dispatch(13, PROMPTS[:1], [1])
            left.extend(r.reward for r in read_lines(step_file(tmp_path, 13)))
            if checkpoint == 12:
                rewards.extend((await generator.collect(13)).batch.rewards.tolist())

        with_generator(work, Engine(length, 0.05), max_staleness=2, max_new_tokens=40)
    assert 77.0 not in left and len(rewards) == 1 and 77.0 not in rewards
