"""Ctrl-C while a command is still importing: one line and exit code 130, never Python's traceback."""

import os
import subprocess
import sys

# Sends SIGINT to the process whose command line has the word, when it imports the module.
INTERRUPTS = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MODULE"] and os.environ["WORD"] in open("/proc/self/cmdline").read():
            os.environ["MODULE"] = ""
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


def test_an_interrupt_while_packages_are_loaded_is_one_line(tiny_model, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    (tmp_path / "problems.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n' * 4)
    train = [f"model.path={tiny_model}", "data.source=problems.jsonl", "rollout.max_new_tokens=16", "output_dir=run"]
    train += ["data.batch_prompts=2", "model.dtype=float32"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *train],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "MODULE": "pydantic", "WORD": "train"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert last.startswith(("interrupted", "stopped by SIGINT while it started")), done.stderr
