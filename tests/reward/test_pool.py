"""Reward functions in worker processes: scores, failures, deadlines, and what is killed with a worker."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from scoring_endpoint import scored

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.reward.pool import processes
from dynamo_megatron.types import Prompt

FUNCTIONS = """
import asyncio, os, subprocess, sys, time
def length(prompt, response): return len(response)
def by_text(prompt, response):
    if response == "spin":
        while True: pass
    if response == "sleep": time.sleep(300)
    if response.startswith("daemon"):
        daemon = "trap '' HUP INT TERM; sleep 600 & echo $$ $! > daemon.part; mv daemon.part daemon; wait"
        subprocess.run(["setsid", "--fork", "sh", "-c", daemon], env={}, check=True)
        while not os.path.exists("daemon"): time.sleep(0.01)
        if response == "daemon, stuck": time.sleep(600)
        if response == "daemon, killed": os.kill(os.getpid(), 9)
    if response.startswith("print"):
        print(response)
        print(response, file=sys.stderr, flush=True)
    if response == "raise": raise KeyError("two\\nlines")
    if response == "exit": sys.exit(3)
    if response == "cancelled": raise asyncio.CancelledError("not yours")
    if response == "die": os._exit(4)
    if response == "signals":
        for number in (2, 15, 10): os.kill(os.getpid(), number)
    values = {"nan": float("nan"), "text": "1.0", "pid": os.getpid()}
    return values.get(response, 0.25)
def lines(prompt, response):
    return {"reward": 1.0, "steps": [(0, 2, 0.5)]}
def modules(prompt, response): return "torch" in sys.modules
not_callable = 3
def no_arguments(response): return 1.0
class Table:
    def look_up(self, key): return {"a": 1.0}[key]
def nested(prompt, response):
    return Table().look_up(prompt.answer)
