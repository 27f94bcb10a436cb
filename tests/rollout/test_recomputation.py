"""Logprobs of sampled tokens are recomputed at a push, before the weights that sampled them are replaced."""

import asyncio
import dataclasses
import math

import pytest
from engine_stand_in import FIRST, PROMPT, Engine, run_steps

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.client import Response, SGLangClient, open_session
from dynamo_megatron.rollout.recomputation import TOKENS, Sampled, recomputed_gap
from dynamo_megatron.rollout.servers.server_api import call, rest, set_version
from dynamo_megatron.rollout.store import read_lines, read_rollouts, step_file
from dynamo_megatron.types import Prompt

PROMPTS = [Prompt(f"q{i}", text="?", tokens=[1 + i, 30]) for i in range(6)]
COUNTS = [2] * len(PROMPTS)


def test_the_tokens_of_one_version_are_chosen_over_its_whole_span():
    spans = [(3, 0, 40), (4, 40, 140), (5, 140, 142)]
    sampled = Sampled([1], Response(list(range(142)), [-1.0] * 142, spans, "length"))
    chosen = sampled.indices(4)
    assert len(chosen) == TOKENS and chosen[0] == 40 and chosen[-1] == 139 and chosen == sorted(set(chosen))
    assert sampled.indices(5) == [140, 141] and sampled.indices(6) == []


def steps_of(with_generator, *engines: Engine, staleness: int = 1, rejects: bool = False, **rollout):
    async def work(generator, push):
        return await run_steps(generator, engines, PROMPTS, COUNTS, 5, staleness)

    results = with_generator(
        work, *engines, max_staleness=staleness, max_new_tokens=60, concurrency=6, health_timeout=20.0, **rollout
    )
    for result in results.values():
        result.check_accounts(sum(COUNTS))
        assert rejects or len(result.batch.rollout_ids) == sum(COUNTS)
    return results


@pytest.mark.parametrize("at_push", ["partial", "drain"])
def test_every_server_recomputes_at_every_push_what_its_weights_have_sampled(with_generator, at_push):
    engines = [Engine(lambda prompt: 50, 0.003), Engine(lambda prompt: 50, 0.003)]
    results = steps_of(with_generator, *engines, at_push=at_push)
    for engine in engines:
        assert len(engine.asked_again) >= TOKENS * 2
        for tokens in engine.asked_again:
            versions = [token - FIRST for token in tokens[PROMPT:]]
            assert versions == sorted(versions) and versions[0] >= 0
    gaps = [use.recomputed_gap for result in results.values() for name, use in result.uses.items() if name]
    assert 0.0 in gaps and set(gaps) <= {0.0, None}


OTHER = "its logprobs of tokens that it says weight version"


@pytest.mark.parametrize(("wrong", "why"), [(-5.0, OTHER), (math.nan, OTHER), (None, "does not tell a logprob")])
def test_a_server_whose_logprobs_are_of_other_weights_is_restarted(with_generator, wrong, why):
    engines = [Engine(lambda prompt: 50, 0.003), Engine(lambda prompt: 50, 0.003)]
    engines[1].recomputed = wrong
    results = steps_of(with_generator, *engines, rejects=True)
    notes = [note for result in results.values() for note in result.notes]
    assert any("server-1 left the rotation: " in note and why in note for note in notes), notes
    assert not any("server-0 left" in note for note in notes)


