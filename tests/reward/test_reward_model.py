"""The reward `reward_model`: what a server of it is sent, and what becomes of its replies and of its restarts."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from scoring_endpoint import Endpoint, classes, scored

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.reward import RewardPool
from dynamo_megatron.reward.addresses import Address, Addresses
from dynamo_megatron.types import Prompt


def lengths(request, _number):
    return classes(*map(len, request["input_ids"]))


@pytest.fixture
def reward_model(tiny_model):
    """reward_model(answer, settings of reward.reward_model, **settings of reward) -> (endpoint, started pool)."""
    opened = contextlib.ExitStack()

    def start(answer=lengths, model=None, addresses=None, **settings):
        endpoint = opened.enter_context(Endpoint(answer))
        section = {"path": str(tiny_model), **({} if addresses else {"urls": [endpoint.url]}), **(model or {})}
        settings |= {"servers": {}} if addresses else {}
        config = RewardConfig(functions=["reward_model"], reward_model=section, **{"on_error": "zero", **settings})
        pool = RewardPool(config, addresses)
        opened.callback(pool.close)
        pool.start()
        return endpoint, pool

    with opened:
        yield start


def test_conversations_go_in_batches_through_the_chat_template_of_the_reward_model(reward_model, tiny_model, patient):
    endpoint, pool = reward_model()
    responses = ["x" * n for n in range(100)]
    scores = scored(pool, *responses)
    tokenizer = load_tokenizer(tiny_model)
    text = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    expected = [tokenizer.encode(text.format(response)) for response in responses]
    assert sorted((ids for r in endpoint.requests for ids in r["input_ids"]), key=len) == expected
    assert [score.reward for score in scores] == [len(ids) for ids in expected] and len(endpoint.requests) < 20
    chat = Prompt("c", messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    scored(pool, "r", prompt=chat)
    sent = tokenizer.decode(endpoint.requests[-1]["input_ids"][0])
    assert sent == "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [("system", "s"), ("user", "u"), ("assistant", "r")]
    )


def test_scores_are_cut_off_and_scaled_to_a_range(reward_model):
    _, pool = reward_model(lambda request, number: classes(-7.0), {"range": [-5, 5]})
    assert scored(pool, "x")[0].reward == 0.0
    _, pool = reward_model(lambda request, number: classes(2.5), {"range": [-5, 5]})
    assert scored(pool, "x")[0].reward == 0.75
    _, pool = reward_model(lambda request, number: [{"embedding": -2.5}])  # as encoders answer
    assert scored(pool, "x")[0].reward == -2.5


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"embedding": [1.0]}, "the answer is not a list of 1 but {'embedding': [1.0]}"),
        (classes(1.0, 2.0), "the answer is not a list of 1 but "),
        (
            [{"embedding": [1.0, 2.0]}],
            "gave 2 numbers for a response; a reward model is a classifier with num_labels 1",
        ),
        ([{"embedding": [True]}], "gave True in the place of a score"),
        ([{"embedding": ["1"]}], "gave '1' in the place of a score"),
        ([{"score": 1}], "gave None in the place of a score"),
        ([1.0], "gave None in the place of a score"),
        (classes(1e30), "returned 1e+30, of more than 1e+18 in size"),
        (b'[{"embedding": [NaN]}]', "the answer: NaN, which is not JSON"),
        (b'[{"embedding": [1%s]}]' % (b"0" * 400), "int too large to convert to float"),
    ],
)
def test_a_reply_without_scores_is_of_the_wrong_format(reward_model, answer, words):
    _, pool = reward_model(lambda request, number: answer)
    (score,) = scored(pool, "x")
    assert score.failures == {"reward_model": "wrong_format"} and score.failure.startswith(f"reward_model: {words}")


def test_a_response_that_a_server_refuses_does_not_harm_the_others_of_its_request(reward_model, patient):
    def answer(request, _number):
        if max(map(len, request["input_ids"])) > 200:
            return 400, {"error": {"message": "too long"}}
        return lengths(request, 0)

    endpoint, pool = reward_model(answer)
    scores = scored(pool, *["x"] * 7, "x" * 300)
    assert [score.status for score in scores] == ["ok"] * 7 + ["reward_error"]
    assert scores[-1].failures == {"reward_model": "crashed"} and "too long" in scores[-1].failure
    assert [len(r["input_ids"]) for r in endpoint.requests] == [8, 4, 4, 2, 2, 1, 1]


def test_a_response_that_ends_every_server_that_reads_it_is_given_up_and_the_others_are_scored(reward_model, patient):
    def answer(request, _number):
        return None if max(map(len, request["input_ids"])) > 200 else lengths(request, 0)

    addresses = Addresses(restarts_within=60.0)
    endpoint, pool = reward_model(answer, addresses=addresses, deadline=6.0)
    addresses.up("reward-0", Address(endpoint.url))
    scores = scored(pool, *["x"] * 7, "x" * 300)
    assert [score.status for score in scores] == ["ok"] * 7 + ["reward_error"]
    assert scores[-1].failures == {"reward_model": "crashed"}
    assert scores[-1].failure.startswith("reward_model: its server went away in 3 attempts, the last: ")
    assert [len(r["input_ids"]) for r in endpoint.requests] == [8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1, 1]


def test_responses_that_are_under_way_when_servers_end_are_sent_again_and_none_of_them_is_given_up(
    reward_model, monkeypatch
):
    """Two responses end every server that reads them, and with it what the server is asked for others."""
    monkeypatch.setattr("dynamo_megatron.reward.http.BATCH", 1)
    ends = 0

    async def answer(request, _number):
        nonlocal ends
        if len(request["input_ids"][0]) > 200:
            await asyncio.sleep(0.05)
            ends += 1
            return None
        ends_before = ends
        for _ in range(50):
            await asyncio.sleep(0.01)
            if ends != ends_before:
                return None
        return lengths(request, 0)

    addresses = Addresses(restarts_within=60.0)
    endpoint, pool = reward_model(answer, {"concurrency": 12}, addresses)
    addresses.up("reward-0", Address(endpoint.url))
    scores = scored(pool, *["x" * n for n in range(1, 11)], "x" * 300, "x" * 301)
    assert [score.status for score in scores] == ["ok"] * 10 + ["reward_error"] * 2
    assert all(score.failures == {"reward_model": "crashed"} for score in scores[10:])
    assert len({score.reward for score in scores[:10]}) == 10


def test_the_time_until_another_server_is_up_is_not_of_the_deadline(reward_model):
    """Its port takes no connections any more, and nobody has said yet that it is gone."""
    addresses = Addresses(restarts_within=20.0)
    first, pool = reward_model(addresses=addresses, deadline=2.0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        addresses.up("reward-0", Address(f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"))
        threading.Timer(2.5, lambda: addresses.up("reward-0", Address(first.url))).start()
        (score,) = scored(pool, "x")
        assert score.status == "ok" and len(first.requests) == 1
        addresses.restarts_within = 1.0
        addresses.up("reward-0", Address(f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"))
        (score,) = scored(pool, "y")
    assert score.failures == {"reward_model": "crashed"}
    assert score.failure.startswith("reward_model: no server of the reward model can be reached: ClientConnectorError")


def test_a_request_to_a_server_that_is_given_up_is_sent_again_at_once(reward_model):
    """Its host may be gone: the connection never ends."""

    async def hangs(request, _number):
        await asyncio.sleep(0.5)
        addresses.up("reward-0", Address(other.url, "k2"))
        await asyncio.sleep(600)

    addresses = Addresses(restarts_within=20.0)
    hung, pool = reward_model(hangs, addresses=addresses, deadline=120.0)
    other, _ = reward_model()
    addresses.up("reward-0", Address(hung.url, "k1"))
    start = time.monotonic()
    assert scored(pool, "x")[0].status == "ok" and time.monotonic() - start < 60
    assert (len(hung.requests), len(other.requests)) == (1, 1)


def test_a_request_that_was_lost_with_its_server_has_the_whole_deadline_again(reward_model):
    async def answer(request, number):
        await asyncio.sleep(1.8)
        return lengths(request, 0) if number > 1 else None

    addresses = Addresses(restarts_within=20.0)
    endpoint, pool = reward_model(answer, addresses=addresses, deadline=3.2)  # a stall counts for a second at most
    addresses.up("reward-0", Address(endpoint.url))
    assert scored(pool, "x")[0].status == "ok"


def test_servers_take_turns_and_one_that_is_lost_is_waited_for(reward_model):
    addresses = Addresses(restarts_within=20.0)
    first, pool = reward_model(addresses=addresses, deadline=1.5)
    second, _ = reward_model()
    addresses.up("reward-0", Address(first.url, "k0"))
    addresses.up("reward-1", Address(second.url, "k1"))
    for response in "abcd":
        assert scored(pool, response)[0].status == "ok"
    assert (first.keys, second.keys) == (["Bearer k0"] * 2, ["Bearer k1"] * 2)
    addresses.down("reward-0", "killed")
    addresses.down("reward-1", "killed")
    threading.Timer(2.0, lambda: addresses.up("reward-1", Address(second.url, "k2"))).start()
    start = time.monotonic()
    assert scored(pool, "e")[0].status == "ok" and time.monotonic() - start > 1.9  # longer than the deadline
    assert second.keys[-1] == "Bearer k2"
    addresses.down("reward-1", "out of memory", final=True)
    (score,) = scored(pool, "f")
    assert score.failures == {"reward_model": "crashed"}
    assert score.failure == "reward_model: no server of the reward model is up; reward-1: out of memory"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "reward_model.path: name the reward model's folder"),
        ({"reward_model": {"path": "p"}}, "servers: the run starts servers of the reward model, or reward_model.urls"),
        ({"reward_model": {"path": "p", "urls": ["http://h"]}, "servers": {}}, "servers: the run starts servers of"),
        ({"reward_model": {"path": "p", "urls": ["h"]}}, "'h' is no http://HOST:PORT"),
        ({"reward_model": {"path": "p", "urls": ["http://h/v1#a"]}}, "cannot have a query; leave http://h/v1"),
        ({"functions": ["math"], "servers": {}}, "servers: are those of the reward model; put reward_model into"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError) as error:
        RewardConfig(**{"functions": ["reward_model"], **settings})
    assert words in str(error.value)


def test_a_folder_without_a_tokenizer_or_chat_template_stops_the_start(tiny_model, tmp_path):
    def start(path):
        config = RewardConfig(functions=["reward_model"], servers={}, reward_model={"path": str(path)})
        RewardPool(config, Addresses(restarts_within=1.0)).start()

    with pytest.raises(ValueError, match=r"^reward.reward_model.path: .* has no tokenizer"):
        start(tmp_path)
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^reward.reward_model.path: the tokenizer of .* has no chat template$"):
        start(tmp_path)
