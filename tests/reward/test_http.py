"""What a reward service is sent, and what becomes of its answers."""

import asyncio
import datetime
import threading
import time

import pytest
from reward_service import PROMPT, lengths, scored

from dynamo_megatron.reward import Score
from dynamo_megatron.types import Prompt


def test_samples_go_together_and_come_back_in_order(serve, pool):
    service = serve()
    p = pool(service)
    assert p._workers is None  # no function of this machine
    results = scored(p, *("x" * n for n in range(200)))
    assert results == [Score(float(n), n >= 1, {service.url: float(n)}, "ok") for n in range(200)]
    sizes = [len(samples) for samples in service.requests]
    assert sum(sizes) == 200 and max(sizes) <= 64 and len(sizes) <= 40
    assert scored(p, "abc")[0].reward == 3.0  # from another event loop


def test_what_the_service_is_sent(serve, pool):
    service = serve()
    messages = [{"role": "user", "content": "é?"}]
    day = datetime.date(2026, 1, 2)
    p = pool(service)
    scored(
        p,
        "r",
        prompt=Prompt("a", messages=messages, answer=[1], source="s.jsonl", meta={"day": day, "n": float("nan")}),
    )
    scored(p, "r", prompt=Prompt("b", text="plain", answer="2"))
    chat, plain = (request[0] for request in service.requests)
    assert chat == {
        "prompt_id": "a",
        "prompt": messages,
        "response": "r",
        "answer": [1],
        "source": "s.jsonl",
        "meta": {"day": "2026-01-02", "n": None},
    }
    assert plain["prompt"] == "plain" and plain["meta"] == {}


def test_the_key_of_an_environment_variable_is_sent_and_not_shown(serve, pool, monkeypatch):
    service = serve(lambda samples, _: (401, b"who is it?"))
    with pytest.raises(ValueError, match=r"^reward.api_key_env: the environment variable GRADER_KEY is not set$"):
        pool(service, api_key_env="GRADER_KEY")
    monkeypatch.setenv("GRADER_KEY", "hunter22")
    p = pool(service, api_key_env="GRADER_KEY")
    (error,) = scored(p, "x")
    assert service.headers["Authorization"] == "Bearer hunter22" and "hunter22" not in str(error)
    scored(pool(service), "x")
    assert "Authorization" not in service.headers


def test_several_requests_are_under_way_and_the_rest_waits_together(serve, pool):
    def slowly(samples, number):
        time.sleep(0.2)
        return lengths(samples, number)

    service = serve(slowly)
    p = pool(service)

    async def one_after_another():
        tasks = []
        for n in range(40):
            tasks.append(asyncio.create_task(p.score(PROMPT, "x" * n)))
            await asyncio.sleep(0.01)
        return await asyncio.gather(*tasks)

    assert [score.reward for score in asyncio.run(one_after_another())] == list(range(40))
    assert 2 <= service.most_under_way <= 8 and len(service.requests) <= 25


def test_threads_share_a_pool(serve, pool):
    service = serve()
    p = pool(service)
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: scored(p, *["x" * n] * 20)})) for n in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: {score.reward for score in scores} for n, scores in results.items()} == {n: {n} for n in range(1, 5)}


FUNCTIONS = """
import time
def half(prompt, response):
    if response == "stuck": time.sleep(30)
    if response == "raise": raise KeyError("x")
    return 0.5
"""


@pytest.fixture
def half(tmp_path, monkeypatch):
    (tmp_path / "my_half.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return "my_half:half"


def test_a_service_beside_a_function_and_another_service(serve, pool, half):
    first, second = serve(), serve(lambda samples, _: {"rewards": [True] * len(samples)})
    p = pool(first, half, second, success_threshold=3)
    three, two = scored(p, "abc", "ab")
    assert three == Score(4.5, True, {first.url: 3.0, half: 0.5, second.url: 1.0}, "ok")
    assert list(three.parts) == [first.url, half, second.url] and not two.success
    assert len(p._workers.processes) == 2
    p = pool(half, first, fusion="product", success_threshold=0.5, workers=1)
    assert scored(p, "abcd") == [Score(2.0, True, {half: 0.5, first.url: 4.0}, "ok")]


def test_the_worse_of_two_outcomes_counts(serve, pool, half):
    fails = serve(lambda samples, _: (400, b""))
    slow = serve(lambda samples, _: time.sleep(2))
    both = pool(serve(), half, deadline=0.7, workers=1, on_error="zero")
    assert [score.status for score in scored(both, "stuck", "raise")] == ["reward_timeout", "reward_error"]
    assert scored(pool(half, slow, deadline=0.5, workers=1), "x")[0].status == "reward_timeout"
    assert scored(pool(slow, fails, deadline=0.5, on_error="zero"), "x")[0].status == "reward_error"
    (error,) = scored(pool(slow, half, deadline=0.5, workers=1), "raise")
    last = str(error).splitlines()[-1]
    assert last.startswith("reward function my_half:half failed on prompt 'p7': KeyError: 'x' (")
    assert last.endswith("my_half.py, line 5)")


def test_a_cancelled_caller_leaves_the_others_of_its_request(serve, pool, patient):
    def slowly(samples, number):
        time.sleep(0.4)
        return lengths(samples, number)

    service = serve(slowly)
    p = pool(service)

    async def cancel_one():
        tasks = [asyncio.create_task(p.score(PROMPT, response)) for response in ("a", "bb")]
        await asyncio.sleep(0.5)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, fine = asyncio.run(cancel_one())
    assert isinstance(cancelled, asyncio.CancelledError) and fine.reward == 2.0
    assert len(service.requests) == 1 and scored(p, "ccc")[0].reward == 3.0


def test_close_ends_requests_at_once_and_scoring_after_it_is_an_error(serve, pool):
    service = serve(lambda samples, _: time.sleep(4))
    p = pool(service, deadline=60.0)

    async def close_while_waiting():
        tasks = [asyncio.create_task(p.score(PROMPT, "x")) for _ in range(100)]
        await asyncio.sleep(0.3)
        start = time.monotonic()
        p.close()
        return time.monotonic() - start, await asyncio.gather(*tasks, return_exceptions=True)

    took, results = asyncio.run(close_while_waiting())
    assert took < 1.0 and all(isinstance(result, asyncio.CancelledError) for result in results)
    assert not any(thread.name == f"reward {service.url}" for thread in threading.enumerate())
    p.close()
    with pytest.raises(RuntimeError, match="not open"):
        asyncio.run(p.score(PROMPT, "x"))
    with pytest.raises(RuntimeError, match="was closed"):
        asyncio.run(p._services[0].score(PROMPT, "x"))
