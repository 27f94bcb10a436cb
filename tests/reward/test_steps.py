"""Rewards of steps: what a function may return, and what its user reads where it returns something else."""

import math
import re

import pytest
from reward_service import PROMPT, scored

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardError, RewardPool
from dynamo_megatron.reward.functions import checked_steps

STEPS = """
import math
CASES = {
    "overlap": {"reward": 1, "steps": [(0, 3, 1.0), (2, 5, 1.0)]},
    "beyond": {"reward": 1, "steps": [(0, 99, 1.0)]},
    "nan": {"reward": 1, "steps": [(0, 2, math.nan)]},
}
def by_lines(prompt, response):
    if response in CASES:
        return CASES[response]
    steps, start = [], 0
    for line in response.splitlines(keepends=True):
        steps.append((start, start + len(line), 1.0 if "+" in line else -1.0))
        start += len(line)
    return {"reward": float("4" in response), "steps": steps}
def length(prompt, response):
    return len(response) / 100
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    (tmp_path / "my_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    return "my_steps:by_lines"


def test_a_number_has_no_steps():
    assert checked_steps(0.5, 10) == (0.5, []) and checked_steps({"reward": 1, "steps": []}, 0) == (1.0, [])


def test_steps_in_order_with_gaps_between_them():
    assert checked_steps({"steps": [[0, 2, 1], (5, 10, -0.5)], "reward": 0}, 10) == (0.0, [(0, 2, 1.0), (5, 10, -0.5)])


@pytest.mark.parametrize(
    "value, says",
    [
        ({"reward": 1.0}, r"a dictionary with the keys \['reward'\], not reward and steps"),
        ({"reward": 1.0, "steps": [], "why": ""}, "not reward and steps"),
        ({"reward": 1.0, "\n" * 999: []}, r"with the keys \['(\\n){39}, not reward and steps"),
        ({"reward": math.nan, "steps": []}, "returned nan"),
        ({"reward": None, "steps": []}, "returned None, not a number"),
        ({"reward": 1.0, "steps": 3}, r"returned steps 3, not a list of \(start, end, reward\)"),
        ({"reward": 1.0, "steps": "abc"}, "returned steps 'abc', not a list"),
        ({"reward": 1.0, "steps": [0.5]}, r"returned 0.5 as step 1, not \(start, end, reward\)"),
        ({"reward": 1.0, "steps": [(0, 5)]}, r"returned \(0, 5\) as step 1"),
        ({"reward": 1.0, "steps": [(0, 11, 1.0)]}, "returned step 1 from 0 to 11; give characters from 0, .* to 10"),
        ({"reward": 1.0, "steps": [(-1, 5, 1.0)]}, "returned step 1 from -1 to 5"),
        ({"reward": 1.0, "steps": [(4, 4, 1.0)]}, "returned step 1 from 4 to 4; .* at least one"),
        ({"reward": 1.0, "steps": [(0, 5, 1.0), (4, 6, 1.0)]}, "returned step 2 from 4 to 6; give characters from 5"),
        ({"reward": 1.0, "steps": [(0, 5.0, 1.0)]}, "returned step 1 from 0 to 5.0"),
        ({"reward": 1.0, "steps": [(False, 5, 1.0)]}, "returned step 1 from False to 5"),
        ({"reward": 1.0, "steps": [(0, 5, math.inf)]}, "returned inf, as the reward of step 1"),
        ({"reward": 1.0, "steps": [(0, 5, "1")]}, "returned '1' of type str, not a number, as the reward of step 1"),
        ({"reward": 1.0, "steps": [(0, 5, 1e30)]}, "of more than 1e.18 in size, as the reward of step 1"),
    ],
)
def test_what_is_no_reward_of_steps_is_one_line(value, says):
    with pytest.raises(ValueError, match=says) as error:
        checked_steps(value, 10)
    assert "\n" not in str(error.value)


def test_steps_of_functions_and_services_come_with_the_score(pool, serve, steps):
    service = serve(lambda samples, _: {"rewards": [{"reward": 2, "steps": [[1, 2, 0.25]]} for _ in samples]})
    started = pool(steps, "my_steps:length", service)
    (score,) = scored(started, "2+2\n=4\n")
    assert score.parts == {steps: 1.0, "my_steps:length": 0.07, service.url: 2.0}
    assert score.reward == pytest.approx(3.07) and score.success
    assert score.steps == [(0, 4, 1.0), (4, 7, -1.0), (1, 2, 0.25)]


@pytest.mark.parametrize("case", ["overlap", "beyond", "nan"])
def test_the_line_names_the_function(pool, steps, case):
    (error,) = scored(pool(steps), case)
    assert isinstance(error, RewardError)
    last = str(error).splitlines()[-1]
    assert re.match(r"reward function my_steps:by_lines failed on prompt 'p7': ValueError: returned ", last), last


def test_a_service_that_rewards_steps_beyond_the_response_is_named(pool, serve):
    service = serve(lambda samples, _: {"rewards": [{"reward": 2, "steps": [[1, 9, 0.25]]} for _ in samples]})
    (error,) = scored(pool(service), "abc")
    assert f"reward function {service.url} failed on prompt 'p7': returned step 1 from 1 to 9" in str(error)


def test_a_service_may_reward_a_thousand_steps_of_each_response(pool, serve, patient):
    """An answer of 2.2 MB, to a request with 64 responses of 2,000 characters."""
    steps = [[2 * i, 2 * i + 2, -0.12345678901234567] for i in range(1000)]
    service = serve(lambda samples, _: {"rewards": [{"reward": 1, "steps": steps} for _ in samples]})
    scores = scored(pool(service), *["x" * 2000] * 64)
    assert len(service.requests) == 1 and all(score.steps == list(map(tuple, steps)) for score in scores)


def test_what_a_service_returns_is_shortened_in_the_error(pool, serve):
    service = serve(lambda samples, _: {"rewards": [{"\u202e" * 999: 1, "steps": "\x1b" * 999}]})
    (error,) = scored(pool(service), "abc")
    last = str(error).splitlines()[-1]
    assert len(last) < 300 and last.isprintable()


def test_a_failed_reward_has_no_steps(pool, steps):
    (score,) = scored(pool(steps, on_error="zero"), "overlap")
    assert score.status == "reward_error" and score.steps == []
    assert score.failures == {steps: "wrong_format"} and score.parts == {}


def test_steps_of_a_service_are_kept_with_its_score(pool, serve):
    service = serve(lambda samples, number: {"rewards": [{"reward": number, "steps": [[0, 2, 0.5]]} for _ in samples]})
    started = pool(service, cache=1)
    first, second = scored(started, "abc"), scored(started, "abc")
    assert first == second and first[0].steps == [(0, 2, 0.5)]


def test_prime_is_no_function_of_a_response(steps):
    config = RewardConfig(functions=[steps, "prime"], prime={"model": "m"})
    started = RewardPool(config)
    started.start()
    try:
        (score,) = scored(started, "4+")
    finally:
        started.close()
    assert score.parts == {steps: 1.0} and score.reward == 1.0 and PROMPT.prompt_id == "p7"
