"""The simulator of benchmarks/asynchrony_simulated.py against runs whose time can be worked out by hand."""

import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
LENGTHS = [[30] * 4] * 10


@pytest.fixture(scope="module")
def simulator() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "asynchrony_simulated.py")))


def seconds(simulator, bound: int, train: float, servers: int = 1, concurrency: int = 8, lengths=LENGTHS) -> float:
    shape = simulator.Shape(servers, concurrency, 5, train, 0.5)
    return simulator.Simulation(shape, simulator.Service(0.1, 0.01, 0.0), lengths, bound).run().seconds


def test_without_a_bound_generation_and_training_take_turns(simulator):
    assert seconds(simulator, 0, 2.0) == pytest.approx(10 * (30 * 0.14 + 2.0 + 0.5))
    assert seconds(simulator, 0, 2.0, servers=2) == pytest.approx(10 * (30 * 0.12 + 2.0 + 0.5))
    assert seconds(simulator, 0, 2.0, concurrency=2) == pytest.approx(10 * (2 * 30 * 0.12 + 2.0 + 0.5))


def test_with_a_bound_the_slower_side_sets_the_pace(simulator):
    """Generation takes 4.2 s alone; the first step cannot overlap with anything, and servers rest during a push."""
    together = seconds(simulator, 1, 20.0)
    assert 10 * 20.5 + 4.2 <= together <= 10 * 20.5 + 2 * 4.2 + 1.0
    assert seconds(simulator, 1, 0.1) > 5 * 30 * 0.18  # the responses of two steps share iterations
    assert seconds(simulator, 4, 20.0) == pytest.approx(together, rel=0.1)


def test_a_long_response_delays_its_own_step_alone(simulator):
    rng = random.Random(0)
    lengths = [[300, *(rng.randint(5, 15) for _ in range(7))] for _ in range(30)]
    alone = seconds(simulator, 0, 12.0, lengths=lengths)
    assert seconds(simulator, 1, 12.0, lengths=lengths) < 0.75 * alone


def test_the_constants_are_found_from_the_steps_of_bound_0(simulator):
    rng = random.Random(1)
    lengths = [[rng.randint(5, 200) for _ in range(rng.randint(8, 32))] for _ in range(40)]
    generate = [0.02 * max(of) + 0.003 * sum(of) + 0.001 * 12 * len(of) for of in lengths]
    found = simulator.fitted([{"lengths": lengths, "generate": generate, "prompt tokens": 12}])
    assert (found.base, found.each, found.prefill) == pytest.approx((0.02, 0.003, 0.001))
