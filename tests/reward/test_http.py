import asyncio
import contextlib
import datetime
import gzip
import itertools
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.reward.http import HttpReward
from dynamo_megatron.types import Prompt

PROMPT = Prompt("p7", text="?", answer="1")


class Service(ThreadingHTTPServer):
    """`answer(samples, n)` gives the n-th request (from 1) a body or (status, body); None drops the connection."""

    request_queue_size = 64

    def __init__(self, answer):
        self.answer = answer
        self.requests, self.under_way, self.most_under_way = [], 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/score?strict=1"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def die(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        service = self.server
        assert self.path == "/score?strict=1" and self.headers["Content-Type"] == "application/json"
        service.headers = self.headers
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        with service.lock:
            service.requests.append(samples)
            number = len(service.requests)
            service.under_way += 1
            service.most_under_way = max(service.most_under_way, service.under_way)
        answer = service.answer(samples, number)
        with service.lock:
            service.under_way -= 1
        if answer is None:
            return
        status, body, headers = (*answer, {})[:3] if isinstance(answer, tuple) else (200, answer, {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if isinstance(body, itertools.repeat):  # until the reader has enough
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.writelines(body)
            return
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_header("Content-Length", str(len(encoded)))
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(encoded)

    def log_message(self, *_):
        pass


def lengths(samples, _number):
    return {"rewards": [len(sample["response"]) for sample in samples]}


@pytest.fixture
def serve():
    services = []

    def start(answer=lengths):
        services.append(Service(answer))
        return services[-1]

    yield start
    for service in services:
        service.die()


@pytest.fixture
def pool():
    """A started pool of these services and functions."""
    pools = []

    def start(*functions, **settings):
        names = [function.url if isinstance(function, Service) else function for function in functions]
        pools.append(RewardPool(RewardConfig(functions=names, **settings)))
        pools[-1].start()
        return pools[-1]

    yield start
    for started in pools:
        started.close()


def scored(reward_pool, *responses, prompt=PROMPT):
    """Each response's score, or the error it raised."""

    async def gather():
        return await asyncio.gather(*(reward_pool.score(prompt, r) for r in responses), return_exceptions=True)

    return asyncio.run(gather())


def test_samples_go_together_and_come_back_in_order(serve, pool):
    service = serve()
    p = pool(service)
    assert p._workers == []  # no function of this machine
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


def peak_memory(*, start=False):
    """KB that this process has had at most since it was called with `start`."""
    if start:
        with open("/proc/self/clear_refs", "w") as peaks:
            peaks.write("5")
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:{port}/score", "cannot connect, is the service up? ("),
        ("https://127.0.0.1:{port}", "cannot connect, is the service up? ("),
        ("http://no-such-host.invalid/", "cannot connect, is the service up? ("),
        ("http://", "not a URL: it names no host"),
        ("http://a..b/", "not a URL: "),
        ("http://127.0.0.1:99999/", "not a URL: Port out of range"),
    ],
)
def test_a_service_that_is_not_there_stops_the_start(pool, url, words):
    url = url.format(port=free_port())
    with pytest.raises(ValueError) as error:
        pool("math", url)
    assert str(error.value).startswith(f"reward.functions: {url}: {words}") and "\n" not in str(error.value)


def test_a_service_that_dies_is_an_error_naming_it(serve, pool):
    def die_at_the_second(samples, number):
        if number == 1:
            return lengths(samples, number)
        threading.Thread(target=service.die).start()
        return None

    service = serve(die_at_the_second)
    p = pool(service, deadline=1.5)
    assert scored(p, "one")[0].reward == 3.0
    start = time.monotonic()
    (error,) = scored(p, "two")
    assert isinstance(error, RewardError) and time.monotonic() - start < 5
    *row, last = str(error).splitlines()
    assert row == ["prompt 'p7': '?', answer '1'", "response of 3 characters: 'two'"]
    assert last.startswith(
        f"reward function {service.url} failed on prompt 'p7': no rewards within reward.deadline (1.5 s), the last "
        "attempt: ClientConnectorError: Cannot connect to host 127.0.0.1"
    )
    p._config = p._config.model_copy(update={"on_error": "zero"})
    assert scored(p, "three", "four") == [Score(0.0, False, {}, "reward_error")] * 2


def test_a_slow_service_is_a_timeout_and_the_next_sample_is_fine(serve, pool):
    def sometimes_slow(samples, number):
        if any(sample["response"].startswith("late") for sample in samples):
            time.sleep(3)
        return lengths(samples, number)

    p = pool(serve(sometimes_slow), deadline=0.5)
    start = time.monotonic()
    assert scored(p, "late", "late too") == [Score(0.0, False, {}, "reward_timeout")] * 2
    assert 0.5 <= time.monotonic() - start < 2.5
    assert scored(p, "fine")[0].reward == 4.0


def test_waiting_for_a_free_request_does_not_count(serve, pool, monkeypatch):
    monkeypatch.setattr("dynamo_megatron.reward.http.REQUESTS", 1)
    monkeypatch.setattr("dynamo_megatron.reward.http.BATCH", 4)

    def slowly(samples, number):
        time.sleep(0.5)
        return lengths(samples, number)

    p = pool(serve(slowly), deadline=1.5)
    start = time.monotonic()
    assert {score.status for score in scored(p, *["x"] * 16)} == {"ok"}
    assert time.monotonic() - start > 1.9  # four requests, one after the other


@pytest.mark.parametrize("trouble", [(500, b"busy"), (503, b""), (429, b"slow down"), None])
def test_passing_trouble_is_tried_again(serve, pool, trouble):
    service = serve(lambda samples, number: trouble if number <= 2 else lengths(samples, number))
    p = pool(service)
    assert scored(p, "four")[0] == Score(4.0, True, {service.url: 4.0}, "ok")
    assert len(service.requests) == 3


def test_lasting_trouble_is_an_error_and_no_timeout(serve, pool):
    service = serve(lambda samples, number: (500, b"out of\nmemory"))
    (error,) = scored(pool(service, deadline=1.0), "x")
    assert isinstance(error, RewardError) and 2 <= len(service.requests) <= 3
    assert str(error).endswith("within reward.deadline (1 s), the last attempt: answered 500: out of memory")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, b"no such\npath"), "answered 404: no such path"),
        ((422, {"detail": "bad"}), 'answered 422: {"detail": "bad"}'),
        ((307, b""), "answered 307: "),
        ((201, {"rewards": [1.0]}), 'answered 201: {"rewards": [1.0]}'),
        (b"<html>\n", "the answer is not {\"rewards\": [...]} but '<html>\\n'"),
        (b"\xff\xfe", 'the answer is not {"rewards": [...]} but '),
        ({"reward": [1.0]}, 'the answer is not {"rewards": [...]} but \'{"reward": [1.0]}\''),
        ([1.0], "the answer is not {\"rewards\": [...]} but '[1.0]'"),
        ({"rewards": 1.0}, 'the answer is not {"rewards": [...]} but \'{"rewards": 1.0}\''),
        ({"rewards": []}, "gave 0 rewards for 1 samples"),
        ({"rewards": [1.0, 2.0]}, "gave 2 rewards for 1 samples"),
        ({"rewards": [None]}, "returned None, not a number"),
        ({"rewards": ["1.0"]}, "returned '1.0' of type str, not a number"),
        ({"rewards": [[1.0]]}, "returned [1.0] of type list, not a number"),
        (b'{"rewards": [NaN]}', "returned nan"),
        (b'{"rewards": [-1e999]}', "returned -inf"),
        (b'{"rewards": [1%s]}' % (b"0" * 400), "int too large to convert to float"),
        (b'{"rewards": [1%s]}' % (b"0" * 6000), 'the answer is not {"rewards": [...]} but '),
        (b"[" * 200_000, 'the answer is not {"rewards": [...]} but '),
        (b'{"rewards": %s1%s}' % (b"[" * 200_000, b"]" * 200_000), 'the answer is not {"rewards": [...]} but '),
        (b'{"a":' * 200_000, 'the answer is not {"rewards": [...]} but '),
        (b'{"rewards": [1.0], "rewards": [0.0]}', 'the answer is not {"rewards": [...]} but '),
        (
            (404, b"\x1b]52;c;cm0gLXJm\x07\x1b[31mno\rsuch \xe2\x80\xaepath"),
            "answered 404: ]52;c;cm0gLXJm no such path",
        ),
        ((404, b"x" * 500), f"answered 404: {'x' * 200}..."),
        (b" " * (2 << 20), "answered 200 with more than 1048576 bytes"),
        ((400, b" " * (2 << 20)), "answered 400 with more than 1048576 bytes"),
    ],
)
def test_nonsense_is_an_error_at_once(serve, pool, answer, words):
    service = serve(lambda samples, number: answer)
    p = pool(service, deadline=20.0)
    start = time.monotonic()
    (error,) = scored(p, "x")
    assert isinstance(error, RewardError) and time.monotonic() - start < 5 and len(service.requests) == 1
    *row, last = str(error).split("\n")
    assert row == ["prompt 'p7': '?', answer '1'", "response of 1 characters: 'x'"]
    assert last == f"reward function {service.url} failed on prompt 'p7': {words}" or (
        words.endswith(" but ") and words in last
    )
    p._config = p._config.model_copy(update={"on_error": "zero"})
    assert scored(p, "x") == [Score(0.0, False, {}, "reward_error")]