@pytest.mark.parametrize("at_push", ["partial", "drain"])
@pytest.mark.parametrize("found", ["logprobs", "checksums"])
def test_what_other_weights_have_sampled_is_rejected_or_sampled_again(with_generator, tmp_path, found, at_push):
    """Server 1 has other weights from the first push on. At the second one some of step 3's rollouts are finished."""
    engines = [Engine(lambda prompt: 4 if prompt[0] < 4 else 60, 0.004) for _ in range(2)]

    async def work(generator, push):
        await push(0)
        for step in (1, 2):
            await generator.dispatch(step, PROMPTS, COUNTS)
        await generator.collect(1)
        endpoints = await generator.begin_push(1)
        for engine in engines:
            engine.version = 1
        await generator.end_push(1, dict.fromkeys(endpoints))
        await generator.dispatch(3, PROMPTS, COUNTS)
        await generator.collect(2)
        while finished(tmp_path, 3) < 4:
            await asyncio.sleep(0.01)
        if found == "logprobs":
            engines[1].recomputed = -5.0
            endpoints = await generator.begin_push(2)
        else:
            endpoints = await generator.begin_push(2)
            await generator.distrust({e: "other weights" for e in endpoints if e.name == "server-1"})
        await generator.end_push(2, dict.fromkeys(e for e in endpoints if e.name != "server-1"))
        return await generator.collect(3)

    options = {"max_new_tokens": 60, "concurrency": 6, "health_timeout": 20.0}
    result = with_generator(work, *engines, max_staleness=1, at_push=at_push, **options)
    result.check_accounts(sum(COUNTS))
    rejected = {name for name, outcome in result.outcomes.items() if outcome.kind == "rejected"}
    own = {name for name in engines[1].asked if name.startswith("000003")}
    assert rejected and rejected <= own and (at_push == "drain" or rejected < own)
    for name in own - rejected:  # a partial response: another server has sampled all of it
        assert engines[0].begun[f"{name}-1"] == 0 and name in result.batch.rollout_ids
    last = {rollout.rollout_id: rollout.status for rollout in read_rollouts(step_file(tmp_path, 3))}
    assert {name for name, status in last.items() if status == "rejected"} == rejected
    assert result.rejected_tokens == sum(4 if int(name[9:11]) < 3 else 60 for name in rejected)
    note = f"{len(rejected)} of {sum(COUNTS)} rollouts rejected, of a server with other weights than it said"
    assert any(note in line for line in result.notes)


def finished(folder, step: int) -> int:
    path = step_file(folder, step)
    return sum(r.status == "ok" for r in read_lines(path)) if path.exists() else 0


@pytest.mark.parametrize("options", [{"staleness": 0}, {"proof": {"max_mean_gap": None}}])
def test_nothing_is_recomputed_where_the_policy_compares_all_tokens_or_the_user_none(with_generator, options):
    engine = Engine(lambda prompt: 20, 0.003)
    engine.recomputed = -5.0
    steps_of(with_generator, engine, **options)
    assert engine.asked_again == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_server_finds_its_own_logprobs_again_and_not_those_of_other_weights(
    sglang_server, tiny_model, make_tiny_model, tmp_path, temperature
):
    endpoint, prompt = sglang_server.endpoint, [20, 30, 40, 50, 60]
    other = make_tiny_model(tmp_path / "other", family="qwen2", dtype="float32", seed=7)

    async def work():
        async with open_session() as session:
            config = RolloutConfig(temperature=temperature, max_new_tokens=64)
            client = SGLangClient(session, endpoint, config, [])
            for k in range(20):  # a response ends about every 100 tokens
                response = await client.generate(f"again-{temperature}-{k}", prompt)
                if len(response.tokens) >= 4 * TOKENS:
                    break
            await asyncio.to_thread(rest, endpoint)
            sampled = Sampled(prompt, response)
            own = await recomputed_gap(client, sampled, 0, 60.0)
            altered = list(response.logprobs)
            altered[sampled.indices(0)[3]] += 0.8
            one = await recomputed_gap(
                client, dataclasses.replace(sampled, response=dataclasses.replace(response, logprobs=altered)), 0, 60.0
            )
            call(endpoint, "/update_weights_from_disk", {"model_path": str(other)}, 120)
            return own, one, await recomputed_gap(client, sampled, 0, 60.0)

    try:
        own, one, others = asyncio.run(work())
    finally:
        call(endpoint, "/update_weights_from_disk", {"model_path": str(tiny_model)}, 120)
        set_version(endpoint, 0)
    assert own <= 1e-4
    assert abs(one - 0.8 / TOKENS) <= 1e-4
    assert others > 0.3
