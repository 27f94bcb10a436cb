"""The reward `judge`: what the endpoint is asked, what becomes of its replies, and how often it is asked."""

import asyncio
import contextlib
import threading
import time

import pytest
from scoring_endpoint import Endpoint, completion, scored

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardError, RewardPool
from dynamo_megatron.types import Prompt

PATIENCE = 60.0  # seconds for what takes none, on a machine that may hold a process up


@pytest.fixture
def judge():
    """judge(answer, settings of reward.judge, **settings of reward) -> (endpoint, started pool)."""
    opened = contextlib.ExitStack()

    def start(answer, judge=None, **settings):
        endpoint = opened.enter_context(Endpoint(answer))
        section = {"url": endpoint.url, "model": "m", **(judge or {})}
        pool = RewardPool(RewardConfig(**{"functions": ["judge"], "on_error": "zero", "judge": section, **settings}))
        opened.callback(pool.close)
        pool.start()
        return endpoint, pool

    with opened:
        yield start


def test_the_template_is_filled_in_once_and_the_last_number_is_scaled(judge):
    def answer(request, _number):
        return completion("Score: 2 at first sight. On reflection\nscore: **7.5**.")

    section = {"template": "{prompt}|{response}|{answer}|{x}", "request": {"temperature": 0.5, "seed": 3}}
    endpoint, pool = judge(answer, section, success_threshold=0.7)
    (score,) = scored(pool, "it is {answer}")
    assert endpoint.requests == [
        {
            "temperature": 0.5,
            "seed": 3,
            "model": "m",
            "messages": [{"role": "user", "content": "1 + 1?|it is {answer}|2|{x}"}],
        }
    ]
    assert (score.reward, score.success, score.parts, score.status) == (0.75, True, {"judge": 0.75}, "ok")
    chat = Prompt("c", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}])
    scored(pool, "r", prompt=chat)
    assert endpoint.requests[1]["messages"][0]["content"] == "system: Be brief.\n\nuser: 1?|r||{x}"


def test_the_default_template_and_pattern_go_together(judge):
    def answer(request, _number):
        asked = request["messages"][0]["content"]
        assert "1 + 1?" in asked and "\n2\n" in asked and "it is 2" in asked and '"Score: N"' in asked
        return completion("It is right.\nScore: 10")

    _, pool = judge(answer)
    assert scored(pool, "it is 2")[0].reward == 1.0


BOLD = ["**Score:** 9", "**Score**: 9", "**Score: 9**", "Score: **9**", "score:9/10", "_Score_: 9"]
OTHER = ["SCORE: 9", "Score : 9", "Score：9", "score：９", "Score: 9.", "Score: +9.0", "Score: 90e-1", '{"score": 9}']


@pytest.mark.parametrize("line", [*BOLD, *OTHER])
def test_the_default_pattern_reads_usual_lines(judge, line):
    _, pool = judge(lambda request, number: completion(f"Score: 2 would be too low.\n{line}"))
    assert scored(pool, "x")[0].parts == {"judge": 0.9}


WRONG = [
    (
        completion("It is good."),
        "nothing in the judge's reply matches reward.judge.pattern; it ends with 'It",
    ),
    (completion("Score: 11"), "the judge's score 11 is not in reward.judge.range (0 to 10)"),
    (completion("Score: 5\nScore: −1"), "the judge's score -1 is not in reward.judge.range (0 to 10)"),
    (completion("Score: -1"), "the judge's score -1 is not in reward.judge.range (0 to 10)"),
    (completion(None), "the answer is no chat completion with a text but "),
    (completion(["Score: 1"]), "the answer is no chat completion with a text but "),
    ({"choices": []}, "the answer is no chat completion with a text but '{\"choices\": []}'"),
    ({"choices": {"0": 1}}, "the answer is no chat completion with a text but "),
    ([], "the answer is no chat completion with a text but '[]'"),
    (b"<html>", "the answer: not JSON: "),
    (b"[" * 200_000, "the answer: nested more than 100 deep"),
    (b" " * (2 << 20), "answered 200 with more than 1048640 bytes"),
]


