"""Episodes through the rollout process: what becomes of them, whatever becomes of their agents and servers."""

import asyncio
import dataclasses

import numpy as np
import pytest
from aiohttp import web
from stand_ins import Server, generated, reply, until

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.rollout.client import open_session
from dynamo_megatron.rollout.result import SyncNeeded
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.types import Prompt

AGENTS = """
import asyncio, os, time

async def agent(prompt, session):
    kind, messages = prompt.prompt_id.partition(" ")[0], list(prompt.messages)
    if kind == "raises":
        await session.chat(messages)
        raise RuntimeError("no way out")
    if kind == "silent":
        return 1.0
    if kind == "hangs":
        await session.chat(messages)
        await asyncio.sleep(3600)
    if kind == "once":
        await session.chat(messages)
        return 1.0
    if kind == "endless":
        while True:
            messages += [await session.chat(messages), {"role": "user", "content": "on"}]
    if kind == "ends" and not os.path.exists(prompt.meta["file"]):
        open(prompt.meta["file"], "w").close()
        os._exit(1)
    if kind == "edits":
        await session.chat(messages)
        await session.chat([{"role": "user", "content": "else"}])
    if kind == "leaves":
        open(prompt.meta["url"], "w").write(session.base_url + "/chat/completions")
        asyncio.create_task(session.chat(messages))
        await asyncio.sleep(0.2)
    messages += [await session.chat(messages), {"role": "user", "content": prompt.answer}]
    messages += [await session.chat(messages)]
    return None if kind in ("scored", "steps") else 0.25
"""
END = 1  # a token id of tools/tiny_model.py that ends an answer


def prompt(kind, tokens=(20, 21), **meta):
    return Prompt(kind, text="2+2", answer="more", tokens=list(tokens), meta=meta)


def says(tokens):
    """A behaviour: each answer is so long, and ends with END."""

    def behaviour(name, number):
        made = reply(f"{name};", tokens, {"type": "stop", "matched": END})
        made["meta_info"]["output_token_logprobs"][-1] = [-1.0, END, None]
        return web.json_response(made)

    return behaviour


@pytest.fixture
def episodes(with_generator, tmp_path):
    """run(work, *servers, **rollout): as `with_generator`, with these agents."""
    (tmp_path / "generator_agents.py").write_text(AGENTS)

    def run(work, *servers, **rollout):
        options = {"agent": "generator_agents:agent", "agent_workers": 1, "max_new_tokens": 40, **rollout}
        return with_generator(work, *servers, end=(END,), **options)

    return run


def test_an_episode_is_one_rollout_scored_once(episodes, tmp_path):
    async def work(generator, push):
        return await generated(generator, 1, list(map(prompt, ["scored", "rewarded", "edits", "steps"])), [2, 1, 1, 1])

    result = episodes(work, Server(says(3)))
    batch = result.batch
    assert batch.rewards.tolist() == [1.0, 1.0, 0.25, 0.25, 1.0]
    assert batch.response_lengths.tolist() == [6, 6, 6, 12, 6]
    assert batch.successes.tolist() == [True, True, False, False, True]
    assert batch.segment_starts.tolist()[:3] == batch.offsets.tolist()[:3] and len(batch.segment_starts) == 7
    assert result.episodes == {"turns": 12, "segments": 7, "history": 1, "branched": 1} and not result.notes
    stored = {r.rollout_id: r for r in read_rollouts(step_file(tmp_path, 1))}
    assert len(stored) == 5
    first = stored["000001-0000-000"]
    assert [m["role"] for m in first.episode.messages] == ["user", "assistant", "user", "assistant"]
    assert first.response_tokens == [7, 7, END] * 2 and first.reward_parts == {"generator_rewards:slow": 1.0}
    assert stored["000001-0001-000"].reward_parts == {"agent": 0.25}
    steps = stored["000001-0003-000"]  # of the last answer: its tokens
    assert len(steps.response) == 2 and steps.step_rewards == [(3, 4, 0.5), (4, 6, -0.25)]
    np.testing.assert_array_equal(batch.step_rewards[-6:], [np.nan] * 3 + [0.5, np.nan, -0.25])
    for r in stored.values():
        answers = [i for turn in r.episode.turns for i in range(turn.start, turn.end)]
        assert sorted(answers) == [i for i, trained in enumerate(r.response_mask) if trained]
        times = [(turn.asked, turn.answered) for turn in r.episode.turns]
        assert all(0 <= asked < answered for asked, answered in times) and times == sorted(times)


