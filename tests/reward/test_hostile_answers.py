"""Thousands of responses of which some are made to hang, crash or fill what scores them."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
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


def test_a_sound_response_is_scored_as_fast_after_hostile_ones():
    results = json.loads((ROOT / "benchmarks" / "results" / "hostile_answers.json").read_text(encoding="utf-8"))
    for kind in (results["texts"], results["programs"]):
        before, after = (kind[f"sound responses {when}"]["a second"] for when in ("before", "after"))
        assert after >= 0.9 * before


ESCAPING = """
import os, runpy, subprocess, sys
from pathlib import Path

def score(prompt, response):
    if response == "escape":  # another session, and the guard of this worker is ended
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
        Path("escaped").open("a").write(f"{child.pid}\\n")
        os.kill(os.getppid(), 9)
    return 1.0

if __name__ == "__main__":
    main = runpy.run_path(sys.argv.pop(1))["main"]
    settings = {"functions": ["escaping:score"], "deadline": 60.0}
    main.__globals__.update(RESULTS=Path("results.json"), TEXT=settings, CODE=settings, seconds_a_test=lambda n: {})
    main.__globals__.update(HOSTILE_TEXT=["escape"], HOSTILE_PROGRAMS=["nothing"])
    main()
"""


def test_a_process_that_escapes_is_counted(tmp_path):
    script = tmp_path / "escaping.py"
    script.write_text(ESCAPING)
    command = [sys.executable, "-P", script, ROOT / "benchmarks" / "hostile_answers.py"]
    asked = ["--texts", "50", "--programs", "49", "--timed", "5", "--rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    try:
        with open(tmp_path / "log", "w") as log:
            code = subprocess.run(
                [*command, *asked], cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=300
            ).returncode
        assert code == 0, (tmp_path / "log").read_text()[-3000:]
        escaped = (tmp_path / "escaped").read_text().split()
        assert json.loads((tmp_path / "results.json").read_text())["texts"]["processes left"] == len(escaped) > 0
    finally:
        if (tmp_path / "escaped").exists():
            for pid in (tmp_path / "escaped").read_text().split():
                os.kill(int(pid), signal.SIGKILL)


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