@pytest.mark.parametrize(("answer", "words"), WRONG, ids=range(len(WRONG)))
def test_a_reply_without_a_number_is_of_the_wrong_format_at_once(judge, answer, words):
    endpoint, pool = judge(lambda request, number: answer, deadline=2 * PATIENCE)
    start = time.monotonic()
    (score,) = scored(pool, "x")
    assert time.monotonic() - start < PATIENCE and len(endpoint.requests) == 1
    assert (score.reward, score.status, score.failures) == (0.0, "reward_error", {"judge": "wrong_format"})
    assert score.failure.startswith(f"judge: {words}")


def test_a_number_that_was_cut_off_is_no_score(judge):
    replies = ["Score: 1", "Score: 1.", "Score: 1e", "Score: 1e-", "Score: 1. It is"]

    def answer(request, number):
        reply = completion(replies[number - 1])
        reply["choices"][0]["finish_reason"] = "length"
        return reply

    _, pool = judge(answer)
    for text in replies[:-1]:
        failure = f"judge: the judge's reply was cut off in its number, '{text}'"
        assert scored(pool, "x")[0].failure.startswith(failure)
    assert scored(pool, "x")[0].parts == {"judge": 0.1}


@pytest.mark.parametrize("text", ["Score: 1e999", "Score: nan", "Score: ", "Score: inf"])
def test_what_a_pattern_of_the_users_catches_must_be_a_finite_number(judge, text):
    _, pool = judge(lambda request, number: completion(text), {"pattern": r"Score: (\S*)"})
    assert scored(pool, "x")[0].failures == {"judge": "wrong_format"}


def test_a_pattern_that_takes_exponential_time_is_ended_and_others_are_scored(judge):
    def answer(request, number):
        return completion("a" * 5000 if "long" in request["messages"][0]["content"] else "aa5")

    _, pool = judge(answer, {"pattern": "(?:a|a)+([0-9])"}, deadline=2 * PATIENCE)
    start = time.monotonic()
    late, other = scored(pool, "long", "short")
    assert time.monotonic() - start < PATIENCE, "the deadline is twice that"
    assert late.failures == {"judge": "wrong_format"} and other.parts == {"judge": 0.5}
    assert late.failure == "judge: reward.judge.pattern took more than 0.5 s on the judge's reply"


def test_an_error_of_the_judge_stops_a_run_that_wants_it(judge):
    _, pool = judge(lambda request, number: completion("?"), on_error="raise")
    (error,) = scored(pool, "x")
    assert isinstance(error, RewardError) and "reward function judge failed on prompt 'p7': nothing in" in str(error)


def test_a_busy_judge_is_asked_again_when_it_says_and_the_key_is_not_shown(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hunter22")
    busy = [(429, b"", {"Retry-After": "1"}), None]

    def answer(request, number):
        return busy[number - 1] if number <= 2 else (401, b"who is %s?" % endpoint.keys[-1].encode())

    endpoint, pool = judge(answer, {"api_key_env": "JUDGE_KEY"})
    (score,) = scored(pool, "x")
    assert endpoint.keys == ["Bearer hunter22"] * 3 and endpoint.begun[1] - endpoint.begun[0] > 0.95
    assert score.failures == {"judge": "crashed"} and score.failure == "judge: answered 401: who is Bearer [API key]?"
    assert "hunter22" not in repr(pool._services[0]._addresses.known)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match=r"^reward.judge.api_key_env: the environment variable JUDGE_KEY is not set$"):
        judge(answer, {"api_key_env": "JUDGE_KEY"})


def test_requests_in_flight_and_a_second_are_limited(judge):
    async def answer(request, number):
        await asyncio.sleep(0.05)
        return completion("Score: 5")

    endpoint, pool = judge(answer, {"concurrency": 3})
    assert {score.reward for score in scored(pool, *map(str, range(12)))} == {0.5}
    assert endpoint.most_under_way == 3 and len(endpoint.requests) == 12
    endpoint, pool = judge(answer, {"requests_per_second": 10})
    start = time.monotonic()  # not the first one's arrival, which may be late
    scored(pool, *map(str, range(8)))
    assert endpoint.begun[-1] - start > 0.6


