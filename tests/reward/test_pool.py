import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from reward_service import scored

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.reward.workers import END_TIMEOUT
from dynamo_megatron.types import Prompt

DAEMON = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
for _ in range(2):
    if os.fork(): os._exit(0)
    os.setsid()
child = subprocess.Popen(["setsid", "sleep", "600"], env={})
with open(sys.argv[1] + ".part", "w") as file: file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
FUNCTIONS = (
    f"""
DAEMON = {DAEMON!r}"""
    """
import asyncio, os, pathlib, subprocess, sys, time
from multiprocessing.connection import Connection
from dynamo_megatron.reward.outcomes import Outcome
def length(prompt, response): return len(response)
def by_text(prompt, response):
    if response == "spin":
        while True: pass
    if response == "sleep": time.sleep(300)
    if response == "child":
        child = subprocess.Popen(["sleep", "600"])
        pathlib.Path(prompt.meta["file"]).write_text(str(child.pid))
    if response.startswith("daemon"):
        script = pathlib.Path(prompt.meta["file"]).with_suffix(".py")
        script.write_text(DAEMON)
        subprocess.run([sys.executable, str(script), prompt.meta["file"]], check=True)
        while not os.path.exists(prompt.meta["file"]): time.sleep(0.01)
        if response == "daemon, stuck": time.sleep(600)
        if response == "daemon, killed": os.kill(os.getpid(), 9)
        if response == "daemon, exit": os._exit(4)
    if response.startswith("print"):
        print(response)
        print(response, file=sys.stderr, flush=True)
    if response == "raise": raise KeyError("two\\nlines")
    if response == "exit": sys.exit(3)
    if response == "interrupt": raise KeyboardInterrupt
    if response == "cancelled": raise asyncio.CancelledError("not yours")
    if response == "mute": raise Mute
    if response == "long": raise ValueError("x" * 10_000)
    if response == "large": return 1e30
    if response == "die": os._exit(4)
    if response == "kill": os.kill(os.getpid(), 9)
    if response == "signals":
        for number in (2, 15, 10): os.kill(os.getpid(), number)
    values = {"nan": float("nan"), "inf": -float("inf"), "none": None, "text": "1.0", "true": True, "pid": os.getpid()}
    return values.get(response, 0.25)
def forks(prompt, response):
    # as a library may do it: the child comes back from the function, and the parent waits for it
    child = os.fork()
    if child == 0 and response == "raise": raise KeyError
    if child == 0 and response == "exit": sys.exit()
    if child == 0: return -1.0
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def strays(prompt, response):
    # as if another process answered for this one
    with open(prompt.meta["file"], "a+") as file:
        file.seek(0)
        if len(file.read()) < prompt.meta["times"]:
            file.write("x")
            Connection(os.dup(int(sys.argv[1]))).send((0, Outcome("my_rewards:strays", "scored", 9.0)))
    return 1.0
def modules(prompt, response): return "torch" in sys.modules
class Mute(Exception):
    def __str__(self): raise RuntimeError
not_callable = 3
def no_arguments(response): return 1.0
class Table:
    def look_up(self, key): return {"a": 1.0}[key]
def nested(prompt, response):
    return Table().look_up(prompt.answer)
def through_a_library(prompt, response):
    import json
    return json.loads(response)
"""
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PATIENCE = 60.0  # seconds for what takes none, on a machine that may hold a process up


def pool(**settings):
    """Its deadline is one that only a stuck function misses."""
    functions = {"functions": ["my_rewards:by_text"], "workers": 2, "deadline": PATIENCE}
    return RewardPool(RewardConfig(**{**functions, **settings}))


def late(p):
    """The outcome of a stuck function, in a tenth of a second: a short deadline from the start would meet others."""
    p._workers._config = p._config.model_copy(update={"deadline": 0.1})
    return scored(p, "sleep")[0].status


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid):
    end = time.monotonic() + PATIENCE
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize(
    ("fusion", "reward", "first", "threshold", "success"),
    [("sum", 4.25, 0, 0.25, True), ("mean", 2.125, 0, 0.3, False), ("product", 1.0, 1, 0.3, True)],
)
def test_fusion_parts_and_success_of_the_first_function(folder, fusion, reward, first, threshold, success):
    parts = {"my_rewards:by_text": 0.25, "my_rewards:length": 4.0}
    names = list(parts) if first == 0 else list(parts)[::-1]
    p = pool(functions=names, fusion=fusion, success_threshold=threshold, workers=1)
    p.start()
    assert scored(p, "four") == [Score(reward, success, parts, "ok")]
    p.close()


