"""The order of a run's steps, in the loop of `train`."""

from types import SimpleNamespace

import pytest

from dynamo_megatron.config import Config
from dynamo_megatron.train import Sampled, Trainer

LOSS = {"loss": 1.0, "grad_norm": 1.0, "skipped": 0.0}


class Noted:
    """A part of a run whose methods only note their calls, or return what `returns` has for them."""

    def __init__(self, calls: list[str], **returns: object):
        self.calls, self.returns = calls, returns

    def __getattr__(self, name: str):
        def call(*given: object, **_: object):
            steps = [str(word) for word in given if isinstance(word, int)]
            self.calls.append(" ".join([name, *steps]))
            found = self.returns.get(name)
            return found(*given) if callable(found) else found

        return call


def a_run(calls: list[str], start: int, **trainer: object) -> Noted:
    run = Noted(calls, on_rank_0=lambda what, make: make())
    run.config = Config(
        model={"path": "m"}, data={"source": "s"}, output_dir="o", trainer={"steps": 3, **trainer}, seed=1
    )
    run.start, run.coordinator, run.phases = start, Noted([]), Noted([], report=None)
    run.phases.memory = None
    run.phases.clock = SimpleNamespace(restart=lambda: None, total=1.0, seconds={})
    return run


@pytest.mark.parametrize("start", [0, 1])
def test_a_step_samples_updates_and_syncs_before_it_is_evaluated_and_saved(start, monkeypatch):
    calls: list[str] = []

    def end_of(step):
        return SimpleNamespace(evaluate=step == 2, is_best=step == 2)

    run = a_run(calls, start)
    run.policy = Noted(calls, update=dict(LOSS), layout=None)
    run.policy.layout = SimpleNamespace(gather=lambda value: [value])
    controller = Noted(calls, end_of=end_of, evaluate=end_of)
    serving = Noted(calls, ask=lambda phase, what, make, **_: make())
    loop = Trainer(run, serving, controller)
    monkeypatch.setattr(
        loop, "sample", lambda step: calls.append(f"sample {step}") or Sampled(None, [1, 2], "stats", None, [])
    )
    monkeypatch.setattr(loop, "advantages", lambda step, sampled: calls.append("advantages"))
    monkeypatch.setattr(loop, "log", lambda step, *_: calls.append(f"log {step}"))
    loop.train()
    expected = [f"sync {start}", f"begin {start}", "save", "on_rank_0", f"end_of {start}"]
    for step in range(start, 4):
        if step > start:
            expected += [f"begin_step {step}", f"sample {step}", "advantages", "reference_logprobs", "update 1"]
            expected += ["update 2", f"sync {step}", f"log {step}", f"reached {step}"]
            expected += ["on_rank_0", f"end_of {step}"]
        expected += ["ask", f"evaluate {step}", "export_best"] if step == 2 else []
        expected += [f"save_if_due {step}"] if step > start else []
    assert calls == expected
