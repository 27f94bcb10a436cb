"""Rollouts that are not what they are said to be, in a recorded run: no weight, group or statistic learns from them."""

import dataclasses

import pytest
from background_run import json_lines, same_weights, step_lines, timeless

from dynamo_megatron.types import Rollout

pytestmark = pytest.mark.full

RESPONSE = 12  # tokens of every recorded response


def asked_for(rollout: Rollout) -> str:
    """The problem, the step and the index of a recorded rollout."""
    return f"{rollout.prompt_id}/{rollout.step}/{rollout.rollout_id[-3:]}"


def garble(rollout: Rollout) -> Rollout:
    """Garbage, an old weight version and NaN, one of each in step 1 and garbage in step 2."""
    match asked_for(rollout):
        case "problem-0/1/001" | "problem-2/2/000":
            return dataclasses.replace(rollout, engine_logprobs=[-0.1] * RESPONSE)
        case "problem-1/1/000":
            return dataclasses.replace(rollout, weight_versions=[(0, 0, 4), (3, 4, RESPONSE)])
        case "problem-3/1/001" | "problem-0/2/001":
            return dataclasses.replace(rollout, engine_logprobs=[float("nan")] * RESPONSE)
    return rollout


def left_out(rollout: Rollout) -> Rollout:
    return rollout if garble(rollout) is rollout else dataclasses.replace(rollout, status="rejected")


SAMPLED = "rollout/response_tokens"  # those of rejected rollouts, too


@pytest.mark.parametrize("old", ["pass", "update"])  # when they are found: before the update, or by its forward pass
def test_they_are_counted_and_training_is_as_if_they_had_not_come(replay, old):
    options = ("algorithm.modulation=null", f"algorithm.old_logprobs={old}")
    runs = [replay(f"{old}-{f.__name__}", f, *options) for f in (garble, left_out)]
    assert all(code == 0 for code, *_ in runs), [text[-2000:] for _, text, _ in runs]
    one, other = (output for *_, output in runs)
    metrics = step_lines(one)
    assert metrics[0]["rollout/rejected"] > 0 and all(m["rollout/logprob_gap_max"] < 0.1 for m in metrics)
    assert "rollouts rejected (" in runs[0][1] and "of server-" in runs[0][1]
    for row, without in zip(metrics, step_lines(other), strict=True):
        assert timeless(row | {SAMPLED: 0}) == timeless(without | {SAMPLED: 0})
    assert json_lines(one / "allocation.jsonl") == json_lines(other / "allocation.jsonl")
    assert same_weights(one / "hf", other / "hf")
