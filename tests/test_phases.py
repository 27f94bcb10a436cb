"""What servers and ranks have of the device memory in each phase of a run."""

import time

import pytest

from dynamo_megatron.phases import MEMORY, Phases
from dynamo_megatron.weight_sync.memory import PHASES


class Recorded:
    def __init__(self):
        self.entered = []

    def enter(self, phase):
        time.sleep(0.01)
        self.entered.append(phase)


def test_each_phase_gets_its_memory_and_the_time_of_it_is_its_own():
    memory = Recorded()
    phases = Phases(None, memory)
    for phase in ("push weights", "read data", "generate", "logprobs", "update", "push weights", "failed step", "save"):
        phases.begin(phase)
    assert memory.entered == ["weights", "generate", "weights", "train", "weights", "failed step", "save"]
    assert set(memory.entered) <= PHASES.keys() and set(MEMORY.values()) - {None} == PHASES.keys()
    assert phases.clock.seconds["memory"] >= 0.07 and phases.clock.seconds["update"] < 0.01


def test_a_phase_that_is_none_is_refused():
    with pytest.raises(KeyError):
        Phases(None, Recorded()).begin("logprob")