"""
NAME, LENGTH = "my_rewards:by_text", "my_rewards:length"
PATIENCE = 600.0  # seconds for what takes none


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(folder, pool):
    """started(functions, **settings) -> a pool of one worker with a deadline that only a stuck function misses."""
    return lambda *functions, **settings: pool(
        *(functions or [NAME]), **{"workers": 1, "deadline": PATIENCE, "on_error": "zero", **settings}
    )


def late(p, response="sleep"):
    """The score of a stuck function, in a tenth of a second: a short deadline from the start would meet others."""
    for worker in p._workers.workers:
        worker.deadline = 0.1
    (score,) = scored(p, response)
    for worker in p._workers.workers:
        worker.deadline = PATIENCE
    return score


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids):
    while any(alive(pid) for pid in pids):
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fusion", "reward", "names", "threshold", "success"),
    [
        ("sum", 4.25, [NAME, LENGTH], 0.25, True),
        ("mean", 2.125, [NAME, LENGTH], 0.3, False),
        ("product", 1.0, [LENGTH, NAME], 0.3, True),
    ],
)
def test_fusion_parts_and_success_of_the_first_function(started, fusion, reward, names, threshold, success):
    p = started(*names, "prime", prime={"model": "m"}, fusion=fusion, success_threshold=threshold)
    assert scored(p, "four") == [Score(reward, success, {NAME: 0.25, LENGTH: 4.0}, "ok")]


def test_functions_and_services_give_one_score_in_the_order_of_the_configuration(started, serve):
    service = serve(lambda request, _: {"rewards": [{"reward": 2, "steps": [[1, 2, 0.25]]}] * len(request["samples"])})
    (score,) = scored(started(service, "my_rewards:lines", NAME), "abc")
    assert list(score.parts.items()) == [(service.score, 2.0), ("my_rewards:lines", 1.0), (NAME, 0.25)]
    assert score.reward == 3.25 and score.steps == [(1, 2, 0.25), (0, 2, 0.5)]


def test_the_answer_is_that_of_the_first_function_that_reads_one(started):
    problem = Prompt("p", text="?", answer="1/2")
    (score,) = scored(started(LENGTH, "math", "qa_exact"), r"\boxed{0.5}", prompt=problem)
    (other,) = scored(started(LENGTH), r"\boxed{0.5}", prompt=problem)
    assert (score.parts["math"], score.answer, other.answer) == (1.0, "1/2", None)


FAILURES = {
    "raise": ("crashed", "KeyError: 'two\\nlines' ({file}, line {line})"),
    "exit": ("crashed", "SystemExit: 3 ({file}, line {line})"),
    "cancelled": ("crashed", "CancelledError: not yours ({file}, line {line})"),
    "nan": ("wrong_format", "ValueError: returned nan"),
    "text": ("wrong_format", "ValueError: returned '1.0' of type str, not a number"),
    "die": ("crashed", "its process ended: exit code 4"),
}


@pytest.mark.parametrize("response", FAILURES)
def test_the_function_that_failed_is_named_and_the_others_keep_their_values(started, folder, response):
    state, words = FAILURES[response]
    number = next((i for i, line in enumerate(FUNCTIONS.splitlines(), 1) if f'response == "{response}"' in line), 0)
    words = words.format(file=folder / "my_rewards.py", line=number)
    p = started(LENGTH, NAME, "my_rewards:lines")
    (score,) = scored(p, response)
    assert (score.reward, score.success, score.status, score.steps) == (0.0, False, "reward_error", [])
    assert (score.failure, score.failures) == (f"{NAME}: {words}", {NAME: state})
    after = {} if response == "die" else {"my_rewards:lines": 1.0}  # what comes after it in its worker was not run
    assert score.parts == {LENGTH: float(len(response)), **after}
    p._config = p._config.model_copy(update={"on_error": "raise"})
    (error,) = scored(p, response)
    assert isinstance(error, RewardError)
    assert str(error).splitlines()[-1] == f"reward function {NAME} failed on prompt 'p7': {words}"
    assert scored(p, "fine")[0].status == "ok"


def test_a_stuck_function_is_killed_and_the_others_go_on(started):
    p = started(workers=2)
    for response in ("spin", "sleep"):
        score = late(p, response)
        assert (score.status, score.failures) == ("reward_timeout", {NAME: "timed_out"})
    assert [score.status for score in scored(p, *["fine"] * 20)] == ["ok"] * 20  # by the new workers


def test_a_sample_that_fails_harms_no_other(started):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    p, prompts = started(), [Prompt("p", text="?", answer=deep if i == 22 else "") for i in range(40)]

    async def score():
        responses = ["die" if i % 7 == 6 else "nan" if i % 7 == 3 else "fine" for i in range(40)]
        return await asyncio.gather(*map(p.score, prompts, responses))

    failed = {i for i, score in enumerate(asyncio.run(score())) if score.status != "ok"}
    assert failed == {22, *(i for i in range(40) if i % 7 in (3, 6))}


def test_an_error_counts_before_a_timeout(started, serve):
    service = serve(lambda *_: (400, b""))
    p = started(service, NAME)
    assert late(p).status == "reward_error" and late(p).failures == {service.score: "crashed", NAME: "timed_out"}


@pytest.mark.parametrize("how", ["late", "killed", "fine"])
def test_a_daemon_of_a_function_ends_with_its_worker(started, folder, how):
    """It has a session of its own, no parent, no environment and a child, and ignores signals."""
    p = started()
    (score,) = scored(p, f"daemon, {how}")
    daemons = [int(pid) for pid in (folder / "daemon").read_text().split()]
    assert score.status == ("reward_error" if how == "killed" else "ok")
    assert how == "killed" or all(map(alive, daemons))
    if how == "late":
        assert late(p).status == "reward_timeout"
    if how == "fine":
        p.close()
    wait_until_gone(*daemons)


def test_a_failure_shows_the_users_own_frames_the_row_and_the_response(started, folder):
    p = started("my_rewards:nested", on_error="raise")
    prompt = Prompt("p7", text="How\x1b[31m many?", answer="b", where="problems.jsonl:4")
    (error,) = scored(p, "one\ntwo\x1b[2J " + "x" * 1000, prompt=prompt)
    frames, (problem, response, failed) = str(error).splitlines()[:-3], str(error).splitlines()[-3:]
    assert [line.rpartition(" ")[2] for line in frames if line.startswith("  File ")] == ["nested", "look_up"]
    assert problem == "prompt 'p7' (problems.jsonl:4): 'How many?', answer 'b'"
    assert response == f"response of 1012 characters: 'one two {'x' * 292}...'"
    words = "reward function my_rewards:nested failed on prompt 'p7' (problems.jsonl:4): KeyError: 'b' ("
    assert failed.startswith(f"{words}{folder / 'my_rewards.py'}, line ")


def test_a_worker_that_cannot_be_started_again_is_a_failure_and_no_end(started, folder, monkeypatch):
    def no_process(*_, **__):
        raise BlockingIOError("no more processes")

    p = started(NAME, LENGTH)
    with monkeypatch.context() as crowded:
        crowded.setattr("subprocess.Popen", no_process)
        scores = scored(p, "die", "fine")
    assert [score.failures for score in scores] == [{NAME: "crashed", LENGTH: "crashed"}] * 2
    assert scores[1].failure == f"{NAME}: no more processes"
    (folder / "my_rewards.py").write_text("def by_text(:")
    assert [score.status for score in scored(p, "fine", "fine")] == ["reward_error"] * 2
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    assert scored(p, "fine")[0].status == "ok"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("my_rewards:absent", "has no 'absent'"),
        ("my_rewards:not_callable", "of type int and cannot be called"),
        ("broken:f", "importing 'broken' of 'broken:f' failed: SyntaxError"),
        ("script:f", "importing 'script' of 'script:f' failed: SystemExit: 0 ("),
        ("my_rewards:no_arguments", "no_arguments' takes (response), and is called with (prompt, response)"),
    ],
)
def test_a_function_that_cannot_be_loaded_stops_the_start(folder, function, words):
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "script.py").write_text("import sys\nsys.exit(0)\n")
    p = RewardPool(RewardConfig(functions=[function]))
    with pytest.raises(ValueError, match=r"reward\.functions: ") as error:
        p.start()
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not any(alive(worker.process.pid) for worker in p._workers.workers)


@pytest.mark.parametrize(("cores", "count"), [(1, 2), (64, 16), (256, 32)])
def test_the_default_number_of_workers(cores, count, monkeypatch):
    monkeypatch.setattr("dynamo_megatron.reward.pool.usable_cores", lambda: cores)
    assert processes(RewardConfig()) == count and processes(RewardConfig(workers=3)) == 3


def test_workers_import_no_torch(started):
    (score,) = scored(started("my_rewards:modules", "math"), r"\boxed{2}")
    assert score.parts == {"my_rewards:modules": 0.0, "math": 1.0}


def test_what_a_function_prints_of_a_response_drives_no_terminal(started, capfd):
    scored(started(), "print \x1b[2J\x1b]52;c;cm0=\x07\rname \u202e\ud800")
    assert list(capfd.readouterr()) == ["print \\x1b[2J\\x1b]52;c;cm0=\\x07\\rname \\u202e\\ud800\n"] * 2


def test_signals_are_the_parents_and_an_idle_worker_that_died_is_replaced(started):
    p = started()
    first, _, second = scored(p, "pid", "signals", "pid")
    assert first == second and second.status == "ok"
    os.kill(int(second.reward), signal.SIGKILL)
    # A zombie is not enough: its other threads may hold the socket for a moment.
    p._workers.workers[0].process.wait(timeout=PATIENCE)
    assert scored(p, "fine")[0].status == "ok"


def test_close_ends_stuck_workers(started):
    p = started(workers=2)
    pids = [worker.process.pid for worker in p._workers.workers]

    async def close_while_stuck():
        tasks = [asyncio.create_task(p.score(Prompt("p", text="?"), "spin")) for _ in range(3)]
        await asyncio.sleep(0.2)
        p.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(close_while_stuck())
    assert all(isinstance(r, (RuntimeError, asyncio.CancelledError)) for r in results), results
    assert not any(alive(pid) for pid in pids)


def test_workers_and_what_they_started_die_with_a_killed_parent(folder):
    script = f"""
        import asyncio, os
        from dynamo_megatron.config import RewardConfig
        from dynamo_megatron.types import Prompt
        from dynamo_megatron.reward import RewardPool
        pool = RewardPool(RewardConfig(functions=["{NAME}"], workers=2, deadline={PATIENCE}))
        pool.start()
        async def main():
            stuck = asyncio.create_task(pool.score(Prompt("p", text="?"), "daemon, stuck"))
            while not os.path.exists("daemon"): await asyncio.sleep(0.02)
            print(*(w.process.pid for w in pool._workers.workers), open("daemon").read(), flush=True)
            await stuck
        asyncio.run(main())
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4 and all(alive(pid) for pid in pids)
        parent.kill()
    wait_until_gone(*pids)
