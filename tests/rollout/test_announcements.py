"""Files between the run and the nodes that serve it; no servers here (tests/rollout/test_serve.py starts them)."""

import asyncio
import json
import stat

import pytest
from stand_ins import Recorder, until

from dynamo_megatron.rollout.servers import announcements
from dynamo_megatron.rollout.servers.announcements import Announced, NodeSide, _Watched, servers_folder
from dynamo_megatron.rollout.servers.server_api import Endpoint

NAMES = ["server-0", "server-1"]


class Node(Recorder):
    """A node's supervisor that writes down what the run says."""

    def allow_starts(self, allowed):
        self.starts = allowed

    def restart(self, name, incarnation, why):
        if ("restart", name, incarnation, why) not in self.heard:
            self.heard.append(("restart", name, incarnation, why))


def endpoint(name: str, incarnation: int) -> Endpoint:
    return Endpoint(name, incarnation, "http://127.0.0.1:1", 1, f"key-{incarnation}")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(announcements, "BEAT_EVERY", 0.05)
    monkeypatch.setattr(announcements, "SILENCE", 10)
    monkeypatch.setattr(announcements, "RUN_SILENCE", 60)


def test_servers_come_and_go_and_are_restarted(tmp_path):
    async def work():
        fleet, supervisor = Recorder(), Node()
        run = Announced(tmp_path, NAMES, fleet)
        side = NodeSide(tmp_path, NAMES)
        running = asyncio.create_task(run.run())
        await side.join(60)
        serving = asyncio.create_task(side.run(supervisor))
        side.down("server-0", "exit code 1", False)
        await until(lambda: fleet.heard)
        side.up(endpoint("server-0", 2))
        side.up(endpoint("server-1", 1))
        await until(lambda: len(fleet.heard) == 3)
        file = servers_folder(tmp_path) / "server-0.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and "key-2" in file.read_text()
        assert supervisor.starts
        run.allow_starts(False)
        run.restart("server-0", 2, "hung")
        await until(lambda: supervisor.heard)
        assert not supervisor.starts  # heard before the restart
        side.down("server-0", "hung", False)
        side.up(endpoint("server-0", 3))  # before the run may have looked
        await until(lambda: ("up", "server-0", 3) in fleet.heard)
        # a `serve` that is started anew would else restart its servers
        await until(lambda: json.loads((file.parent / "run.json").read_text())["restarts"] == {})
        run.restart("server-0", 4, "of an earlier process of this node")
        serving.cancel()  # the node is gone
        await until(lambda: fleet.heard[-1][0] == "down" and fleet.heard[-2][0] == "down")
        assert {h[1] for h in fleet.heard[-2:]} == set(NAMES) and "no sign of life" in fleet.heard[-1][2]
        again = asyncio.create_task(side.run(supervisor))
        await until(lambda: sum(h == ("up", "server-1", 1) for h in fleet.heard) >= 2)
        again.cancel()
        side.leave()
        await until(lambda: ("down", "server-0", f"its node has ended ({file} is gone)", False) in fleet.heard)
        again = asyncio.create_task(side.run(supervisor))
        await until(lambda: sum(h == ("up", "server-0", 3) for h in fleet.heard) >= 3)
        running.cancel()
        await asyncio.wait([running])
        await asyncio.wait_for(again, 60)  # the run has ended: so does the node
        assert supervisor.heard == [("restart", "server-0", 2, "hung")]
        ups = [(name, incarnation) for kind, name, incarnation, *_ in fleet.heard if kind == "up"]
        assert set(ups) == {("server-0", 2), ("server-0", 3), ("server-1", 1)}
        assert not list(servers_folder(tmp_path).iterdir())

    asyncio.run(work())


def test_an_older_runs_files_are_not_taken(tmp_path):
    folder = servers_folder(tmp_path)
    folder.mkdir()
    old = {"token": "old", "incarnation": 7, "endpoint": vars(endpoint("server-0", 7))}
    (folder / "server-0.json").write_text(json.dumps(old))
    (folder / "run.json").write_text(json.dumps({"token": "old", "restarts": {}}))

    async def work():
        with pytest.raises(TimeoutError, match=r"no run has shown itself in .*servers within 0.1 s"):
            await NodeSide(tmp_path, NAMES).join(0.1)
        fleet = Recorder()
        running = asyncio.create_task(Announced(tmp_path, NAMES, fleet).run())
        side = NodeSide(tmp_path, NAMES)
        await side.join(60)
        side.up(endpoint("server-1", 1))
        serving = asyncio.create_task(side.run(Node()))
        await until(lambda: fleet.heard)
        assert fleet.heard == [("up", "server-1", 1)]
        for task in (running, serving):
            task.cancel()

    asyncio.run(work())


def test_a_killed_run_ends_its_nodes(tmp_path):
    async def work():
        run = asyncio.create_task(Announced(tmp_path, NAMES, Recorder()).run())
        side = NodeSide(tmp_path, NAMES)
        await side.join(60)
        content = (servers_folder(tmp_path) / "run.json").read_text()
        run.cancel()
        await asyncio.wait([run])
        (servers_folder(tmp_path) / "run.json").write_text(content)  # kill -9 leaves it there
        await asyncio.wait_for(side.run(Node()), 60)

    asyncio.run(work())


@pytest.mark.parametrize("content", [b"", b'{"token": ', b"\xff"], ids=repr)
def test_a_file_that_is_not_what_was_written_says_what_it_said_last(tmp_path, content):
    path = tmp_path / "run.json"
    watched, said = _Watched(path), {"token": "t", "restarts": {}}
    path.write_text(json.dumps(said))
    assert watched.read() == said
    path.write_bytes(content)
    assert watched.read() == said and watched.missed == 1
