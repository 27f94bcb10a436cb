"""Agents of verifiers environments, in verifiers' interpreter, with an endpoint that answers as it is told."""

import asyncio
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from aiohttp import web

from dynamo_megatron.rollout.agents.pool import AgentFailed, AgentPool

SEATS = {"agent": {"runtime": {"type": "subprocess"}}, "n": 2}
ENVIRONMENTS = {
    "guess": {"taskset": {"id": "guess_taskset"}},
    "twice": {"id": "best-of-n", "taskset": {"id": "guess_taskset"}, **SEATS},
}
AGENTS = f"""
from dynamo_megatron.agents.verifiers import verifiers_agent

agents = {{name: verifiers_agent(environment) for name, environment in {ENVIRONMENTS}.items()}}

async def agent(prompt, session):
    return await agents[prompt.source](prompt, session)
"""


class Endpoint:
    """Sessions at /NAME/v1, which refuse requests of more than `most[NAME]` messages. `asked`: (NAME, messages)."""

    def __init__(self, **most):
        self.most, self.asked = most, []

    async def chat(self, request: web.Request) -> web.Response:
        name, messages = request.match_info["name"], (await request.json())["messages"]
        self.asked.append((name, messages))
        if len(messages) > self.most.get(name, 9):
            return web.json_response({"error": {"message": "the episode has had its turns"}}, status=400)
        await asyncio.sleep(0.01)
        message = {"role": "assistant", "content": f"{name}{len(messages)}"}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        )


@pytest.fixture(scope="module")
def folder(verifiers_python, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("verifiers")
    shutil.copy(Path(__file__).with_name("guess_taskset.py"), made)
    (made / "verifiers_agents.py").write_text(AGENTS)
    words = ["-m", "dynamo_megatron.agents.verifiers", json.dumps(ENVIRONMENTS["guess"]), "rows.jsonl", "--limit", "4"]
    subprocess.run([verifiers_python, *words], cwd=made, check=True, timeout=120)
    return made


@pytest.fixture
def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture
def play(folder, verifiers_python, monkeypatch):
    """play(endpoint, *(session's name, row, environment's name)) -> reward, or the error, of each."""
    monkeypatch.chdir(folder)

    async def go(endpoint, episodes):
        app = web.Application()
        app.router.add_post("/{name}/v1/chat/completions", endpoint.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        pool = AgentPool("verifiers_agents:agent", verifiers_python, 1)

        def run(number, name, row, source):
            given = {"prompt_id": row["id"], "messages": [], "source": source, "meta": {"task": row["task"]}}
            return pool.run(f"e{number}", given, f"{base}/{name}/v1", time.monotonic() + 60)

        try:
            await pool.start()
            asked = [run(number, *episode) for number, episode in enumerate(episodes)]
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await pool.close()
            await runner.cleanup()

    return lambda endpoint, *episodes: asyncio.run(go(endpoint, episodes))


def test_rows_are_the_tasks(rows):
    assert [(row["problem"], row["answer"], row["task"]) for row in rows] == [
        (f"Guess {n}.", None, n) for n in range(4)
    ]
    assert len({row["id"] for row in rows}) == 4


def test_many_episodes_at_once_each_in_its_session_with_the_rubrics_reward(play, rows):
    endpoint, names = Endpoint(), [f"{'long' * (n % 2)}{n:02d}" for n in range(24)]
    rewards = play(endpoint, *((name, rows[n % 4], "guess") for n, name in enumerate(names)))
    assert rewards == [1.0] * 24  # lengths 3 and 7, of both answers
    for n, name in enumerate(names):
        first, second = (messages for asked, messages in endpoint.asked if asked == name)
        assert [m["content"] for m in first] == [f"Guess {n % 4}."]
        assert [m["content"] for m in second] == [f"Guess {n % 4}.", f"{name}1", f"It is not {n % 4}."]


def test_an_episode_that_has_no_reward_says_why(play, rows):
    other = {**rows[0], "id": rows[1]["id"]}
    beyond = {**rows[0], "task": 17}
    asked = [("a", rows[0], "guess"), ("b", other, "guess"), ("c", beyond, "guess"), ("d", rows[0], "twice")]
    refused, changed, missing, twice = play(Endpoint(a=1), *asked)
    assert {type(error) for error in (refused, changed, missing, twice)} == {AgentFailed}
    assert "the environment's episode failed: ProviderError" in str(refused) and "had its turns" in str(refused)
    assert "the environment's task 0 is not that of the row" in str(changed)
    assert "the environment's task 17 is not that of the row" in str(missing)
    assert "2 runs of the environment's episode played with the policy" in str(twice)
