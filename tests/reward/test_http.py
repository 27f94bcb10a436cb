"""What a reward service is sent, and what becomes of its answers."""

import asyncio
import datetime
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from reward_service import PROMPT, lengths, scored

from dynamo_megatron.reward import Score
from dynamo_megatron.reward.http import REQUESTS
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


PATIENCE = 60.0  # seconds for what takes none, on a machine that may hold a process up


async def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@pytest.fixture
def held(serve):
    """(a service that answers nothing before an event, that event)."""
    answers = threading.Event()

    def answer(samples, number):
        assert answers.wait(10 * PATIENCE)
        return lengths(samples, number)

    yield serve(answer), answers
    answers.set()


def test_several_requests_are_under_way_and_the_rest_waits_together(held, pool):
    service, answers = held
    p = pool(service, deadline=PATIENCE)

    async def more_than_may_be_under_way():
        tasks = []
        for n in range(40):
            tasks.append(asyncio.create_task(p.score(PROMPT, "x" * n)))
            if n < REQUESTS:  # a request of its own
                await until(lambda: service.under_way == len(tasks))
        await until(lambda: p._services[0]._waiting.qsize() == len(tasks) - REQUESTS)
        answers.set()
        return await asyncio.gather(*tasks)

    assert [score.reward for score in asyncio.run(more_than_may_be_under_way())] == list(range(40))
    assert service.most_under_way == REQUESTS and len(service.requests) == REQUESTS + 1


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
    if response == "stuck": time.sleep(300)
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


def test_the_worse_of_two_outcomes_counts(serve, pool, held, half):
    fails, (slow, _) = serve(lambda samples, _: (400, b"")), held
    late = {"deadline": 3.0}  # which a function or a service that answers must not miss
    pools = [
        pool(serve(), half, **late, workers=1, on_error="zero"),
        pool(half, slow, **late, workers=1),
        pool(slow, fails, **late, on_error="zero"),
        pool(slow, half, **late, workers=1),
    ]
    with ThreadPoolExecutor() as threads:  # they wait together
        asked = zip(pools, (("stuck", "raise"), ("x",), ("x",), ("raise",)), strict=True)
        runs = [threads.submit(scored, each, *responses) for each, responses in asked]
    first, second, third, (error,) = (run.result() for run in runs)
    assert [score.status for score in first] == ["reward_timeout", "reward_error"]
    assert second[0].status == "reward_timeout" and third[0].status == "reward_error"
    last = str(error).splitlines()[-1]
    assert last.startswith("reward function my_half:half failed on prompt 'p7': KeyError: 'x' (")
    assert last.endswith("my_half.py, line 5)")


def test_a_cancelled_caller_leaves_the_others_of_its_request(held, pool, patient):
    service, answers = held
    p = pool(service, deadline=PATIENCE)

    async def cancel_one():
        tasks = [asyncio.create_task(p.score(PROMPT, response)) for response in ("a", "bb")]
        await until(lambda: service.under_way)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        answers.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, fine = asyncio.run(cancel_one())
    assert isinstance(cancelled, asyncio.CancelledError) and fine.reward == 2.0
    assert len(service.requests) == 1 and scored(p, "ccc")[0].reward == 3.0


def test_close_ends_requests_at_once_and_scoring_after_it_is_an_error(held, pool):
    service, _ = held
    p = pool(service, deadline=2 * PATIENCE)

    async def close_while_waiting():
        tasks = [asyncio.create_task(p.score(PROMPT, "x")) for _ in range(100)]
        await until(lambda: service.under_way)
        start = time.monotonic()
        p.close()
        return time.monotonic() - start, await asyncio.gather(*tasks, return_exceptions=True)

    took, results = asyncio.run(close_while_waiting())
    assert took < PATIENCE and all(isinstance(result, asyncio.CancelledError) for result in results)
    assert not any(thread.name == f"reward {service.url}" for thread in threading.enumerate())
    p.close()
    with pytest.raises(RuntimeError, match="not open"):
        asyncio.run(p.score(PROMPT, "x"))
    with pytest.raises(RuntimeError, match="was closed"):
        asyncio.run(p._services[0].score(PROMPT, "x"))
