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


GRADIENTS = json.loads((ROOT / "benchmarks" / "results" / "gradient_variance.json").read_text(encoding="utf-8"))


def measured() -> dict[str, str]:
    """label -> its section of docs/gradient-variance.md."""
    page = (ROOT / "docs" / "gradient-variance.md").read_text(encoding="utf-8")
    sections = page.split("\n## Measured")[1:]
    return {re.search(r'label\s+"([^"]+)"', section)[1].replace("\n", " "): section for section in sections}


def rows(section: str, first: str) -> list[list[str]]:
    """Of the table whose header begins with `first`."""
    (table,) = (block for block in section.split("\n\n") if block.startswith(f"| {first} |"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_the_page_of_gradient_variance_has_a_section_for_each_measurement():
    assert measured().keys() == GRADIENTS.keys()


@pytest.mark.parametrize("label", GRADIENTS)
def test_the_page_of_gradient_variance_has_the_measured_variances(label):
    found = {
        (
            d["shape"],
            d["baseline"],
            d["allocator"],
        ): f"{d['variance']:.2f} ({d['interval'][0]:.2f} to {d['interval'][1]:.2f})"
        for d in GRADIENTS[label]["designs"]
    }
    table = rows(measured()[label], "shape")
    assert len(table) > 12
    for shape, baseline, *cells in table:
        for allocator, cell in zip(("uniform", "neyman bernoulli", "neyman energy"), cells, strict=True):
            assert cell == found.get((shape, baseline, allocator), ""), (shape, baseline, allocator)


@pytest.mark.parametrize("label", [label for label, section in measured().items() if "| tokens |" in section])
def test_the_page_of_gradient_variance_has_the_measured_energies(label):
    energy = GRADIENTS[label]["energy"]
    wanted = []
    for row in energy["wrong over right"]:
        low, high = row["tokens"]
        ratios = [f"{row[key]:.2f}" for key in ("S0/S1", "|g|^2 of wrong over right")]
        wanted.append([f"{low} to {high}", str(row["right"]), str(row["wrong"]), *ratios])
    assert rows(measured()[label], "tokens") == wanted
    assert f"correlation of the logarithms {energy['log-correlation']:.2f}" in " ".join(measured()[label].split())
