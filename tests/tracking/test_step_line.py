import pytest

from dynamo_megatron.tracking.progress import wrapped
from dynamo_megatron.tracking.step_line import FIELDS, PARTS, legend, step_line

STEP = {
    "step": 7,
    "reward/mean": 0.25,
    "reward/success": 0.5,
    "policy/entropy": 1.25,
    "allocation/n_min": 2,
    "allocation/n_max": 24,
    "rollout/response_length_mean": 345.6,
    "policy/loss": -0.0123,
    "policy/grad_norm": 0.5,
    "rollout/logprob_gap_mean": 1e-6,
    "time/step": 83.4,
    "time/generate": 60.0,
    "time/logprobs": 1.5,
    "time/update": 20.0,
    "time/reshard": 1.25,
    "time/evaluate": 0.0,
    "time/save": 0.5,
    "time/other": 0.15,
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
    assert step_line(STEP, 100) == (
        "step   7/100  reward  0.250  loss -0.0123  grad  0.500  time  83.40  gap 1e-06  entropy 1.250  len   345.6"
        "  solved 0.500  n  2..24   gen  60.00  upd  20.00  push   1.25  logp   1.50  eval   0.00  save   0.50"
        "  other   0.15"
    )


def test_with_rollouts_ahead_the_line_has_their_staleness_and_no_gap_that_was_not_measured():
    ahead = {key: value for key, value in STEP.items() if "gap" not in key} | {"rollout/staleness_mean": 0.5}
    line, text = step_line(ahead, 100), legend(100, ahead=True)
    assert "  gap     -  stale 0.50  entropy 1.250  " in line
    assert line.find("  entropy ") == step_line(ahead | STEP, 100).find("  entropy ")
    assert " stale: mean steps " in text and " stale: " not in legend(100)


@pytest.mark.parametrize(
    ("width", "labels"),
    [
        (80, "reward loss grad time gap"),
        (100, "reward loss grad time gap entropy"),
        (120, "reward loss grad time gap entropy len solved"),
        (160, "reward loss grad time gap entropy len solved n gen upd"),
    ],
)
def test_a_terminal_gets_the_important_fields_and_their_legend(width, labels):
    line, text = step_line(STEP, 100, width), legend(100, width)
    known = [field.label for field in (*FIELDS, *PARTS)]
    assert len(line) <= width
    assert [word for word in line.split() if word in known] == labels.split()
    assert [label for label in known if f" {label}: " in text or f" {label} (" in text] == labels.split()


@pytest.mark.parametrize("width", [None, 80, 120])
def test_the_lines_of_a_run_stand_in_columns(width):
    first, later = step_line(STEP, 100, width), step_line(LATER, 100, width)
    for field in (*FIELDS, *PARTS):
        assert first.find(f"  {field.label} ") == later.find(f"  {field.label} "), field.label


def test_the_legend_names_every_label_with_its_unit():
    text = legend(100)
    assert all(f" {field.label}: " in text for field in FIELDS) and all(f" {field.label} (" in text for field in PARTS)
    for unit in ("nats", "tokens", "time: s per step", "share"):
        assert unit in text


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_legend_takes_at_most_two_lines_of_a_terminal(width):
    assert len(wrapped(legend(100, width), width).splitlines()) <= 2
