import pytest

from dynamo_megatron.tracking.metrics import log_line

STEP = {
    "step": 7,
    "reward/mean": 0.25,
    "reward/success": 0.5,
    "policy/entropy": 1.25,
    "allocation/n_min": 2,
    "allocation/n_max": 24,
    "time/step": 83.4,
    "rollout/response_length_mean": 345.6,
    "policy/loss": -0.0123,
    "policy/grad_norm": 0.5,
    "rollout/logprob_gap_mean": 1e-6,
    "rollout/logprob_gap_max": 1e-3,
    "time/generate": 60.0,
    "time/update": 20.0,
    "eval/pass@1": 0.987,
}
LATER = STEP | {
    "step": 100,
    "reward/mean": -0.125,
    "allocation/n_max": 128,
    "time/step": 1083.4,
    "rollout/response_length_mean": 12345.6,
    "policy/loss": 0.5,
    "policy/grad_norm": 12.5,
}


def test_without_a_terminal_everything_is_there():
    assert log_line(STEP, 100) == (
        "step   7/100  reward  0.250  success 0.500  entropy 1.250  n  2..24     83.4 s  length   345.6  loss -0.0123"
        "  grad   0.500  gap 1.0e-06/1.0e-03  generate   60.0 s  update   20.0 s"
    )


@pytest.mark.parametrize(("width", "last"), [(80, "n"), (90, "n"), (120, "loss"), (200, "update")])
def test_in_a_terminal_the_important_fields_that_fit_whole(width, last):
    line = log_line(STEP, 100, width)
    assert len(line) <= width and log_line(STEP, 100).startswith(line)
    assert [word for word in line.split() if word.isalpha() and word != "s"][-1] == last


@pytest.mark.parametrize("width", [None, 80, 120])
def test_the_lines_of_a_run_stand_in_columns(width):
    first, later = log_line(STEP, 100, width), log_line(LATER, 100, width)
    for name in ("reward", "success", "entropy", "n ", "length", "loss", "grad", "gap", "generate", "update"):
        assert first.find(f"  {name}") == later.find(f"  {name}"), name


def test_seconds_are_in_the_line_at_80_columns():
    assert log_line(STEP, 100, 80).endswith(" 83.4 s")
