"""`reward.placement: ray` on a cluster of raylets on this machine."""

import contextlib
import shutil
import threading
import time

import psutil
import pytest
from reward_service import scored

from dynamo_megatron.types import Prompt

FUNCTIONS = """
import os, pathlib, time
def slow(prompt, response):
    with open(prompt.meta["file"], "a") as file:
        file.write(f"{response} {os.getpid()}\\n")
    if response == "late": time.sleep(60)
    if response == "exit": os._exit(3)
    time.sleep(0.5)
    return float(response)
"""
NAME = "my_slow:slow"
pytestmark = pytest.mark.full


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """A head and another node; the functions in the current folder."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    (tmp_path / "my_slow.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    started.other = started.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", started.address)
    yield started
    started.shutdown()


def workers() -> dict[int, int]:
    """pid -> raylet of the reward workers that live."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = process.cmdline()
            if "dynamo_megatron.reward.worker" in command and "dynamo_megatron.runtime.guard" not in command:
                raylets = [parent.pid for parent in process.parents() if parent.name() == "raylet"]
                found |= dict.fromkeys([process.pid], raylets[0]) if raylets else {}
    return found


def all_end(within: float = 20.0) -> bool:
    """Whether no reward worker lives any more after at most that many seconds."""
    end = time.monotonic() + within
    while workers() and time.monotonic() < end:
        time.sleep(0.1)
    return not workers()


def test_samples_of_a_node_that_is_killed_are_scored_on_the_other_and_once(cluster, pool, tmp_path):
    p = pool(NAME, placement="ray", workers=2, deadline=20.0, on_error="zero")
    log = tmp_path / "scored.txt"
    prompt = Prompt("p", text="?", meta={"file": str(log)})
    raylets = workers()
    assert len(raylets) == 4 and len(set(raylets.values())) == 2

    def kill():
        end = time.monotonic() + 30
        while len(begun := log.read_text().splitlines() if log.exists() else []) < 8 and time.monotonic() < end:
            time.sleep(0.02)
        assert len(begun) >= 8
        cluster.remove_node(cluster.other, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    responses = [str(n) for n in range(30)]
    begun = time.monotonic()
    scores = scored(p, *responses, prompt=prompt)
    took = time.monotonic() - begun
    killer.join()
    assert [(score.status, score.reward) for score in scores] == [("ok", float(n)) for n in range(30)]
    assert took < 20  # within the deadline of one
    (line,) = p.notes
    assert line.startswith("the reward workers of node "), line
    assert line.endswith("; 2 samples go to the other nodes, of which 1 are left"), line
    asked = [row.split() for row in log.read_text().splitlines()]
    on = {pid: raylets.get(int(pid)) for _, pid in asked}
    assert len(set(on.values())) == 2 and len(asked) == 32  # the two that were lost, twice
    assert scored(p, "7", prompt=prompt)[0].reward == 7.0 and len(p.notes) == 1
    p.close()
    assert all_end()


def test_deadlines_and_states_are_those_of_workers_of_this_machine(cluster, pool, tmp_path):
    p = pool(NAME, placement="ray", workers=1, deadline=2.0, on_error="zero")
    prompt = Prompt("p", text="?", meta={"file": str(tmp_path / "scored.txt")})
    start = time.monotonic()
    late, ended, wrong, fine = scored(p, "late", "exit", "nan", "5", prompt=prompt)
    assert time.monotonic() - start < 30
    assert (late.status, late.failures) == ("reward_timeout", {NAME: "timed_out"})
    assert (ended.failures, ended.failure) == ({NAME: "crashed"}, f"{NAME}: its process ended: exit code 3")
    assert wrong.failures == {NAME: "wrong_format"} and fine.parts == {NAME: 5.0} and p.notes == []
    deep = 1
    for _ in range(100_000):
        deep = [deep]
    (score,) = scored(p, "1", prompt=Prompt("p", text="?", answer=deep))
    assert score.failures == {NAME: "crashed"} and "it cannot be sent to a worker: " in score.failure
    assert scored(p, "2", prompt=prompt)[0].reward == 2.0


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_programs_have_the_same_sandbox(cluster, pool, tmp_path):
    p = pool("code", placement="ray", workers=1, deadline=30.0, on_error="zero")
    seen = {"inputs": ["", ""], "outputs": ["False", "False"]}
    here, there = (
        f"```python\nimport os\nprint(os.path.exists({path!r}))\n```" for path in (str(tmp_path / "my_slow.py"), "/usr")
    )
    hidden, system = scored(p, here, there, prompt=Prompt("p", text="?", answer=seen))
    assert (hidden.reward, hidden.status) == (1.0, "ok") and (system.reward, system.status) == (0.0, "ok")


def test_a_function_that_a_node_cannot_load_stops_the_start(cluster, pool, tmp_path):
    with pytest.raises(ValueError, match=r"^reward.placement: node .*: reward.functions: .*my_slow.* has no 'absent'"):
        pool("my_slow:absent", placement="ray")
    assert all_end()
