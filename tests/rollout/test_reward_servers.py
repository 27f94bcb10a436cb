"""The reward model's servers: stand-ins that come up, hang and end; a real one is of the full tier."""

import asyncio
import contextlib
import socket

import pytest
from stand_ins import Server, external, listening

from dynamo_megatron.config import Config, RewardConfig
from dynamo_megatron.reward import RewardPool
from dynamo_megatron.reward.functions import NoScore
from dynamo_megatron.rollout.client import open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers import fleet, reward_servers, serve, supervisor
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.reward_servers import RewardServers
from dynamo_megatron.runtime.run_folder import refuse_foreign
from dynamo_megatron.types import Prompt


class StandIn:
    """Of a server that is `listening` at `url`; `made` lists all."""

    url, made, fails, gpus = "", [], False, ()

    def __init__(self, config, model, log, *, name, incarnation, slot, slots, first_gpu):
        assert model.path == "rm" and config.server_args[-2:] == ["--a", "b"] and not config.offload
        self.endpoint = Endpoint(name, incarnation, self.url, config.tp, f"key-{incarnation}")
        self.first_gpu, self.quantization, self.ended = first_gpu, config.quantization, False
        self.made.append(self)

    def start(self):
        pass

    async def wait_ready(self):
        if self.fails:
            raise RolloutError("out of memory")

    def check(self):
        if self.ended:
            raise RolloutError("the SGLang server ended (signal 9)")

    def stop(self):
        pass


def with_model(config: Config, count: int = 1, **servers) -> Config:
    reward = RewardConfig(
        functions=["reward_model"],
        reward_model={"path": "rm"},
        servers={"count": count, "server_args": ["--a", "b"], **servers},
    )
    return config.model_copy(update={"reward": reward})


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(supervisor, "PAUSE", 0.01)
    monkeypatch.setattr(supervisor, "POLL_EVERY", 0.02)
    monkeypatch.setattr(fleet, "HEALTH_EVERY", 0.1)
    monkeypatch.setattr(reward_servers, "ClassifierServer", StandIn)
    monkeypatch.setattr(StandIn, "made", [])
    return StandIn


@contextlib.asynccontextmanager
async def running(config: Config):
    async with open_session() as session:
        servers = RewardServers(config, session)
        task = asyncio.create_task(servers.run())
        try:
            yield servers
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(condition, what: str) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def keys(servers: RewardServers) -> list[str]:
    return [server.endpoint.api_key for server in servers._servers.values()]


def test_a_server_that_ends_or_hangs_is_restarted_and_asked_at_its_new_address(stand_in, tmp_path, monkeypatch):
    async def work():
        server = Server()
        async with listening(server) as url:
            monkeypatch.setattr(stand_in, "url", url)
            async with running(with_model(external([url], output=tmp_path))) as servers:
                await servers.wait_started()
                assert (await servers.next()).api_key == "key-1"
                stand_in.made[0].ended = True
                await until(lambda: keys(servers) == ["key-2"], "the second incarnation")
                server.healthy = False  # hangs: out of the rotation after rollout.health_timeout
                await until(lambda: len(stand_in.made) == 3, "the third incarnation")
                server.healthy = True
                await until(lambda: keys(servers)[:1] > ["key-2"], "a healthy server")
                return servers.notes

    notes = asyncio.run(work())
    assert notes[0] == "reward-0 left the rotation: the SGLang server ended (signal 9)"
    assert notes[1] == "reward-0 left the rotation: no answer to /health within rollout.health_timeout (20 s)"


def test_a_run_without_one_server_does_not_start_and_says_why(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(stand_in, "fails", True)

    async def work():
        async with running(with_model(external(["http://unused"], output=tmp_path), count=2)) as servers:
            with pytest.raises(RolloutError) as error:
                await servers.wait_started()
            with pytest.raises(NoScore, match=r"^no server of the reward model is up; reward-0: out of memory"):
                await servers.next()
        return str(error.value)

    why = "reward-0: out of memory; reward-1: out of memory"
    assert asyncio.run(work()) == f"no server of the reward model is up; {why}"


def test_the_reward_model_of_a_run_with_fp8_weights_keeps_its_own(stand_in, tmp_path):
    base = external(["http://unused"], output=tmp_path)
    rollout = base.rollout.model_copy(update={"quantization": "fp8"})
    RewardServers(with_model(base.model_copy(update={"rollout": rollout})), None)
    assert [server.quantization for server in stand_in.made] == [None]


def test_a_folder_with_their_announcements_is_a_runs(tmp_path):
    sections = {"model": {"path": "m"}, "data": {"source": "d"}, "rollout": {"placement": "split"}}
    config = with_model(Config(output_dir=str(tmp_path), **sections))

    async def work():
        async with running(config):
            await until(lambda: list(tmp_path.rglob("run.json")), "the controller's file")

    asyncio.run(work())
    assert any(tmp_path.iterdir())
    refuse_foreign(tmp_path)


def test_a_port_in_use_is_named_by_its_key(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = with_model(external(["http://unused"], output=tmp_path), port=taken.getsockname()[1])
        with pytest.raises(ValueError, match=r"^reward.servers.port: port .* cannot be used"):
            RewardServers(config, None)


@pytest.mark.parametrize(
    ("first_gpu", "expected"), [(None, [("reward-1", 4), ("reward-3", 4)]), (0, [("reward-1", 0), ("reward-3", 0)])]
)
def test_nodes_of_servers_share_those_of_the_reward_model_and_put_them_after_their_own(
    stand_in, tmp_path, first_gpu, expected
):
    base = Config(
        model={"path": "m"},
        data={"source": "d"},
        output_dir=str(tmp_path),
        rollout={"placement": "split", "servers": 4, "tp": 2},
    )
    config = with_model(base, count=4, first_gpu=first_gpu)
    assert len(serve._parts(config, 2, 1)) == 2
    assert [(made.endpoint.name, made.first_gpu) for made in stand_in.made] == expected
    assert len(serve._parts(with_model(base, count=1), 2, 1)) == 1  # it is on node 0
    colocated = config.model_copy(update={"rollout": base.rollout.model_copy(update={"placement": "colocated"})})
    assert len(serve._parts(colocated, 2, 1)) == 1  # the rollout process starts them


def scored_by(folder) -> RewardConfig:
    model = {"path": str(folder), "dtype": "float32"}
    return RewardConfig(functions=["reward_model"], deadline=60, reward_model=model, servers={})


@pytest.mark.full
def test_a_real_server_gives_the_scores_of_transformers(tiny_reward_model, transformers_score, tmp_path):
    base = external(["http://unused"], output=tmp_path, start_timeout=400, health_timeout=60.0)
    config = base.model_copy(update={"reward": scored_by(tiny_reward_model)})
    prompts = [Prompt(f"p{i}", text=f"{i} + {i}?", answer="") for i in range(8)]
    responses = ["four", "five!", "x" * 200, "", "6", "7", "Seven.", "eight"]

    async def work():
        async with running(config) as servers:
            await servers.wait_started()
            pool = RewardPool(config.reward, servers.next)
            try:
                pool.start()
                return await asyncio.gather(*(pool.score(p, r) for p, r in zip(prompts, responses, strict=True)))
            finally:
                pool.close()

    scores = asyncio.run(work())
    for prompt, response, score in zip(prompts, responses, scores, strict=True):
        expected = transformers_score(prompt.text, response)
        assert score.reward == pytest.approx(expected, rel=1e-3, abs=1e-3), (prompt, response)
    assert max(s.reward for s in scores) - min(s.reward for s in scores) > 0.1
