"""A run with an agent and two SGLang servers: one is killed in the middle of episodes, which go on on the other."""

import pytest
from background_run import step_lines

from dynamo_megatron.rollout.store import read_rollouts, step_file

pytestmark = pytest.mark.full
EPISODES, TURNS, STEPS, LOSE_STEP = 24, 6, 3, 2
AGENT = f"""
import asyncio, os

def note(what):
    file = os.open("episodes.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (what + "\\n").encode())
    os.close(file)

async def agent(prompt, session):
    note("begun")
    late = open("episodes.log").read().split().count("begun") > {EPISODES}  # of the step that loses a server, or after
    messages = list(prompt.messages)
    for turn in range({TURNS}):
        while late and turn == {TURNS} - 1 and not os.path.exists("killed"):
            await asyncio.sleep(0.1)
        messages += [await session.chat(messages, max_tokens=10), {{"role": "user", "content": "on"}}]
        note("answered")
    return float(len(messages[-2]["content"]) % 2)
"""


def test_episodes_of_a_killed_server_go_on_on_another_from_their_ids(workspace, start_run):
    folder, output = workspace / "lost-episodes", workspace / "lost-episodes-run"
    folder.mkdir()
    (folder / "lost_agents.py").write_text(AGENT)
    (folder / "own_reward.py").write_text((workspace / "own_reward.py").read_text())
    settings = ["rollout.agent=lost_agents:agent", "rollout.servers=2", "rollout.max_new_tokens=64"]
    settings += ["model.max_length=512", "data.template=chat", "trainer.micro_batch_tokens=1024"]
    settings += [f"trainer.steps={STEPS}", f"output_dir={output}"]
    run = start_run(folder, workspace / "config.yaml", *settings)
    log = folder / "episodes.log"

    def noted(what: str) -> int:
        return log.read_text().split().count(what) if log.is_file() else 0

    # No episode of the step has its last turn before the file `killed` is there.
    middle = EPISODES * (TURNS * (LOSE_STEP - 1) + TURNS // 2)
    run.wait_until(lambda: noted("answered") >= middle, "the middle of a step's episodes", 600)
    run.kill_server("server-1")
    (folder / "killed").touch()
    assert run.wait(400) == 0, run.text[-3000:]

    assert noted("begun") == EPISODES * STEPS, "an episode started again"
    rows = step_lines(output)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["rollout/requested"] == EPISODES and row["agent/turns"] == TURNS and row["agent/segments"] == 1
        assert row["agent/restarts"] == row["agent/abandoned"] == 0
        assert row["rollout/failed"] == row["rollout/aborted"] == row["rollout/rejected"] == 0
        assert row["rollout/logprob_gap_max"] <= 1e-4
        assert row["rollout/weight_version_min"] == row["rollout/weight_version_max"] == row["step"] - 1
    lost = rows[LOSE_STEP - 1]
    assert "server-1 left the rotation" in run.text
    # What the killed server had answered of this step is in episodes whose last answer is the other's.
    assert lost["fleet/server-1/tokens_per_second"] > 0
    rollouts = read_rollouts(step_file(output, LOSE_STEP))
    assert {r.server for r in rollouts} == {"server-0"} and {r.status for r in rollouts} == {"ok"}
    assert all(len(r.episode.turns) == TURNS for r in rollouts)
    assert run.left_behind() == []