def test_a_stuck_function_is_killed_and_the_others_go_on(folder):
    p = pool(deadline=5.0)  # which the others must not miss
    p.start()
    start = time.monotonic()
    results = scored(p, "spin", "sleep", *["fine"] * 6)
    took = time.monotonic() - start
    timeout = Score(0.0, False, {}, "reward_timeout")
    fine = Score(0.25, False, {"my_rewards:by_text": 0.25}, "ok")
    assert results == [timeout, timeout, *[fine] * 6]
    assert 5.0 <= took < PATIENCE  # the deadline and a restart, not the 300 seconds slept
    assert scored(p, *["fine"] * 20) == [fine] * 20  # by the new workers, from another event loop
    p.close()


def test_what_a_late_function_started_is_killed_with_it(folder):
    p = pool(workers=1)
    p.start()
    scored(p, "child", prompt=Prompt("p", text="?", meta={"file": str(folder / "child")}))
    child = int((folder / "child").read_text())
    assert alive(child) and late(p) == "reward_timeout" and gone(child)
    p.close()


@pytest.mark.parametrize("how", ["late", "killed", "exit", "fine"])
def test_a_daemon_of_a_function_ends_with_its_worker(folder, how):
    """It has left the session, has no parent, ignores signals, and has started one more with no environment."""
    p = pool(workers=1, on_error="zero")
    p.start()
    file = folder / "daemon"
    (score,) = scored(p, f"daemon, {how}", prompt=Prompt("p", text="?", meta={"file": str(file)}))
    pids = [int(pid) for pid in file.read_text().split()]
    if how in ("late", "fine"):
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
    if how == "late":
        assert late(p) == "reward_timeout"
    if how == "fine":
        p.close()
    assert score.status == ("ok" if how in ("late", "fine") else "reward_error")
    assert not [pid for pid in pids if not gone(pid)]
    p.close()


FAILURES = {
    "raise": "KeyError: 'two\\\\nlines' ({file}, line 25)",
    "exit": "SystemExit: 3 ({file}, line 26)",
    "interrupt": "KeyboardInterrupt ({file}, line 27)",
    "cancelled": "CancelledError: not yours ({file}, line 28)",
    "mute": "Mute ({file}, line 29)",
    "die": "its process ended: exit code 4",
    "kill": "its process ended: killed by SIGKILL",
    "nan": "ValueError: returned nan",
    "inf": "ValueError: returned -inf",
    "large": "ValueError: returned 1e+30, of more than 1e+18 in size",
    "none": "ValueError: returned None, not a number",
    "text": "ValueError: returned '1.0' of type str, not a number",
}


def test_failures_end_with_a_line_of_function_prompt_and_error(folder):
    p = pool(on_error="raise")
    p.start()
    for error, words in zip(scored(p, *FAILURES), FAILURES.values(), strict=True):
        assert isinstance(error, RewardError), error
        words = words.format(file=folder / "my_rewards.py").replace("\\\\", "\\")
        assert str(error).splitlines()[-1] == f"reward function my_rewards:by_text failed on prompt 'p7': {words}"
    assert [r.reward for r in scored(p, "true", "fine")] == [1.0, 0.25]
    p.close()


def test_a_long_error_is_cut(folder):
    p = pool(workers=1)
    p.start()
    (error,) = scored(p, "long")
    p.close()
    line = str(error).splitlines()[-1].removeprefix("reward function my_rewards:by_text failed on prompt 'p7': ")
    assert len(line) == 500 and line.startswith("ValueError: xxx") and line.endswith("my_rewards.py, line 30)")


def test_a_child_that_a_function_forks_answers_no_sample(folder):
    p = pool(functions=["my_rewards:forks", "my_rewards:length"], workers=1)
    p.start()
    for response, code in [("a", 0), ("raise", 1), ("exit", 0), ("four", 0)] * 5:
        assert scored(p, response)[0].parts == {"my_rewards:forks": code, "my_rewards:length": len(response)}
    p.close()


