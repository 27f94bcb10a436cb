"""`reward.placement: ray` on a cluster of raylets on this machine."""

import contextlib
import threading
import time

import psutil
import pytest
from scoring_endpoint import scored

from dynamo_megatron.types import Prompt

FUNCTIONS = """
import os, pathlib, time
def waits(prompt, response):
    folder = pathlib.Path(prompt.meta["folder"])
    with open(folder / "begun", "a") as file:
        file.write(f"{response} {os.getpid()}\\n")
    while not (folder / "go").exists(): time.sleep(0.01)
    if response == "exit": os._exit(3)
    return float(response)
"""
NAME = "my_waiting:waits"
pytestmark = pytest.mark.full


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """A head and another node; the functions in the current folder."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    (tmp_path / "my_waiting.py").write_text(FUNCTIONS)
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


def wait_until_all_end() -> None:
    while workers():
        time.sleep(0.1)


def test_samples_of_a_node_that_is_killed_are_scored_on_the_other_and_once(cluster, pool, tmp_path):
    raylets: dict[int, int] = {}
    while len(set(raylets.values())) < 2:  # the head may not know yet that the other node takes actors
        p = pool(NAME, placement="ray", workers=2, deadline=600.0, on_error="zero")
        raylets = workers()
        assert len(raylets) == 4
        if len(set(raylets.values())) < 2:
            p.close()
            wait_until_all_end()
    prompt = Prompt("p", text="?", meta={"folder": str(tmp_path)})

    def begun():
        return [row.split() for row in (tmp_path / "begun").read_text().splitlines()]

    def kill_when_each_has_a_sample():
        while not (tmp_path / "begun").exists() or len(begun()) < 4:
            time.sleep(0.02)
        cluster.remove_node(cluster.other, allow_graceful=False)
        while sum(map(psutil.pid_exists, raylets)) > 2:
            time.sleep(0.02)
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill_when_each_has_a_sample)
    killer.start()
    scores = scored(p, *(str(n) for n in range(30)), prompt=prompt)
    killer.join()
    assert [(score.status, score.reward) for score in scores] == [("ok", float(n)) for n in range(30)]
    assert {int(pid) for _, pid in begun()} >= set(raylets) and len(begun()) == 32  # two were lost
    ended, wrong, fine = scored(p, "exit", "nan", "5", prompt=prompt)
    assert (ended.failures, ended.failure) == ({NAME: "crashed"}, f"{NAME}: its process ended: exit code 3")
    assert wrong.failures == {NAME: "wrong_format"} and fine.parts == {NAME: 5.0}
    p.close()
    wait_until_all_end()


def test_a_function_that_a_node_cannot_load_stops_the_start(cluster, pool, tmp_path):
    words = r"^reward.placement: node .*: reward.functions: .*my_waiting.* has no 'absent'"
    with pytest.raises(ValueError, match=words):
        pool("my_waiting:absent", placement="ray")
    wait_until_all_end()
