import numpy as np
import pytest

from dynamo_megatron.reports.page.findings import findings

STEPS = 40
CHECKS = ("entropy", "reward and length", "gap between policy and engine", "damped tokens", "prompt sources")


def rows(**columns) -> list[dict]:
    """Metrics of STEPS steps that no check warns of, but for `columns` (entropy, reward, length, gap, damped)."""
    generator = np.random.default_rng(0)
    names = {"entropy": "policy/entropy", "reward": "reward/mean", "length": "rollout/response_length_mean"}
    names |= {"gap": "rollout/logprob_gap_mean", "damped": "policy/damped_share"}
    fine = {"entropy": np.full(STEPS, 1.0), "reward": generator.random(STEPS), "length": np.full(STEPS, 100.0)}
    fine |= {"gap": np.full(STEPS, 0.01), "damped": np.full(STEPS, 0.001)}
    values = fine | columns
    return [{"step": i + 1, **{names[k]: float(v[i]) for k, v in values.items()}} for i in range(STEPS)]


def states(record, metrics, sources=(), modulation=None) -> dict[str, str]:
    found = findings(record(metrics, modulation=modulation if modulation is not None else {}), sources)
    return {each["name"]: each["state"] for each in found}


def test_a_sound_run_has_no_warning(record):
    sources = [{"source": name, "visits": 100, "rollouts": 800} for name in ("a", "b")]
    assert states(record, rows(), sources) == dict.fromkeys(CHECKS, "fine")


rising = np.linspace(0.1, 0.9, STEPS)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"entropy": np.geomspace(1.0, 0.05, STEPS)}, CHECKS[0]),
        ({"reward": rising, "length": 100 + 200 * rising}, CHECKS[1]),
        ({"gap": np.geomspace(0.01, 0.2, STEPS)}, CHECKS[2]),
        ({"damped": np.zeros(STEPS)}, CHECKS[3]),
    ],
)
def test_a_fault_is_named_with_its_numbers(record, columns, name):
    found = states(record, rows(**columns))
    assert [each for each, state in found.items() if state == "warning"] == [name]
    text = next(each["text"] for each in findings(record(rows(**columns)), []) if each["name"] == name)
    assert any(c.isdigit() for c in text)


def test_a_gap_of_rounding_is_no_warning(record):
    assert states(record, rows(gap=np.geomspace(1e-8, 1e-6, STEPS)))[CHECKS[2]] == "fine"


def test_a_longer_response_without_more_reward_is_no_warning(record):
    assert states(record, rows(length=100 + 200 * rising))[CHECKS[1]] == "fine"


def test_a_source_that_starves(record):
    sources = [{"source": "rich", "visits": 100, "rollouts": 1000}, {"source": "poor", "visits": 30, "rollouts": 60}]
    found = findings(record(rows()), sources)[-1]
    assert found["state"] == "warning" and "poor: 2.00 in 30 visits" in found["text"]
    assert "rich" not in found["text"] and "all sources 8.15" in found["text"]


@pytest.mark.parametrize(
    ("visits", "rollouts", "state"),
    [
        (30, 130, "warning"),  # 4.33 a visit; half of what all sources get is 4.35
        (30, 131, "fine"),  # 4.37 of 4.35
        (20, 40, "warning"),
        (19, 38, "fine"),  # too few visits to tell
    ],
)
def test_when_a_source_starves(record, visits, rollouts, state):
    sources = [{"source": "rich", "visits": 100, "rollouts": 1000}]
    sources += [{"source": "poor", "visits": visits, "rollouts": rollouts}]
    assert findings(record(rows()), sources)[-1]["state"] == state


def test_what_was_not_measured_is_no_warning(record):
    short = [{"step": 1, "reward/mean": 0.5}]
    assert states(record, short) == dict.fromkeys(CHECKS, "not measured")
