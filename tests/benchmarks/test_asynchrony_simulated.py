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
    return simulator.Simulation(shape, simulator.Service(0.1, 0.01, 0.0, 0.0, 0.0), lengths, bound).run().seconds


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


def test_a_response_costs_its_context_and_a_weight_sync_reads_it_again(simulator):
    shape, service = simulator.Shape(1, 8, 5, 2.0, 0.5), simulator.Service(0.1, 0.01, 0.001, 0.002, 0.03)
    together = 4 * (0.03 + 5 * 0.002) + sum(0.14 + 0.001 * 4 * (5 + i) for i in range(30)) + 0.001 * 4 * 30 / 2
    alone = simulator.Simulation(shape, service, LENGTHS, 0).run()
    assert alone.waited == pytest.approx(10 * together, rel=1e-6)
    server = simulator.Server(service, 5)
    for _ in range(4):
        server.start(30, 1)
    ten = server.prefill + 10 * (0.14 + 0.001 * 20) + 0.001 * 4 * 10**2 / 2
    assert server.advance(ten) == [] and server.iteration == pytest.approx(10)
    server.interrupt(ten + 3.0)
    assert server.prefill == pytest.approx(4 * (15 * 0.002 + 0.03)) and server.next_end() > ten + 3.0
    assert server.advance(server.next_end()) == [1] * 4 and server.context == pytest.approx(0)


def test_the_constants_are_found_from_requests_that_come_together(simulator):
    known = simulator.Service(0.02, 0.003, 1e-5, 0.001, 0.004)
    probes = []
    for running in (1, 8, 32):
        for prompt in (12, 100):
            for tokens in (1, 20, 60):
                server = simulator.Server(known, prompt + 1)
                for _ in range(running):
                    server.start(tokens - 1, 0)
                    server.prefill -= known.prefill  # the first token comes with the prompt
                seconds = server.next_end()
                probes.append({"running": running, "prompt": prompt, "tokens": tokens, "seconds": seconds})
    found = simulator.fitted(probes)
    for name in ("base", "each", "context", "prefill", "request"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-3), name