def test_a_module_that_forks_as_it_is_imported_makes_one_worker(folder):
    (folder / "forking.py").write_text("import os\nos.fork()\ndef pid(prompt, response): return os.getpid()\n")
    p = pool(functions=["forking:pid"], workers=1)
    p.start()
    assert len({scored(p, "x")[0].reward for _ in range(20)}) == 1
    p.close()


def test_a_reply_to_another_sample_replaces_the_worker_and_the_sample_is_scored_again(folder):
    p = pool(functions=["my_rewards:strays"], workers=1, on_error="zero")
    p.start()
    prompt = Prompt("p7", text="?", meta={"file": str(folder / "once"), "times": 1})
    assert [score.reward for _ in range(3) for score in scored(p, "x", prompt=prompt)] == [1.0] * 3
    (score,) = scored(p, "x", prompt=Prompt("p7", text="?", meta={"file": str(folder / "always"), "times": 100}))
    assert score.failure == (
        "my_rewards:strays: 3 workers got replies that are not theirs: another process writes to their sockets"
    )
    p.close()


def test_a_failure_shows_the_users_own_frames_the_row_and_the_response(folder):
    p = pool(functions=["my_rewards:nested"])
    p.start()
    prompt = Prompt("p7", text="How\x1b[31m many?", answer="b", where="problems.jsonl:4")
    (error,) = scored(p, "one\ntwo\x1b[2J " + "x" * 1000, prompt=prompt)
    p.close()
    file, lines = folder / "my_rewards.py", FUNCTIONS.splitlines()
    called, raised = (next(i for i, line in enumerate(lines, 1) if words in line) for words in ("Table()", "return {"))
    assert str(error).splitlines() == [
        f'  File "{file}", line {called}, in nested',
        "    return Table().look_up(prompt.answer)",
        f'  File "{file}", line {raised}, in look_up',
        *[line for line in str(error).splitlines() if "def look_up" in line],
        "prompt 'p7' (problems.jsonl:4): 'How many?', answer 'b'",
        f"response of 1012 characters: 'one two {'x' * 292}...'",
        "reward function my_rewards:nested failed on prompt 'p7' (problems.jsonl:4): KeyError: 'b' "
        f"({file}, line {raised})",
    ]


def test_frames_of_libraries_and_of_this_package_are_left_out(folder):
    p = pool(functions=["my_rewards:through_a_library"])
    p.start()
    (error,) = scored(p, "no JSON")
    p.close()
    assert str(error).count('  File "') == 1 and "in through_a_library" in str(error)


def test_failures_count_as_zero_where_asked(folder):
    p = pool(on_error="zero")
    p.start()
    scores = scored(p, *FAILURES)
    assert scores == [Score(0.0, False, {}, "reward_error")] * len(FAILURES)
    for score, words in zip(scores, FAILURES.values(), strict=True):
        words = words.format(file=folder / "my_rewards.py").replace("\\\\", "\\")
        assert score.failure == f"my_rewards:by_text: {words}"
    assert scored(p, "true")[0].success
    p.close()


def test_a_problem_that_no_worker_can_be_sent_is_a_failure_of_its_own(folder):
    deep = 1
    for _ in range(100_000):
        deep = [deep]
    p = pool(on_error="zero", workers=1)
    p.start()
    (score,) = scored(p, "fine", prompt=Prompt("p", text="?", answer=deep))
    assert (score.status, score.failure) == (
        "reward_error",
        "my_rewards:by_text: the problem is nested too deep to be sent to a worker",
    )
    assert scored(p, "fine")[0].status == "ok"
    p.close()


def test_a_worker_that_cannot_be_started_again_is_a_failure_and_no_end(folder):
    p = pool(on_error="zero", workers=1)
    p.start()
    (folder / "my_rewards.py").write_text("def by_text(:")
    statuses = [score.status for score in scored(p, "kill", "fine", "fine")]
    assert statuses == ["reward_error"] * 3
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    assert scored(p, "fine")[0].status == "ok"
    p.close()


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["my_rewards:absent"], "has no 'absent'"),
        (["my_rewards:not_callable"], "of type int and cannot be called"),
        (["broken:f"], "importing 'broken' of 'broken:f' failed: SyntaxError"),
        (["needy:f"], "importing 'needy' of 'needy:f' failed: ModuleNotFoundError: No module named 'absent' ("),
        (["my_rewards:no_arguments"], "no_arguments' takes (response), and is called with (prompt, response)"),
    ],
)
def test_a_function_that_cannot_be_loaded_stops_the_start(folder, functions, words):
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "needy.py").write_text("import absent\ndef f(prompt, response): return 1.0\n")
    p = pool(functions=functions)
    with pytest.raises(ValueError, match=r"reward\.functions: ") as error:
        p.start()
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not any(alive(worker.process.pid) for worker in p._workers.processes)


