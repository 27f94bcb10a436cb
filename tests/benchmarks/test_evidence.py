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