def test_a_slow_judge_times_out_and_a_judge_that_is_down_takes_no_deadline_for_each_response(judge):
    async def slow(request, number):
        await asyncio.sleep(300)

    endpoint, pool = judge(slow, {"concurrency": 2}, deadline=3.0)
    start = time.monotonic()
    late = scored(pool, *map(str, range(40)))
    assert time.monotonic() - start < 30 and len(endpoint.requests) <= 4  # 60 s and 40 requests else
    assert [(s.status, s.failures) for s in late] == [("reward_timeout", {"judge": "timed_out"})] * 40
    endpoint, pool = judge(lambda request, number: (503, b""), {"concurrency": 1}, deadline=3.0)
    start = time.monotonic()
    assert {tuple(s.failures.values()) for s in scored(pool, *map(str, range(30)))} == {("crashed",)}
    assert time.monotonic() - start < 45  # 90 s else
    endpoint.answer = lambda request, number: completion("Score: 5")
    assert scored(pool, "again")[0].reward == 0.5


def test_scores_are_kept_where_a_cache_is_asked_for_and_failures_are_not(judge):
    def answer(request, number):
        return completion("Score: 5" if number > 1 else "?")

    endpoint, pool = judge(answer, cache=2)
    assert [scored(pool, "a")[0].status for _ in range(3)] == ["reward_error", "ok", "ok"]
    assert len(endpoint.requests) == 2
    for response in ("b", "a", "c"):  # the least recently used one, b, goes
        scored(pool, response)
    assert len(endpoint.requests) == 4
    scored(pool, "a", "c")
    assert len(endpoint.requests) == 4
    scored(pool, "b")
    scored(pool, "b", prompt=Prompt("p7", text="1 + 2?", answer="3"))  # the same id and response
    assert len(endpoint.requests) == 6
    endpoint, pool = judge(answer)
    scored(pool, "a")
    scored(pool, "a")
    scored(pool, "a")
    assert len(endpoint.requests) == 3


def test_equal_responses_under_way_at_once_are_one_request(judge):
    """One caller's cancellation leaves the others' score, and a failure is for those who waited for it."""

    cancelled_one = threading.Event()

    async def answer(request, number):
        await asyncio.sleep(0.5)
        while number > 1 and not cancelled_one.is_set():
            await asyncio.sleep(0.01)
        return completion("Score: 5") if number > 1 else (400, b"")

    endpoint, pool = judge(answer, cache=2, deadline=PATIENCE)
    assert [score.status for score in scored(pool, *"aaaa")] == ["reward_error"] * 4 and len(endpoint.requests) == 1

    async def first_cancelled():
        calls = [asyncio.create_task(pool.score(Prompt("p7", text="1 + 1?", answer="2"), "a")) for _ in range(4)]
        while len(endpoint.requests) < 2:
            await asyncio.sleep(0.01)
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        cancelled_one.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    cancelled, *others = asyncio.run(first_cancelled())
    assert isinstance(cancelled, asyncio.CancelledError) and [score.reward for score in others] == [0.5] * 3
    assert len(endpoint.requests) == 2 and scored(pool, "a")[0].reward == 0.5 and len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "judge: name the endpoint's url and the model that it is asked for"),
        ({"url": "http://h"}, "judge: name the endpoint's url and the model that it is asked for"),
        ({"url": "h:8000", "model": "m"}, "'h:8000' is no http://HOST:PORT"),
        ({"url": "https://h/v1?version=2", "model": "m"}, "cannot have a query; leave https://h/v1"),
        ({"template": "{prompt}"}, "has no {response}"),
        ({"pattern": "Score: [0-9]+"}, "has no group"),
        ({"pattern": "("}, "not a regular expression"),
        ({"range": [1, 1]}, "1 is not below 1"),
        ({"range": [1]}, "at least 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError) as error:
        RewardConfig(functions=["judge"], judge=settings)
    assert words in str(error.value)


def test_a_judge_that_is_not_there_stops_the_start():
    pool = RewardPool(RewardConfig(functions=["judge"], judge={"url": "http://127.0.0.1:9/v1", "model": "m"}))
    with pytest.raises(ValueError, match=r"^reward.functions: judge: http://127.0.0.1:9/v1: cannot connect"):
        pool.start()
