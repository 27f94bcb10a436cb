"""Agents in processes of their own: what becomes of those that fail, hang, block, end their process or leave others."""

import asyncio
import shutil
import time

import psutil
import pytest
from living_processes import living

from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.agents.pool import AgentFailed, AgentLost, AgentPool

AGENTS = """
import asyncio, subprocess, time

async def agent(prompt, session):
    what = prompt.meta["what"]
    if what == "raise":
        raise KeyError("no answer\\nin sight")
    if what == "nonsense":
        return "very good"
    if what == "hang":
        await asyncio.sleep(3600)
    if what == "block":
        time.sleep(3600)
    if what == "stubborn":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    if what == "fork":
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        open(prompt.meta["file"], "w").write(str(child.pid))
    assert prompt.messages[0]["content"] == "2+2" and session.base_url == "http://x/v1"
    return None if what == "none" else 0.5
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """run(work, workers=1): `work(ask)` with a pool; `ask(what, seconds)` runs an agent that does it."""
    (tmp_path / "pool_agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)

    async def go(work, function="pool_agents:agent", python=None, workers=1):
        pool, count = AgentPool(function, python, workers), 0

        def ask(what, seconds=600.0, **meta):
            nonlocal count
            count += 1
            messages = [{"role": "user", "content": "2+2"}]
            prompt = {"prompt_id": "p", "messages": messages, "meta": {"what": what, **meta}}
            return pool.run(f"e{count}", prompt, "http://x/v1", time.monotonic() + seconds)

        try:
            await pool.start()
            return await work(ask)
        finally:
            await pool.close()

    return lambda work, **options: asyncio.run(go(work, **options))


async def outcomes(*asked):
    found = await asyncio.gather(*asked, return_exceptions=True)
    return [f if f is None or isinstance(f, float) else (type(f), str(f)) for f in found]


def test_rewards_and_failures_of_many_at_once(pool, tmp_path):
    async def work(ask):
        return await outcomes(*(ask(what) for what in ["right", "none", "raise", "nonsense"] * 10))

    found = pool(work, workers=2)
    assert found[:2] == [0.5, None] and found[2:4] == found[-2:]
    assert found[2][0] is AgentFailed and "KeyError: 'no answer\\nin sight'" in found[2][1]
    assert f"{tmp_path / 'pool_agents.py'}, line 7" in found[2][1]
    assert found[3] == (AgentFailed, "it returned 'very good', neither None nor a finite number")


@pytest.mark.parametrize("what", ["block", "stubborn"])
def test_one_that_does_not_end_takes_its_process_with_it(pool, what, monkeypatch):
    monkeypatch.setattr("dynamo_megatron.rollout.agents.pool.REACT_WITHIN", 0.5)

    async def work(ask):
        return await outcomes(ask("hang"), ask(what, 0.5)), await ask("right")

    (other, own), next_one = pool(work)
    assert own[0] is TimeoutError and next_one == 0.5
    assert other[0] is AgentLost and "did not end within 0.5 s" in other[1]


def test_a_blocked_process_is_lost_long_before_its_episodes_are_late(pool, monkeypatch):
    monkeypatch.setattr("dynamo_megatron.rollout.agents.pool.SILENT_WITHIN", 1)

    async def work(ask):
        found = await outcomes(ask("hang"), ask("block"))
        monkeypatch.setattr("dynamo_megatron.rollout.agents.pool.SILENT_WITHIN", 600)
        return found, await ask("right")

    found, next_one = pool(work)
    assert found == [(AgentLost, "an agent blocked its process for 1 s")] * 2
    assert next_one == 0.5


def test_nothing_that_an_agent_started_is_left(pool, tmp_path):
    file = tmp_path / "pid"

    async def work(ask):
        assert await ask("fork", file=str(file)) == 0.5
        return [psutil.Process(int(file.read_text()))]

    started, end = pool(work), time.monotonic() + 60
    while living(started) and time.monotonic() < end:
        time.sleep(0.05)
    assert living(started) == []


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("pool_agents", "not of the form module:function"),
        ("no_such_module:agent", "No module named 'no_such_module'"),
        ("pool_agents:no_such", "no_such"),
        ("json:JSONDecodeError", "missing a required argument"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_the_start(pool, function, why):
    with pytest.raises(InputError, match=why):
        pool(outcomes, function=function)


def test_another_interpreter_needs_nothing_of_ours(pool):
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if python is None:
        pytest.skip("there is no other interpreter")

    async def work(ask):
        return await ask("right")

    assert pool(work, python=python) == 0.5