def test_a_compressed_answer_is_refused_before_it_is_unpacked(serve, pool):
    bomb = gzip.compress(b" " * (64 << 20), 9)

    def answer(samples, _number):
        assert service.headers["Accept-Encoding"] == "identity"
        return (200, bomb, {"Content-Encoding": "gzip"})

    service = serve(answer)
    p = pool(service)
    before = peak_memory(start=True)
    (error,) = scored(p, "x")
    assert peak_memory() - before < 20_000
    assert str(error).endswith(": answered with Content-Encoding gzip; asked for identity")


def test_an_endless_answer_takes_no_memory(serve, pool):
    part = bytes(1 << 20)
    service = serve(lambda samples, _: (200, itertools.repeat(part, 300)))
    p = pool(service)
    before = peak_memory(start=True)
    (error,) = scored(p, "x")
    assert peak_memory() - before < 20_000
    assert str(error).endswith(": answered 200 with more than 1048576 bytes")


def test_a_problem_that_json_cannot_hold_is_an_error_of_its_own(serve, pool):
    deep = 1
    for _ in range(100_000):
        deep = [deep]
    p = pool(serve(), on_error="zero")
    assert scored(p, "x", prompt=Prompt("a", text="?", answer=deep))[0].status == "reward_error"
    assert scored(p, "x", prompt=Prompt("a", text="?", answer=10**5000))[0].status == "reward_error"
    assert scored(p, "x")[0].reward == 1.0
    p._config = p._config.model_copy(update={"on_error": "raise"})
    for answer, words in ((deep, "maximum recursion depth exceeded"), (10**5000, "Exceeds the limit (4300 digits)")):
        (error,) = scored(p, "x", prompt=Prompt("a", text="?", answer=answer))
        row, *_, last = str(error).splitlines()
        assert row.endswith(f"answer 'a value of type {type(answer).__name__} that cannot be shown'")
        assert f"on prompt 'a': the problem cannot be sent as JSON: {words}" in last


