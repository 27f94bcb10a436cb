"""Logs of bounded size, whoever writes to them."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_megatron.runtime import log_files
from dynamo_megatron.runtime.log_files import LOG_BYTES, bound_log, mark, open_log, text_since

WRITER = f"""
import pathlib, sys, time
line = "x" * 1023
for number in range({2 * LOG_BYTES} // 1024):
    print(f"{{number:07}}{{line[7:]}}")
print("half", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(.1)
print("RuntimeError: the last word", flush=True)
raise SystemExit(3)
"""


def test_a_guarded_command_fills_no_more_than_two_logs_and_its_last_words_are_found(tmp_path):
    """As an SGLang server does, which inherits the descriptor of its log."""
    log = tmp_path / "logs" / "sglang-server-0.log"
    descriptor = open_log(log, 0o600)
    os.write(descriptor, b"RuntimeError: of an earlier incarnation\n")
    begin = mark(log)
    (tmp_path / "folder").mkdir()
    guard = [sys.executable, "-P", "-m", "dynamo_megatron.rollout.guard", str(tmp_path / "folder"), "--"]
    older = log.with_name("sglang-server-0.log.1")
    writer = [sys.executable, "-P", "-c", WRITER, str(older)]
    process = subprocess.Popen([*guard, *writer], stdin=subprocess.PIPE, stdout=descriptor, stderr=descriptor)
    os.close(descriptor)
    assert process.wait(120) == 3
    assert older.stat().st_size >= LOG_BYTES and log.stat().st_size <= LOG_BYTES
    assert stat.S_IMODE(older.stat().st_mode) == 0o600
    text = text_since(log, begin)
    assert text.endswith("half\nRuntimeError: the last word\n") and f"{2 * LOG_BYTES // 1024 - 1:07}x" in text
    assert "earlier" not in text
    assert not list(log.parent.glob(".*"))


def test_only_a_log_is_bounded_and_a_full_disk_cuts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "LOG_BYTES", 10)
    rewritten = os.open(tmp_path / "no-log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(rewritten, b"x" * 20)
    bound_log(rewritten)
    log = tmp_path / "rollout.log"
    appended = open_log(log, 0o600)
    os.write(appended, b"y" * 20)
    (tmp_path / ".rollout.log.1.tmp").mkdir()  # in the place of what the copy needs
    bound_log(appended)
    assert log.stat().st_size == (tmp_path / "no-log").stat().st_size == 20
    (tmp_path / ".rollout.log.1.tmp").rmdir()
    bound_log(appended)
    os.write(appended, b"z")
    assert log.read_text() == "z" and Path(f"{log}.1").read_text() == "y" * 10
    for descriptor in (rewritten, appended):
        os.close(descriptor)


def test_a_log_whose_copy_does_not_get_its_name_is_not_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "LOG_BYTES", 10)
    log = tmp_path / "rollout.log"
    descriptor = open_log(log, 0o600)
    os.write(descriptor, b"y" * 20)
    Path(f"{log}.1").mkdir()
    bound_log(descriptor)
    assert log.read_text() == "y" * 20 and not list(tmp_path.glob(".*"))
    Path(f"{log}.1").rmdir()

    def killed(descriptor, length):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "ftruncate", killed)
        bound_log(descriptor)
    assert log.read_text() == "y" * 20 and Path(f"{log}.1").read_text() == "y" * 10
    os.close(descriptor)


def test_two_guards_of_one_log_lose_nothing(tmp_path, monkeypatch):
    """As while a server is restarted: the second looks while the first is copying."""
    monkeypatch.setattr(log_files, "LOG_BYTES", 10)
    log, copy = tmp_path / "rollout.log", log_files.shutil.copyfileobj
    first, second = open_log(log, 0o600), open_log(log, 0o600)
    os.write(first, b"y" * 20)

    def slow(source, target):
        monkeypatch.setattr(log_files.shutil, "copyfileobj", copy)
        bound_log(second)
        os.write(second, b"last")
        copy(source, target)

    monkeypatch.setattr(log_files.shutil, "copyfileobj", slow)
    bound_log(first)
    assert Path(f"{log}.1").read_text() + log.read_text() == "y" * 10 + "last"
    bound_log(second)
    os.write(second, b"z" * 11)
    bound_log(second)
    assert Path(f"{log}.1").read_text() == "z" * 10 and not log.read_text() and not list(tmp_path.glob(".*"))
    for descriptor in (first, second):
        os.close(descriptor)


def test_a_process_and_its_children_log_to_a_bounded_file(tmp_path):
    code = """
import subprocess, sys, time
from pathlib import Path
from dynamo_megatron.runtime import log_files
log_files.LOG_BYTES, log_files.CHECK_EVERY = 1000, .1
log_files.log_to(Path(sys.argv[1]))
for number in range(300):
    print("line", number, flush=True)
    time.sleep(.005)
subprocess.run(["echo", "of a child"])
"""
    log = tmp_path / "logs" / "rollout.log"
    subprocess.run([sys.executable, "-P", "-c", code, str(log)], check=True, timeout=60)
    assert log.read_text().endswith("line 299\nof a child\n")
    assert 0 < log.stat().st_size < 3000 and log.with_name("rollout.log.1").stat().st_size == 1000


def test_a_log_is_not_opened_through_a_link(tmp_path):
    (tmp_path / "rollout.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        open_log(tmp_path / "rollout.log", 0o644)
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_log_got_since_is_bounded_and_begins_at_the_mark(tmp_path, monkeypatch):
    log = tmp_path / "a.log"
    begin = mark(log)
    assert begin == (0, 0)
    log.write_text("first\n")
    second = mark(log)
    with log.open("a") as file:
        file.write("second\n")
    assert text_since(log, begin) == "first\nsecond\n" and text_since(log, second) == "second\n"
    monkeypatch.setattr(log_files, "TAIL_BYTES", 4)
    assert text_since(log, begin) == "ond\n"
    time.sleep(0.01)
    log.with_name("a.log.1").write_text("moved\n")
    log.write_text("x\n")
    assert text_since(log, second) == "d\nx\n"
