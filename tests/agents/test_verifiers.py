"""Agents of verifiers environments, in verifiers' interpreter, with an endpoint that answers as it is told."""

import asyncio
import json
import shutil
import subprocess
import time
from pathlib import Path

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


async def chat(request: web.Request) -> web.Response:
    """Of a session at /NAME/v1; "limited" has one turn."""
    name, messages = request.match_info["name"], (await request.json())["messages"]
    if name == "limited" and len(messages) > 1:
        return web.json_response({"error": {"message": "the episode has had its turns"}}, status=400)
    message = {"role": "assistant", "content": f"{name}{len(messages)}"}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return web.json_response(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
    )


def test_an_episode_has_a_reward_or_says_why_it_has_none(verifiers_python, tmp_path, monkeypatch):
    """What a run makes of the rewards is in tests/e2e/test_verifiers.py."""
    shutil.copy(Path(__file__).with_name("guess_taskset.py"), tmp_path)
    (tmp_path / "verifiers_agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    words = ["-m", "dynamo_megatron.agents.verifiers", json.dumps(ENVIRONMENTS["guess"]), "rows.jsonl", "--limit", "2"]
    subprocess.run([verifiers_python, *words], check=True, timeout=120)
    first, second = map(json.loads, Path("rows.jsonl").read_text().splitlines())
    episodes = {  # the session's name: row, environment
        "fine": (first, "guess"),
        "limited": (first, "guess"),
        "changed": ({**first, "id": second["id"]}, "guess"),
        "missing": ({**first, "task": 17}, "guess"),
        "twice": (first, "twice"),
    }

    async def play():
        app = web.Application()
        app.router.add_post("/{name}/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pool = AgentPool("verifiers_agents:agent", verifiers_python, 1)

        def run(name, row, source):
            given = {"prompt_id": row["id"], "messages": [], "source": source, "meta": {"task": row["task"]}}
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/{name}/v1"
            return pool.run(name, given, url, time.monotonic() + 600)

        try:
            await pool.start()
            return await asyncio.gather(*(run(name, *episodes[name]) for name in episodes), return_exceptions=True)
        finally:
            await pool.close()
            await runner.cleanup()

    fine, *failures = asyncio.run(play())
    assert fine == 1.0 and {type(error) for error in failures} == {AgentFailed}
    limited, changed, missing, twice = map(str, failures)
    assert "the environment's episode failed: ProviderError" in limited and "had its turns" in limited
    assert "the environment's task 0 is not that of the row" in changed
    assert "the environment's task 17 is not that of the row" in missing
    assert "2 runs of the environment's episode played with the policy" in twice
