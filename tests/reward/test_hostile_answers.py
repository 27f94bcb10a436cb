"""Thousands of responses of which some are made to hang, crash or fill what scores them."""

import json
import runpy
import shutil
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "hostile_answers.py"))


def check(found, count):
    """Every response has an outcome; the sound ones are right, and nothing hostile is."""
    outcomes = found["outcomes"]
    assert sum(each["count"] for each in outcomes) == count
    sound = [each for each in outcomes if not each["hostile"]]
    assert [(each["status"], each["success"]) for each in sound] == [("ok", True)]
    assert sum(each["count"] for each in sound) == count - count // BENCHMARK["EVERY"]
    assert not [each for each in outcomes if each["hostile"] and each["success"]]
    assert found["processes left"] == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if MEMORY in (p.info["cmdline"] or [])]


MEMORY = str((1 << 30) + 4096)  # in the command line of every sandbox of this file


def test_the_page_has_the_table_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "hostile_answers.json").read_text(encoding="utf-8"))
    assert f"\n\n{BENCHMARK['markdown'](results)}\n\n" in (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_texts():
    settings, hostile = BENCHMARK["TEXT"], BENCHMARK["HOSTILE_TEXT"]
    check(BENCHMARK["attacked"](settings, BENCHMARK["THREE"], BENCHMARK["SOUND_TEXT"], hostile, 8000, 20), 8000)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_programs():
    settings = {**BENCHMARK["CODE"], "code": {**BENCHMARK["CODE"]["code"], "memory": int(MEMORY)}}
    hostile = BENCHMARK["HOSTILE_PROGRAMS"]
    check(BENCHMARK["attacked"](settings, BENCHMARK["SUM"], BENCHMARK["SOUND_PROGRAM"], hostile, 2000, 20), 2000)