def test_a_product_of_rewards_has_the_limit_of_one(serve, pool):
    large = [serve(lambda samples, _: {"rewards": [1e10] * len(samples)}) for _ in range(2)]
    (score,) = scored(pool(*large, fusion="product", on_error="zero"), "x")
    assert score.status == "reward_error" and score.failure.endswith(
        "their product is 1e+20, of more than 1e+18 in size"
    )


def test_a_fault_of_ours_is_logged_before_it_becomes_an_outcome(serve, pool, monkeypatch, capfd):
    def broken(self, reply, count):
        raise AttributeError("ours")

    monkeypatch.setattr(HttpReward, "_rewards", broken)
    assert scored(pool(serve(), on_error="zero"), "x")[0].status == "reward_error"
    logged = capfd.readouterr().err
    assert ", in broken\n" in logged and logged.endswith("AttributeError: ours\n")


@pytest.fixture
def patient(monkeypatch):
    """Samples of a busy machine share a request all the same."""
    monkeypatch.setattr("dynamo_megatron.reward.http.GATHERING", 0.3)


def test_one_bad_reward_does_not_harm_the_others_of_its_request(serve, pool, patient):
    service = serve(lambda samples, _: {"rewards": [None if s["response"] == "bad" else 1 for s in samples]})
    p = pool(service, on_error="zero")
    assert [score.status for score in scored(p, "a", "bad", "c")] == ["ok", "reward_error", "ok"]
    assert len(service.requests) == 1


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
    assert len(p._workers) == 2
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