def test_each_failure_has_its_reason_and_the_step_goes_on(episodes, tmp_path):
    kinds = ["raises", "silent", "endless", "endless without", "endless empty", "rewarded", "ends", "leaves"]
    prompts = [prompt(kind, file=str(tmp_path / "ended"), url=str(tmp_path / "url")) for kind in kinds]
    prompts[3:5] = [dataclasses.replace(prompts[3], answer=None), dataclasses.replace(prompts[4], answer="")]

    async def work(generator, push):
        result = await generated(generator, 1, prompts, [1] * len(prompts), 0)
        async with open_session() as http, http.post((tmp_path / "url").read_text(), json={}) as reply:
            return result, reply.status

    result, status = episodes(work, Server(says(3)), agent_turns=5)
    outcome = {kind: result.outcomes[f"000001-{i:04d}-000"].kind for i, kind in enumerate(kinds)}
    assert outcome == {
        "raises": "failed",
        "silent": "failed",
        "endless": "truncated",  # it is scored with what it has
        "endless without": "failed",  # nothing can score it
        "endless empty": "failed",
        "rewarded": "completed",
        "ends": "completed",  # once its process was replaced
        "leaves": "completed",
    }
    assert status == 404 and result.episodes["limit_turns"] == 3 and result.episodes["restarts"] >= 1
    (note,) = [n for n in result.notes if "rollouts failed" in n]
    assert "4 of 8 rollouts failed" in note
    stored = {r.prompt_id: r for r in read_rollouts(step_file(tmp_path, 1))}
    assert "no way out" in stored["raises"].episode.reason
    assert "asked for no answer" in stored["silent"].episode.reason and stored["rewarded"].episode.reason == ""
    for kind in ("endless without", "endless empty"):
        assert "limit of turns; then the agent raised, and the row has no answer" in stored[kind].episode.reason
    assert [k for k in kinds if stored[k].status == "failed"] == [k for k in kinds if outcome[k] == "failed"]
    assert stored["ends"].episode.counts["restarts"] == 1
    assert stored["endless"].reward == 1.0 and stored["endless"].finish_reason == "length"


def test_the_conversation_says_which_answers_were_cut_short(episodes, tmp_path):
    async def work(generator, push):
        return await generated(generator, 1, [prompt("rewarded")], [1], 0)

    def cut(name, number):
        return says(3)(name, number) if number == 1 else web.json_response(reply(f"{name};", 37, {"type": "length"}))

    episodes(work, Server(cut))
    (stored,) = read_rollouts(step_file(tmp_path, 1))
    assert [m.get("finish_reason") for m in stored.episode.messages] == [None, None, None, "length"]


def test_an_episode_that_does_not_end_is_aborted(episodes, tmp_path, monkeypatch):
    monkeypatch.setattr("dynamo_megatron.rollout.agents.pool.REACT_WITHIN", 0.5)

    async def work(generator, push):
        return await generated(generator, 1, [prompt("hangs")], [1], 0)

    assert episodes(work, Server(says(3)), timeout=2.0).counts["aborted"] == 1
    (stored,) = read_rollouts(step_file(tmp_path, 1))
    assert "rollout.timeout" in stored.episode.reason


def test_an_episode_of_one_turn_is_the_rollout_without_an_agent(episodes, with_generator, tmp_path, tiny_model):
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}{{ ending }}")
    data = {"chat_template": str(tmp_path / "own.jinja"), "template_args": {"ending": "=?"}}
    tokens = load_tokenizer(str(tiny_model)).encode("2+2=?")
    found = []
    for run in (episodes, with_generator):
        server = Server(says(3))

        async def work(generator, push):
            return await generated(generator, 1, [prompt("once", tokens)], [2], 0)

        options = {"data": data} if run is episodes else {"end": (END,)}
        batch = run(work, server, **options).batch
        found.append((batch, sorted(each["sampling_seed"] for each in server.sampling.values())))
        step_file(tmp_path, 1).unlink()
    (episode, seeds), (plain, plain_seeds) = found
    assert seeds == plain_seeds
    for name in ("tokens", "offsets", "prompt_lengths", "engine_logprobs", "weight_versions", "rewards"):
        assert getattr(episode, name).tolist() == getattr(plain, name).tolist(), name
    assert episode.finish_reasons == plain.finish_reasons


def test_an_episode_that_starts_again_is_counted(episodes):
    """The only server is lost in its second turn, and comes back."""
    lost = False

    def behaviour(name, number):
        nonlocal lost
        if number == 2 and not lost:
            lost, server.healthy = True, False
        if not server.healthy:
            raise ConnectionResetError
        return says(3)(name, number)

    async def work(generator, push):
        await push(0)
        with pytest.raises(SyncNeeded):
            await generated(generator, 1, [prompt("rewarded")], [1], 0)
        server.healthy = True
        await push(0)
        return await generated(generator, 1, [prompt("rewarded")], [1], 0)

    server = Server(behaviour)
    result = episodes(work, server)
    assert result.counts["completed"] == 1 and result.episodes == {"turns": 2, "segments": 1, "restarts": 1}


def test_an_evaluation_does_not_wait_for_the_episodes_of_training(episodes):
    going_on = asyncio.Event()

    def behaviour(name, number):
        async def answer():
            if not name.startswith("eval-"):
                await going_on.wait()
            return says(3)(name, number)

        return answer()

    async def work(generator, push):
        await generator.dispatch(1, [prompt("once")], [4])
        await until(lambda: server.asked)
        await generator.begin_evaluation([prompt("once"), prompt("rewarded")])
        evaluated = await generator.end_evaluation()
        asked = [name for name in server.asked if not name.startswith("eval-")]
        going_on.set()
        return evaluated, asked, await generator.collect(1)

    server = Server(behaviour)
    evaluated, asked, result = episodes(work, server, agent_episodes=1, max_staleness=1)
    assert [e.rewards for e in evaluated] == [[1.0], [0.25]] and len(asked) == 1
    assert result.counts["completed"] == 4


def test_what_an_interrupted_run_left_is_used_again(episodes, tmp_path):
    asked = []

    async def work(generator, push):
        return await generated(generator, 1, [prompt("edits")], [3], 0)

    first = episodes(work, Server(says(3)))
    again = Server(lambda name, number: asked.append(name))
    second = episodes(work, again)
    assert second.reused == 3 and not asked
    assert second.batch.tokens.tolist() == first.batch.tokens.tolist()
    assert second.batch.trained.tolist() == first.batch.trained.tolist() and second.episodes == first.episodes
