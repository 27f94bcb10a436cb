"""The files and modules that pages, comments and docstrings name exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dynamo_megatron"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
CODE = [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").glob("*.py"), *(ROOT / "launcher").glob("*.py")]
OF_LIBRARIES = re.compile(  # Megatron-core's, SGLang's
    r"^(srt|distributed|optimizer|pipeline_parallel|tensor_parallel|layers|utils|configs)/"
)
OF_USERS = re.compile(r"^(my|own)_")
FOLDERS = [ROOT, PACKAGE, *(f for top in (ROOT, PACKAGE, ROOT / "tests") for f in top.iterdir() if f.is_dir())]


def missing(names: set[str]) -> list[str]:
    """Those that are in no folder of the checkout, of the package or of the tests."""
    ours = (name for name in sorted(names) if not OF_LIBRARIES.search(name) and not OF_USERS.search(name))
    return [name for name in ours if not any((folder / name).exists() for folder in FOLDERS)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    assert missing(set(re.findall(r"`([\w./-]+\.py)`", page.read_text(encoding="utf-8")))) == []


def test_files_that_comments_and_docstrings_name_exist():
    text = "\n".join(file.read_text(encoding="utf-8") for file in CODE)
    assert missing(set(re.findall(r"\w+/[\w/]+\.py\b|(?<=\()[a-z_]+\.py(?=\))", text))) == []


def test_modules_that_pages_name_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"\bdynamo_megatron(?:\.[a-z_]+)+", text))
    assert len(named) > 3 and [name for name in sorted(named) if not is_module_or_member(name)] == []


def is_module_or_member(name: str) -> bool:
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass
    module, _, member = name.rpartition(".")
    return hasattr(importlib.import_module(module), member)
