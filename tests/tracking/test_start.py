"""What a terminal shows from the launch on, while the user's data come slowly."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time

import pytest
import yaml

SLOW_DATA = """
import time

def rows():
    for number in range(1500):
        yield {"id": str(number), "problem": "1+1", "answer": "2"}
    time.sleep(3.5)
    yield {"id": "broken"}
"""


@pytest.mark.full
def test_a_slow_start_shows_its_phase_rows_and_seconds(tiny_model, tmp_path):
    (tmp_path / "slow_data.py").write_text(SLOW_DATA)
    config = {
        "model": {"path": str(tiny_model), "dtype": "float32", "max_length": 128},
        "data": {"source": "slow_data:rows", "limit": 2000, "on_bad_row": "error", "template": "{prompt}"},
        "rollout": {"max_new_tokens": 8},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", str(tmp_path / "config.yaml")],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"},
    )
    os.close(theirs)
    written, deadline = "", time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            written += os.read(ours, 65536).decode()
        except OSError:  # Linux: the other side is closed
            break
    os.close(ours)
    assert process.wait(10) == 2, written
    states = [" ".join(piece.split()) for piece in written.replace("\n", "\r").split("\r")]
    shown = list(dict.fromkeys(state for state in states if state))
    assert shown[0].startswith("loading packages "), shown  # before torch is imported
    assert any(state.startswith("loading tokenizer ") for state in shown)
    seconds = {state for state in shown if state.startswith("loading data 1,500 problems ")}
    assert len(seconds) >= 3, shown  # the timer rewrote the line while the main thread waited for a row
    assert not any("ETA" in state for state in shown)
    assert "broken" in shown[-1] or "no 'problem'" in shown[-1]
