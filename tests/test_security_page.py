"""docs/security.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", PAGE.read_text(encoding="utf-8"))
    assert len(named) >= 15
    missing = [(file, name) for file, name in named if not has(ROOT / file, name)]
    assert missing == []


def test_every_line_of_what_holds_names_a_test():
    section = PAGE.read_text(encoding="utf-8").partition("## What holds")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10 and [row for row in rows if "tests/" not in row.split(" | ")[-1]] == []


def has(file: Path, name: str) -> bool:
    return (
        file.is_file()
        and re.search(rf"^(async )?def {name}\b", file.read_text(encoding="utf-8"), re.MULTILINE) is not None
    )
