"""Rewards behind HTTP: what the three kinds of services are sent, and what becomes of their answers and failures."""

import asyncio
import datetime
import itertools
import socket
from types import SimpleNamespace

import pytest
from scoring_endpoint import PROMPT, completion, scored

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.reward import RewardError, RewardPool, Score, http
from dynamo_megatron.types import Prompt

PATIENCE = 600.0  # seconds for what takes none
KINDS = ("url", "judge", "reward_model")


def value(number: float = 0.5) -> dict:
    """kind of service -> an answer that scores one response with `number`, in [0, 1]."""
    answers = ({"rewards": [number]}, completion(f"Score: {10 * number:g}"), [{"embedding": [number]}])
    return dict(zip(KINDS, answers, strict=True))


@pytest.fixture
def start(serve, pool, tiny_model):
    """start(kind, answer, its section, **settings of reward) -> (endpoint, started pool, name of the function)."""

    def started(kind, answer, section=None, **settings):
        endpoint = serve(answer)
        settings = {"on_error": "zero", "deadline": PATIENCE, **settings}
        if kind == "url":
            return endpoint, pool(endpoint, **settings), endpoint.score
        sections = {"judge": {"url": endpoint.url, "model": "m"}, "reward_model": {"path": str(tiny_model)}}
        sections["reward_model"]["urls"] = [endpoint.url]
        settings[kind] = {**sections[kind], **(section or {})}
        return endpoint, pool(kind, **settings), kind

    return started


# What is sent


def test_samples_of_a_url_come_back_in_order_whatever_the_event_loop(serve, pool):
    service = serve()
    started = pool(service)
    assert started._workers is None  # no function of this machine
    expected = [Score(float(n), n >= 1, {service.score: float(n)}, "ok") for n in range(50)]
    assert scored(started, *("x" * n for n in range(50))) == expected
    assert scored(started, *("x" * n for n in range(50))) == expected  # from another event loop
    started.close()
    with pytest.raises(RuntimeError, match="not open"):
        asyncio.run(started.score(PROMPT, "x"))


def test_what_a_url_is_sent(serve, pool):
    service = serve()
    messages = [{"role": "user", "content": "é?"}]
    fields = {"prompt_id": "a", "answer": [1], "source": "s.jsonl", "thinking": "<think>\n"}
    meta = {"day": datetime.date(2026, 1, 2), "n": float("nan")}
    started = pool(service)
    scored(started, "r", prompt=Prompt(messages=messages, meta=meta, **fields))
    scored(started, "r", prompt=Prompt("b", text="plain", answer="2"))
    chat, plain = (request["samples"][0] for request in service.requests)
    assert chat == fields | {"prompt": messages, "response": "r", "meta": {"day": "2026-01-02", "n": None}}
    assert plain["prompt"] == "plain" and plain["meta"] == {}


def test_the_template_of_a_judge_is_filled_in_once(start):
    section = {"template": "{prompt}|{response}|{answer}|{x}", "request": {"temperature": 0.5, "seed": 3}}
    endpoint, pool, _ = start("judge", lambda *_: value(0.75)["judge"], section, success_threshold=0.7)
    assert scored(pool, "it is {answer}") == [Score(0.75, True, {"judge": 0.75}, "ok")]
    messages = [{"role": "user", "content": "1 + 1?|it is {answer}|2|{x}"}]
    assert endpoint.requests == [{"temperature": 0.5, "seed": 3, "model": "m", "messages": messages}]
    chat = Prompt("c", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}])
    chat.thinking = "<think>"
    scored(pool, "r", prompt=chat)
    assert endpoint.requests[1]["messages"][0]["content"] == "system: Be brief.\n\nuser: 1?|<think>r||{x}"


