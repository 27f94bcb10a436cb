"""What a step's rollouts come to where servers, time or the disk give out."""

import asyncio
import dataclasses

import pytest
from aiohttp import web
from stand_ins import ABORTED, Server, generated, reply

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.result import RolloutError, SyncNeeded
from dynamo_megatron.rollout.servers.fleet import Fleet
from dynamo_megatron.rollout.store import RolloutStore, read_rollouts, step_file
from dynamo_megatron.types import Prompt

PROMPTS = [Prompt(f"p{i}", text="?", tokens=[20 + i, 30]) for i in range(3)]


def test_outcomes_are_final_where_the_servers_are_lost_in_a_step(with_generator, tmp_path):
    """The engine aborts the first one; then the server fails, and comes back."""
    failing = True

    def misbehave(rid, number):
        if failing and number > 10:
            return web.json_response({}, status=503)
        return web.json_response(reply(f"{rid};", 1, ABORTED)) if rid == "000001-0000-000" else None

    async def work(generator, push):
        nonlocal failing
        await push(0)
        counts = [16, 16, 0]
        with pytest.raises(SyncNeeded):
            await generated(generator, 1, PROMPTS, counts, 0)
        there = {r.rollout_id: r for r in read_rollouts(step_file(tmp_path, 1))}
        assert there["000001-0000-000"].finish_reason == "abort" and 1 < len(there) < 32
        failing = False
        before = len(server.asked)
        await push(0)
        await generator.evaluate(PROMPTS[:1])
        assert [name for name in server.asked[before:] if not name.startswith("eval-")] == [], "no KV cache there yet"
        result = await generated(generator, 1, PROMPTS, counts, 0)
        result.check_accounts(32)
        assert result.counts["aborted"] == 1 and result.reused == 0
        assert len(server.asked) - before == 1 + 32 - len(there)
        assert result.uses["server-0"].retries > 0
        assert not any("discarded" in note for note in result.notes), result.notes
        gone = 1 + result.counts["failed"]  # each lost four times with the only server
        said = f"step 1: {gone} of 32 rollouts failed; the first: 000001-0000-000: the engine aborted it"
        assert any(note.startswith(said) for note in result.notes), result.notes
        # Asked for once more, it is a run that was interrupted.
        server.behaviour = None
        again = await generated(generator, 1, PROMPTS, counts, 0)
        assert again.reused == 32 - gone and again.counts["aborted"] == 0

    server = Server(misbehave)
    with_generator(work, server, concurrency=2)


def test_a_response_that_its_server_cuts_short_fails_alone(with_generator):
    def cut(rid, number):
        ended = reply(f"{rid};", 1, {"type": "length", "length": 1})
        return web.json_response(ended) if rid == "000001-0000-000" else None

    async def work(generator, push):
        await push(0)
        result = await generated(generator, 1, PROMPTS[:1], [3], 0)
        result.check_accounts(3)
        assert result.counts["failed"] == 1 and "the server ended it after 1 of" in result.notes[0]

    with_generator(work, Server(cut))


def test_a_step_that_samples_anew_takes_the_rollouts_of_later_steps_away(with_generator, tmp_path):
    """They are of weights that the step will not give again."""

    async def work(generator, push):
        counts = [2, 0, 2]
        for step in (1, 2, 3):
            await generated(generator, step, PROMPTS, counts, 0)
        assert (await generated(generator, 1, PROMPTS, counts, 0)).reused == 4
        store = RolloutStore(tmp_path)
        stored = list(read_rollouts(step_file(tmp_path, 2)))
        first, second = (rollout.rollout_id for rollout in stored[:2])
        store.reject(2, [first])
        store.append(dataclasses.replace(stored[2], status="reward_timeout"))
        whole = await generated(generator, 2, PROMPTS, counts, 0)
        assert (whole.reused, whole.counts["rejected"], len(whole.batch.rewards)) == (4, 1, 3)
        store.discard(2, [second])
        again = await generated(generator, 2, PROMPTS, counts, 0)
        assert again.reused == 3
        assert again.notes[-1] == "step 2: 1 rollouts sampled anew; removed those of 1 later steps"
        assert (await generated(generator, 3, PROMPTS, counts, 0)).reused == 0

    with_generator(work, Server())


