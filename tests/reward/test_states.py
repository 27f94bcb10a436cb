"""The state of every reward function on a response, and the values of those that gave one."""

import pytest
from reward_service import scored

FUNCTIONS = """
import os, time
def first(prompt, response): return 1.0
def second(prompt, response):
    if response == "raise": raise KeyError("x")
    if response == "late": time.sleep(300)
    if response == "exit": os._exit(3)
    return {"text": "1", "none": None}.get(response, 0.5)
def third(prompt, response): return 0.25
"""
NAMES = ["my_states:first", "my_states:second", "my_states:third"]


@pytest.mark.parametrize(
    ("response", "status", "state", "third"),
    [
        ("raise", "reward_error", "crashed", True),
        ("none", "reward_error", "wrong_format", True),
        ("text", "reward_error", "wrong_format", True),
        ("exit", "reward_error", "crashed", False),  # what comes after it in its worker was not run
        ("late", "reward_timeout", "timed_out", False),
    ],
)
def test_the_function_that_failed_is_named_and_the_others_keep_their_values(
    pool, tmp_path, monkeypatch, response, status, state, third
):
    (tmp_path / "my_states.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    deadline = 5.0 if response == "late" else 60.0  # which the functions that answer must not miss
    p = pool(*NAMES, deadline=deadline, workers=1, on_error="zero")
    (score,) = scored(p, response)
    assert (score.reward, score.success, score.status) == (0.0, False, status)
    assert score.failures == {"my_states:second": state} and score.failure.startswith("my_states:second: ")
    assert score.parts == {"my_states:first": 1.0, **({"my_states:third": 0.25} if third else {})}
    (score,) = scored(p, "fine")
    assert score.status == "ok" and score.failures == {} and list(score.parts) == NAMES


def test_where_no_worker_can_be_started_each_function_has_crashed(pool, tmp_path, monkeypatch):
    (tmp_path / "my_states.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    p = pool("my_states:second", "my_states:third", workers=1, on_error="zero")

    def no_process(*_, **__):
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as crowded:
        crowded.setattr("subprocess.Popen", no_process)
        for response in ("exit", "fine"):
            (score,) = scored(p, response)
            assert score.failures == {"my_states:second": "crashed", "my_states:third": "crashed"}
            assert score.parts == {} and score.failure == "my_states:second: no more processes"
    assert scored(p, "fine")[0].parts == {"my_states:second": 0.5, "my_states:third": 0.25}


def test_a_service_has_a_state_of_its_own(serve, pool, tmp_path, monkeypatch):
    (tmp_path / "my_states.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    service = serve(lambda samples, _: {"rewards": ["?"]})
    p = pool("my_states:second", service, workers=1, on_error="zero")
    (score,) = scored(p, "fine")
    assert score.parts == {"my_states:second": 0.5} and score.failures == {service.url: "wrong_format"}
    (score,) = scored(p, "raise")
    assert score.parts == {} and score.failures == {"my_states:second": "crashed", service.url: "wrong_format"}
    service.answer = lambda samples, _: (404, b"")
    assert scored(p, "fine")[0].failures == {service.url: "crashed"}