def test_a_reward_model_is_sent_tokens_of_its_own_chat_template(start, tiny_model):
    endpoint, pool, _ = start("reward_model", lambda request, _: [{"embedding": [len(request["input_ids"][0])]}])
    text = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    tokenizer = load_tokenizer(tiny_model)
    expected = [tokenizer.encode(text.format(response)) for response in ("a", "bcd")]
    assert [score.reward for score in scored(pool, "a", "bcd")] == [len(ids) for ids in expected]
    assert sorted((request["input_ids"][0] for request in endpoint.requests), key=len) == expected
    scored(pool, "r", prompt=Prompt("c", messages=[{"role": "system", "content": "s"}], thinking="<think>"))
    sent = tokenizer.decode(endpoint.requests[-1]["input_ids"][0])
    assert sent == "<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n<think>r<|im_end|>\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_sent_and_must_be_there(start, monkeypatch, kind):
    key = f"reward.{'' if kind == 'url' else kind + '.'}api_key_env"
    given = {"api_key_env": "KEY"}
    settings = {**given} if kind == "url" else {"section": given}
    for secret in ("", "hunter22\n"):
        monkeypatch.setenv("KEY", secret)
        with pytest.raises(ValueError, match=f"^{key}: the environment variable KEY is not set, or has a line break$"):
            start(kind, None, **settings)
    monkeypatch.setenv("KEY", "hunter22")
    endpoint, pool, _ = start(kind, lambda *_: value()[kind], **settings)
    assert scored(pool, "x")[0].status == "ok" and endpoint.keys == ["Bearer hunter22"]


# What becomes of answers


@pytest.mark.parametrize(
    "text",
    [
        "Score: 2 at first sight. On reflection\nscore: **9**.",
        "_Score_: 9/10",
        "**Score:** +90e-1",
        "<think>Score: 2</think>Score : 9",
        "Score: 2. Its <think> block is long. Score: 9",
        "score：９",
        '{"score": 9}',
    ],
)
def test_the_last_number_of_a_judge_counts(start, text):
    _, pool, _ = start("judge", lambda *_: completion(text))
    assert scored(pool, "x")[0].parts == {"judge": 0.9}


def test_the_output_of_a_reward_model_is_cut_off_and_scaled_to_a_range(start):
    outputs = [[-7.0], [2.5], 5]  # a number: as encoders answer
    _, pool, _ = start("reward_model", lambda _, n: [{"embedding": outputs[n - 1]}], {"range": [-5, 5]})
    assert [scored(pool, "x")[0].reward for _ in outputs] == [0.0, 0.75, 1.0]


WRONG = {
    "url": [
        (b"<html>\n", "the answer is not JSON but '<html>\\n'"),
        ({"rewards": [1.0, 2.0]}, 'the answer is not {"rewards": [...]} with a reward a sample but'),
        (b'{"rewards": [1%s]}' % (b"0" * 400), "int too large to convert to float"),
        ({"rewards": [{"reward": 2, "steps": [[1, 9, 0.25]]}]}, "returned [1, 9, 0.25] as step 1"),
    ],
    "judge": [
        (completion("It is good."), "nothing in the judge's reply matches reward.judge.pattern; it ends with 'It"),
        (completion("<think>Score: 4, but", finish_reason="length"), "nothing in the judge's reply matches"),
        (completion("Score: 11"), "the judge's score 11 is not in reward.judge.range (0 to 10)"),
        (completion("Score: 1e999"), "the judge's score '1e999' is not a number"),
        (completion("Score: 1", finish_reason="length"), "the judge's reply was cut off in its number, 'Score: 1'"),
        ({"choices": []}, "the judge's reply has no choices[0].message.content: '{\"choices\": []}'"),
    ],
    "reward_model": [
        ([{"embedding": [1.0, 2.0]}], "gave 2 numbers for a response; a reward model is a classifier with num_labels"),
        ([{"score": 1}], "returned None, not a number"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "answer", "words"), [(kind, *case) for kind, cases in WRONG.items() for case in cases]
)
def test_an_answer_without_a_score_is_final(start, kind, answer, words):
    endpoint, pool, name = start(kind, lambda *_: answer)
    (score,) = scored(pool, "x")
    assert (score.reward, score.status, score.failures) == (0.0, "reward_error", {name: "wrong_format"})
    assert score.failure.startswith(f"{name}: {words}") and len(endpoint.requests) == 1


# Failures, repeats, limits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trouble", [(500, b"busy"), (429, b"slow down"), None])
def test_passing_trouble_is_tried_again(start, monkeypatch, kind, trouble):
    monkeypatch.setattr(http, "LONGEST_PAUSE", 0.01)
    endpoint, pool, name = start(kind, lambda _, number: trouble if number <= 2 else value()[kind])
    assert scored(pool, "x")[0].parts == {name: 0.5} and len(endpoint.requests) == 3


def test_a_service_may_ask_for_a_pause(start, monkeypatch):
    slept, sleep = [], asyncio.sleep
    monkeypatch.setattr(http.asyncio, "sleep", lambda seconds: slept.append(seconds) or sleep(0))
    replies = [(429, b"", {"Retry-After": "50"}), (503, b"", {"Retry-After": "9000"}), value()["url"]]
    _, pool, _ = start("url", lambda _, number: replies[number - 1])
    assert scored(pool, "x")[0].status == "ok"
    first, second = [seconds for seconds in slept if seconds > 10]
    assert first == 50 and 50 < second <= PATIENCE  # not beyond the deadline


@pytest.fixture
def slow_clock(monkeypatch):
    """A clock by which an attempt and the pause after it take 400 seconds."""
    monkeypatch.setattr(http, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=itertools.count(0.0, 400.0).__next__))