def test_rollouts_of_an_answer_that_has_changed_are_sampled_anew(with_generator):
    async def work(generator, push):
        for answer, reused in [("7", 0), ("8", 2), (8, 2)]:
            answers = [answer, float("nan"), ("a", {1: 2.5})]
            prompts = [dataclasses.replace(p, answer=a) for p, a in zip(PROMPTS, answers, strict=True)]
            result = await generated(generator, 1, prompts, [1, 1, 1], 0)
            assert result.reused == reused
        assert "step 1: discarded rollouts of an interrupted run: 1 of another answer in the data" in result.notes

    with_generator(work, Server())


def test_rollouts_and_evaluated_problems_are_stored_with_their_texts(with_generator, tiny_model, tmp_path):
    tokenizer = load_tokenizer(str(tiny_model))
    prompt = Prompt("p", text="?", tokens=[20, 30, tokenizer.eos_token_id], answer=("7", {1: 2.5}))

    async def work(generator, push):
        await generated(generator, 1, [prompt], [1], 0)
        return await generator.evaluate([prompt])

    (result,) = with_generator(work, Server())
    (stored,) = read_rollouts(step_file(tmp_path, 1))
    assert stored.prompt == result.prompt and stored.response == result.responses[0]
    assert stored.prompt == tokenizer.decode([20, 30]) + tokenizer.eos_token  # templates are made of such tokens
    assert len(stored.response) == 3  # a token a character
    assert stored.answer == result.answer == ["7", {"1": 2.5}]
    assert stored.reward_parts == {"generator_rewards:slow": 1.0}


def test_a_server_of_rejected_rollouts_is_restarted(with_generator, tmp_path):
    async def work(generator, push):
        await push(0)
        result = await generated(generator, 1, PROMPTS, [8, 8, 1], 0)
        first, *_ = (name for name, o in result.outcomes.items() if o.server == "server-0")
        rejected = [first, *(name for name, o in result.outcomes.items() if o.server == "server-1")]
        await generator.reject(1, rejected)
        stored = {r.rollout_id for r in read_rollouts(step_file(tmp_path, 1)) if r.status == "rejected"}
        assert stored == set(rejected)
        result = await generated(generator, 2, PROMPTS, [2, 2, 0], 0)
        assert {o.server for o in result.outcomes.values()} == {"server-0"}
        assert "step 2: server-1 left the rotation: 100% of its rollouts were rejected" in result.notes

    with_generator(work, Server(), Server())


def test_a_fleet_that_nobody_looks_after_ends_the_command(with_generator, monkeypatch):
    async def watch(self):
        await failing.wait()
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Fleet, "_watch", watch)
    failing = asyncio.Event()

    async def work(generator, push):
        asyncio.get_running_loop().call_later(0.5, failing.set)
        for step in (1, 2):
            ended = r"the task that runs the rollout servers has ended: OSError.*Stale file handle"
            with pytest.raises(RolloutError, match=ended):
                await generator.watched(generated(generator, step, PROMPTS, [1, 1, 1], 0))

    with_generator(work, Server(lambda rid, number: asyncio.sleep(600)))


def test_steps_of_failed_rewards_alone_end_the_run_with_what_failed(with_generator):
    """Reward 0 for every rollout trains nothing; an evaluation of nothing else would be a false one."""
    broken, sound = Prompt("broken", text="?", tokens=[20, 30]), PROMPTS[0]

    async def work(generator, push):
        for step, prompts in enumerate(([broken], [broken], [broken, sound], [broken], [broken]), 1):
            result = await generated(generator, step, prompts, [2] * len(prompts), 0)
            assert result.counts["reward_errors"] == 2
        with pytest.raises(RewardError, match="step 6: not one rollout of 3 steps in a row could be scored; the last"):
            await generated(generator, 6, [broken], [2], 0)
        with pytest.raises(RewardError, match="evaluation: not one of 1 responses could be scored; the last failure"):
            await generator.evaluate([broken])

    with_generator(work, Server(), reward={"on_error": "zero"})


def test_later_parts_of_a_step_are_reused_apart_from_the_first(with_generator):
    """As rounds of dynamic sampling ask: positions 0 and 1, then 2 and 3."""

    async def work(generator, push):
        for reused in (0, 1):
            first = await generated(generator, 1, PROMPTS[:2], [2, 2], 0)
            later = await generated(generator, 1, PROMPTS[1:], [3, 3], 2)
            assert (first.reused, later.reused) == (4 * reused, 6 * reused)
            assert later.batch.group_ids == ["000001-0002"] * 3 + ["000001-0003"] * 3

    with_generator(work, Server())
