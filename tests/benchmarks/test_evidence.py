"""docs/evidence.md has the tables of benchmarks/results/class_task_*.json, and no other ratios."""

import json
import re
from pathlib import Path

import pytest

from dynamo_megatron.comparison.table import as_markdown

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("class_task_*.json"))
PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def tables(file: Path) -> list[str]:
    text = as_markdown(json.loads(file.read_text(encoding="utf-8"))["comparison"], [])
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_page_has_the_tables_of_the_results(file):
    assert "\n".join(tables(file)[:6]) in PAGE, "final scores"
    assert all(line in PAGE for line in tables(file))


def test_every_interval_of_the_page_is_in_the_results():
    known = {
        interval for file in RESULTS for line in tables(file) for interval in re.findall(r"\([^()]* to [^()]*\)", line)
    }
    assert known
    assert set(re.findall(r"\([-+\d.]+ to [-+\d.]+\)", PAGE)) <= known


def test_the_page_of_gradient_variance_has_the_measured_variances():
    page = (ROOT / "docs" / "gradient-variance.md").read_text(encoding="utf-8").split("## Measured")[1]
    results = json.loads((ROOT / "benchmarks" / "results" / "gradient_variance.json").read_text(encoding="utf-8"))
    found = {
        (
            d["shape"],
            d["baseline"],
            d["allocator"],
        ): f"{d['variance']:.2f} ({d['interval'][0]:.2f} to {d['interval'][1]:.2f})"
        for d in results["class task, warm start"]["designs"]
    }
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    assert len(rows) > 12
    for shape, baseline, *cells in rows[2:]:
        for allocator, cell in zip(("uniform", "neyman bernoulli", "neyman energy"), cells, strict=True):
            assert cell == found.get((shape, baseline, allocator), ""), (shape, baseline, allocator)