@pytest.mark.parametrize("kind", KINDS)
def test_lasting_trouble_is_an_error(start, kind, slow_clock):
    endpoint, pool, name = start(kind, lambda *_: (500, b"out of\nmemory"))
    (score,) = scored(pool, "x")
    assert score.failures == {name: "crashed"} and len(endpoint.requests) <= 3
    within = "within reward.deadline (600 s)"
    assert score.failure == f"{name}: no rewards {within}, the last attempt: answered 500: out of memory"


@pytest.mark.parametrize("kind", KINDS)
def test_silence_is_a_timeout(start, kind):
    _, pool, name = start(kind, lambda *_: asyncio.sleep(3600), deadline=0.5)
    (score,) = scored(pool, "x")
    assert (score.status, score.failures) == ("reward_timeout", {name: "timed_out"})
    assert score.failure == f"{name}: no answer within reward.deadline (0.5 s)"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [(404, b"\x1b[31mno such\npath"), (307, b"", {"Location": "/score"}), (201, b"")])
def test_another_status_is_final_and_names_the_service(start, kind, answer):
    endpoint, pool, name = start(kind, lambda *_: answer, on_error="raise")
    (error,) = scored(pool, "x")
    assert isinstance(error, RewardError) and len(endpoint.requests) == 1 and str(error).splitlines()[-1].isprintable()
    assert f"reward function {name} failed on prompt 'p7': answered {answer[0]}: " in str(error)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}/score", "http://no-such-host.invalid/", "http://127.0.0.1:99999/"]
)
def test_a_service_that_is_not_there_stops_the_start(pool, url):
    with socket.socket() as nobody:  # a port that refuses connections, and that nobody else can take
        nobody.bind(("127.0.0.1", 0))
        url = url.format(port=nobody.getsockname()[1])
        with pytest.raises(ValueError) as error:
            pool("math", url)
    assert f"{url}: cannot connect, is the service up? (" in str(error.value) and "\n" not in str(error.value)


def test_no_more_requests_are_under_way_than_allowed(start):
    async def answer(*_):
        await asyncio.sleep(0.02)
        return value()["judge"]

    endpoint, pool, _ = start("judge", answer, {"concurrency": 2})
    assert {score.status for score in scored(pool, *map(str, range(24)))} == {"ok"}
    assert endpoint.most_under_way == 2 and len(endpoint.requests) == 24


def test_a_folder_without_a_tokenizer_or_chat_template_stops_the_start(tiny_model, tmp_path):
    pool = RewardPool(
        RewardConfig(functions=["reward_model"], reward_model={"path": str(tmp_path), "urls": ["http://unused"]})
    )
    with pytest.raises(ValueError, match=r"^reward.reward_model.path: .* has no tokenizer"):
        pool.start()
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^reward.reward_model.path: the tokenizer of .* has no chat template$"):
        pool.start()


@pytest.mark.parametrize(
    ("functions", "settings", "words"),
    [
        ("judge", {"judge": {}}, "judge: name the endpoint's url and the model that it is asked for"),
        ("judge", {"judge": {"url": "h:8000", "model": "m"}}, "'h:8000' is no http://HOST:PORT"),
        ("judge", {"judge": {"template": "{prompt}"}}, "has no {response}"),
        ("judge", {"judge": {"pattern": "Score: [0-9]+"}}, "has no group"),
        ("reward_model", {}, "reward_model.path: name the reward model's folder"),
        ("reward_model", {"reward_model": {"path": "p"}}, "reward_model.urls: name its servers"),
        ("code", {"deadline": 5.0}, "code.seconds: a test may take 6 s and the whole sample 5 s"),
    ],
)
def test_settings_that_cannot_work_are_refused(functions, settings, words):
    with pytest.raises(ValueError) as error:
        RewardConfig(functions=functions, **settings)
    assert words in str(error.value)
