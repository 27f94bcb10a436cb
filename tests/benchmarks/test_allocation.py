import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import waterfill
from dynamo_megatron.algorithm.allocators import BUILT_IN

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(BENCHMARKS / "allocation.py"))


def test_the_plain_loop_is_the_published_procedure(benchmark):
    """And so is ours, on cases that it was not made from."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        size, low = int(rng.integers(1, 15)), int(rng.integers(1, 9))
        high, first = low + int(rng.integers(0, 20)), int(rng.integers(1, 12))
        budget = int(rng.integers(0, size * high + 5))
        seen = rng.choice([0, 1, 5, 30], size)
        priority = rng.choice([0.0, 0.01, 0.2, 0.25], size) if rng.integers(2) else rng.uniform(size=size)
        plain = benchmark["published_loop"](seen.tolist(), priority.tolist(), budget, low, high, first)
        assert plain == waterfill(seen, priority, budget, low, high, first).tolist()


def test_the_table_is_that_of_the_figures(benchmark, tmp_path):
    result = json.loads((RESULTS / "allocation.json").read_text())
    assert benchmark["markdown"](result) + "\n" == (RESULTS / "allocation.md").read_text()
    benchmark["draw"](result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_figures_are_still_those(benchmark):
    written = json.loads((RESULTS / "allocation.json").read_text())["variances"]
    now = json.loads(json.dumps(benchmark["variances"]()))
    assert len(written) == len(now)
    for row, again in zip(written, now, strict=True):
        assert [again.pop(key) for key in ("allocation", "beta", "bounds")] == [
            row.pop(key) for key in ("allocation", "beta", "bounds")
        ]
        assert again == pytest.approx(row, rel=1e-6)


def test_every_kind_is_timed(benchmark):
    """From history to counts, a million prompts within two seconds of CPU on the machine that the file names."""
    assert {config["kind"] for config in benchmark["WHOLE"].values()} == set(BUILT_IN)
    *_, largest = json.loads((RESULTS / "allocation.json").read_text())["timings"]
    assert largest["prompts"] == 10**6
    assert max(largest[f"RolloutAllocator, {name}"] for name in benchmark["WHOLE"]) < 2


@pytest.mark.full
def test_a_million_prompts_within_two_seconds_each(benchmark):
    won = np.random.default_rng(0).binomial(16, np.random.default_rng(1).beta(0.3, 0.3, 10**6))
    for name, config in benchmark["WHOLE"].items():
        allocator, ids = benchmark["seen_by"](config, won, 16, (8, 24))
        taken = benchmark["seconds"](lambda a=allocator, i=ids: a.allocate(i, 16 * len(i), step=1))
        assert taken < 2, name