def test_workers_import_no_torch(folder):
    p = pool(functions=["my_rewards:modules", "math", "reasoning_gym"], workers=1, on_error="zero")
    p.start()
    assert scored(p, "x")[0].status == "reward_error"  # reasoning_gym: not its prompt; the imports are done
    p.close()
    p = pool(functions=["my_rewards:modules", "math"], workers=1)
    p.start()
    assert scored(p, r"\boxed{1}")[0].parts == {"my_rewards:modules": 0.0, "math": 1.0}
    p.close()


def test_what_a_function_prints_of_a_response_drives_no_terminal(folder, capfd):
    p = pool(workers=1)
    p.start()
    scored(p, "print \x1b[2J\x1b]52;c;cm0=\x07\rname \u202e\ud800")
    p.close()
    assert list(capfd.readouterr()) == ["print \\x1b[2J\\x1b]52;c;cm0=\\x07\\rname \\u202e\\ud800\n"] * 2


def test_signals_are_the_parents(folder):
    p = pool(workers=1)
    p.start()
    first, _, second = scored(p, "pid", "signals", "pid")
    assert first == second and second.status == "ok"
    p.close()


def test_an_idle_worker_that_died_is_replaced_without_a_word(folder):
    p = pool(workers=1)
    p.start()
    os.kill(int(scored(p, "pid")[0].reward), signal.SIGKILL)
    # A zombie is not enough: its other threads may hold the socket for a moment.
    p._workers.processes[0].process.wait(timeout=PATIENCE)
    assert scored(p, "fine")[0].status == "ok"
    p.close()


def test_close_ends_stuck_workers_at_once_and_scoring_after_it_is_an_error(folder):
    p = pool(deadline=2 * PATIENCE)
    p.start()

    async def close_while_stuck():
        tasks = [asyncio.create_task(p.score(Prompt("p", text="?"), "spin")) for _ in range(3)]
        await asyncio.sleep(0.5)
        start = time.monotonic()
        p.close()
        took = time.monotonic() - start
        return took, await asyncio.gather(*tasks, return_exceptions=True)

    pids = [worker.process.pid for worker in p._workers.processes]
    took, results = asyncio.run(close_while_stuck())
    assert took < END_TIMEOUT / 2, "workers were waited for in vain"
    assert all(isinstance(r, (RuntimeError, asyncio.CancelledError)) for r in results), results
    assert not any(alive(pid) for pid in pids)
    p.close()
    with pytest.raises(RuntimeError, match="not open"):
        asyncio.run(p.score(Prompt("p", text="?"), "x"))


@pytest.mark.skipif(sys.platform != "linux", reason="a stuck worker outlives its parent elsewhere")
@pytest.mark.parametrize("response", ["spin", "daemon, stuck"])
def test_workers_die_with_a_killed_parent(folder, response):
    script = f"""
        import asyncio, os
        from dynamo_megatron.config import RewardConfig
        from dynamo_megatron.types import Prompt
        from dynamo_megatron.reward import RewardPool
        pool = RewardPool(RewardConfig(functions=["my_rewards:by_text"], workers=2, deadline={2 * PATIENCE}))
        pool.start()
        async def main():
            stuck = asyncio.create_task(pool.score(Prompt("p", text="?", meta=dict(file="daemon")), "{response}"))
            await asyncio.sleep(0.3)
            print(*(w.process.pid for w in pool._workers.processes), flush=True)
            await stuck
        asyncio.run(main())
    """
    daemons = []
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        if response != "spin":
            end = time.monotonic() + PATIENCE
            while not (folder / "daemon").exists() and time.monotonic() < end:
                time.sleep(0.02)
            daemons = [int(pid) for pid in (folder / "daemon").read_text().split()]
            assert all(alive(pid) for pid in daemons)
        parent.kill()
    assert not [pid for pid in [*pids, *daemons] if not gone(pid)]
