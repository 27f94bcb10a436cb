"""`pytest --shard 2/4` runs the second of four parts of the tests that were collected; `--record-durations` keeps how
long each file took in durations.json, by which the parts are cut. A file is never split: its tests share what takes
long (one launch of ranks, one server). Every part is computed alone, and the parts of one collection are a partition.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")


def pytest_addoption(parser):
    group = parser.getgroup("shards")
    group.addoption("--shard", metavar="I/N", help="run part I of N; whole files, by the durations in durations.json")
    group.addoption("--record-durations", action="store_true", help="write the seconds of the files that ran")


def pytest_configure(config):
    if config.getoption("record_durations"):
        config.pluginmanager.register(Recorder(config.rootpath))


def pytest_collection_modifyitems(config, items):
    if not (shard := config.getoption("shard")):
        return
    number, count = parse(shard)
    seconds = json.loads(DURATIONS.read_text())
    mine = set(pack({file_of(item.nodeid) for item in items}, seconds, count)[number - 1])
    config.hook.pytest_deselected(items=[item for item in items if file_of(item.nodeid) not in mine])
    items[:] = [item for item in items if file_of(item.nodeid) in mine]


def parse(shard: str) -> tuple[int, int]:
    number, _, count = shard.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--shard {shard}: want I/N with 1 <= I <= N, as in 2/4")
    return int(number), int(count)


def pack(files: Iterable[str], seconds: dict[str, float], count: int) -> list[list[str]]:
    """The files in `count` parts: the longest file first, each to the part that has the fewest seconds so far. A file
    without a duration counts as the median of those with one."""
    usual = statistics.median(seconds.values()) if seconds else 1.0
    parts: list[list[str]] = [[] for _ in range(count)]
    totals = [0.0] * count
    for file in sorted(files, key=lambda file: (-seconds.get(file, usual), file)):
        shortest = totals.index(min(totals))
        parts[shortest].append(file)
        totals[shortest] += seconds.get(file, usual)
    return parts


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Recorder:
    """Adds up set-up, test and tear-down by file. A file of which a test was skipped keeps its earlier duration."""

    def __init__(self, root: Path):
        self.root = root
        self.seconds: dict[str, float] = defaultdict(float)
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report):
        self.seconds[file_of(report.nodeid)] += report.duration
        if report.skipped:
            self.skipped.add(file_of(report.nodeid))

    def pytest_sessionfinish(self):
        known = json.loads(DURATIONS.read_text())
        known = {file: seconds for file, seconds in known.items() if (self.root / file).is_file()}
        fresh = {file: round(s, 1) for file, s in self.seconds.items() if file not in self.skipped or file not in known}
        DURATIONS.write_text(json.dumps(dict(sorted((known | fresh).items())), indent=0) + "\n")
