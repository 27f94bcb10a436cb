import json

import planned
import pytest


def test_the_plan_is_within_a_quarter_of_every_committed_run_of_today_s_code():
    rates = {name: rate._asdict() for name, rate in planned.RATES.items()}
    found = json.loads(json.dumps({"rates": rates, "figures": planned.committed()}))
    assert found == json.loads((planned.RESULTS / "planned.json").read_text(encoding="utf-8"))  # `planned.py` writes it
    assert {row["figure"].split()[0] for row in found["figures"]} >= {"update", "logprobs", "generate", "push"}
    for row in found["figures"]:
        assert abs(row["planned over measured"] - 1) <= 0.25, row


def test_small_micro_batches_cost_their_launches():
    """64 micro-batches of a sequence each: 28 layers that the host launches for every one."""
    times = planned.plan_of_1_5b(1024, "trainer.micro_batch_tokens=1088").times
    assert times.logprobs == pytest.approx(64 * 28 * 1.8e-3) and times.update == pytest.approx(64 * 28 * 4.9e-3)
