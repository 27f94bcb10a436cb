"""`make test-all SHARD=2/4`: parts that are whole files, and a partition."""

import json
from collections import Counter
from pathlib import Path

import pytest
import shards

pytest_plugins = ["pytester"]
SECONDS = {f"test_{name}.py": seconds for name, seconds in (("a", 50), ("b", 30), ("c", 20), ("d", 1))}


@pytest.fixture
def tree(pytester, monkeypatch):
    """Four files with a duration and one without, two tests in each."""
    names = [Path(file).stem for file in [*SECONDS, "test_new.py"]]
    pytester.makepyfile(**dict.fromkeys(names, "def test_1(): pass\ndef test_2(): pass"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they are imported anew by every run
    monkeypatch.setattr(shards, "DURATIONS", pytester.path / "durations.json")
    shards.DURATIONS.write_text(json.dumps(SECONDS))
    return pytester


def run(tree, *words):
    """The tests that ran, in their order, and the result of pytest with this plugin."""
    result = tree.runpytest_inprocess("-v", "-p", "shards", *words)
    return [line.split()[0] for line in result.outlines if " PASSED" in line], result


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_parts_are_a_partition_of_whole_files(request, count):
    """Of the files of this session, and of every file of tests here."""
    root = request.config.rootpath
    files = {str(file.relative_to(root)) for file in (root / "tests").rglob("test_*.py")}
    seconds = json.loads(shards.DURATIONS.read_text())
    parts = shards.pack(files, seconds, count)
    assert len(parts) == count
    assert Counter(file for part in parts for file in part) == Counter(files)
    assert parts == shards.pack(sorted(files, reverse=True), seconds, count)


def test_what_runs_is_a_partition_in_the_order_of_the_collection(tree):
    whole, _ = run(tree)
    parts = [run(tree, "--shard", f"{number}/3")[0] for number in (1, 2, 3)]
    assert len(whole) == 10 and Counter(whole) == Counter(test for part in parts for test in part)
    files = [{shards.file_of(test) for test in part} for part in parts]
    # 50 | 30 | median 25, then 20 to the third, which has the fewest seconds, and 1 to the second
    assert files == [{"test_a.py"}, {"test_b.py", "test_d.py"}, {"test_c.py", "test_new.py"}]
    assert all(part == [test for test in whole if test in part] for part in parts)


@pytest.mark.parametrize("shard", ["0/3", "4/3", "2", "a/b", "1/0", "-1/3"])
def test_a_part_that_is_none_is_refused(tree, shard):
    _, result = run(tree, f"--shard={shard}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --shard {shard}: want I/N with 1 <= I <= N, as in 2/4"])


def test_durations_are_recorded_by_file(tree):
    """The file that ran is measured, set-up included; a gone one is dropped; one that skips, or is not run, stays."""
    tree.path.joinpath("test_b.py").unlink()
    tree.makepyfile(test_c="import pytest\ndef test_1(): pytest.skip('no SLURM')")
    tree.makepyfile(
        test_new="import time, pytest\n@pytest.fixture\ndef slow(): time.sleep(0.3)\ndef test_1(slow): time.sleep(0.2)"
    )
    run(tree, "--record-durations", "test_c.py", "test_new.py")
    recorded = json.loads(shards.DURATIONS.read_text())
    assert 0.5 <= recorded.pop("test_new.py") < 45
    assert recorded == {"test_a.py": 50, "test_c.py": 20, "test_d.py": 1}
