"""What servers and ranks have of the device memory in each phase of a run."""

from types import SimpleNamespace

from dynamo_megatron.tracking import phases as module
from dynamo_megatron.tracking.phases import Phases
from dynamo_megatron.weight_sync.memory import PHASES


class Recorded:
    def __init__(self):
        self.entered, self.now = [], 0.0

    def enter(self, phase):
        self.now += 3.0
        self.entered.append(phase)


def test_each_phase_gets_its_memory_and_the_time_of_it_is_its_own(monkeypatch):
    """On a clock of the test's own, which stands still but for what the memory takes."""
    memory = Recorded()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: memory.now))
    phases = Phases(None, memory)
    for phase in ("weight sync", "read data", *PHASES):
        phases.begin(phase)
    assert memory.entered == ["weight sync", *PHASES]
    assert phases.clock.seconds["memory"] == (1 + len(PHASES)) * 3.0 and phases.clock.seconds["update"] == 0
