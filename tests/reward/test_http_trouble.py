"""A reward service that is not there, slow, failing, or answers nonsense."""

import gzip
import itertools
import socket
import threading
import time

import pytest
from reward_service import lengths, scored

from dynamo_megatron.reward import RewardError, Score
from dynamo_megatron.reward.exchanges import OwnService
from dynamo_megatron.types import Prompt


def peak_memory(*, start=False):
    """KB that this process has had at most since it was called with `start`."""
    if start:
        with open("/proc/self/clear_refs", "w") as peaks:
            peaks.write("5")
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


PATIENCE = 60.0  # seconds for what takes none, on a machine that may hold a process up


@pytest.fixture
def dead_port():
    """A port that refuses connections, and that nobody else can take."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield nobody.getsockname()[1]


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
def test_a_service_that_is_not_there_stops_the_start(pool, dead_port, url, words):
    url = url.format(port=dead_port)
    with pytest.raises(ValueError) as error:
        pool("math", url)
    assert str(error.value).startswith(f"reward.functions: {url}: {words}") and "\n" not in str(error.value)


def test_a_service_that_dies_is_an_error_naming_it(serve, pool):
    def die_at_the_second(samples, number):
        if number == 1:
            return lengths(samples, number)
        service.die()  # before the connection is dropped: the next attempt finds nobody
        return None

    service = serve(die_at_the_second)
    p = pool(service, deadline=3.0)
    assert scored(p, "one")[0].reward == 3.0
    start = time.monotonic()
    (error,) = scored(p, "two")
    assert isinstance(error, RewardError) and time.monotonic() - start < PATIENCE
    *row, last = str(error).splitlines()
    assert row == ["prompt 'p7': '?', answer '1'", "response of 3 characters: 'two'"]
    assert last.startswith(
        f"reward function {service.url} failed on prompt 'p7': no rewards within reward.deadline (3 s), the last "
        "attempt: ClientConnectorError: Cannot connect to host 127.0.0.1"
    )
    p._config = p._config.model_copy(update={"on_error": "zero"})
    assert scored(p, "three", "four") == [Score(0.0, False, {}, "reward_error")] * 2


def test_a_slow_service_is_a_timeout_and_the_next_sample_is_fine(serve, pool):
    over = threading.Event()

    def sometimes_slow(samples, number):
        if any(sample["response"].startswith("late") for sample in samples):
            over.wait(2 * PATIENCE)
        return lengths(samples, number)

    p = pool(serve(sometimes_slow), deadline=3.0)
    start = time.monotonic()
    assert scored(p, "late", "late too") == [Score(0.0, False, {}, "reward_timeout")] * 2
    assert 3.0 <= time.monotonic() - start < PATIENCE
    assert scored(p, "fine")[0].reward == 4.0
    over.set()


def test_waiting_for_a_free_request_does_not_count(serve, pool, monkeypatch):
    monkeypatch.setattr("dynamo_megatron.reward.http.REQUESTS", 1)
    monkeypatch.setattr("dynamo_megatron.reward.http.BATCH", 4)

    def slowly(samples, number):
        time.sleep(0.8)
        return lengths(samples, number)

    p = pool(serve(slowly), deadline=2.5)
    start = time.monotonic()
    assert {score.status for score in scored(p, *["x"] * 16)} == {"ok"}
    assert time.monotonic() - start > 3.1  # four requests, one after the other: longer than the deadline


@pytest.mark.parametrize("trouble", [(500, b"busy"), (503, b""), (429, b"slow down"), None])
def test_passing_trouble_is_tried_again(serve, pool, trouble):
    service = serve(lambda samples, number: trouble if number <= 2 else lengths(samples, number))
    p = pool(service)
    assert scored(p, "four")[0] == Score(4.0, True, {service.url: 4.0}, "ok")
    assert len(service.requests) == 3


def test_lasting_trouble_is_an_error_and_no_timeout(serve, pool):
    service = serve(lambda samples, number: (500, b"out of\nmemory"))
    (error,) = scored(pool(service, deadline=3.0), "x")
    assert isinstance(error, RewardError) and 2 <= len(service.requests) <= 4
    assert str(error).endswith("within reward.deadline (3 s), the last attempt: answered 500: out of memory")


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
        (b" " * (2 << 20), "answered 200 with more than 1048640 bytes"),
        ((400, b" " * (2 << 20)), "answered 400 with more than 1048640 bytes"),
    ],
)
def test_nonsense_is_an_error_at_once(serve, pool, answer, words):
    service = serve(lambda samples, number: answer)
    p = pool(service, deadline=2 * PATIENCE)
    start = time.monotonic()
    (error,) = scored(p, "x")
    assert isinstance(error, RewardError) and time.monotonic() - start < PATIENCE and len(service.requests) == 1
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
    assert str(error).endswith(": answered 200 with more than 1048640 bytes")


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
        assert f"on prompt 'a': the problem cannot be sent: {words}" in last


def test_a_product_of_rewards_has_the_limit_of_one(serve, pool):
    large = [serve(lambda samples, _: {"rewards": [1e10] * len(samples)}) for _ in range(2)]
    (score,) = scored(pool(*large, fusion="product", on_error="zero"), "x")
    assert score.status == "reward_error" and score.failure.endswith(
        "their product is 1e+20, of more than 1e+18 in size"
    )


def test_a_fault_of_ours_is_logged_before_it_becomes_an_outcome(serve, pool, monkeypatch, capfd):
    def broken(self, reply, count):
        raise AttributeError("ours")

    monkeypatch.setattr(OwnService, "outcomes", broken)
    assert scored(pool(serve(), on_error="zero"), "x")[0].status == "reward_error"
    logged = capfd.readouterr().err
    assert ", in broken\n" in logged and logged.endswith("AttributeError: ours\n")


def test_one_bad_reward_does_not_harm_the_others_of_its_request(serve, pool, patient):
    service = serve(lambda samples, _: {"rewards": [None if s["response"] == "bad" else 1 for s in samples]})
    p = pool(service, on_error="zero")
    assert [score.status for score in scored(p, "a", "bad", "c")] == ["ok", "reward_error", "ok"]
    assert len(service.requests) == 1
