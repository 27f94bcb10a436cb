"""What pytest says of tests that are skipped on a fresh machine."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED = (
    "tests/agents/test_python_tool.py",
    "tests/launcher/test_slurm_script.py::test_shellcheck",
    "tests/reports/page/test_browser.py::test_marks_become_preference_pairs",
)


def test_missing_programs_are_one_line_with_what_installs_them(tmp_path):
    own = {name: value for name, value in os.environ.items() if name not in ("CI", "REQUIRED_TOOLS")}
    command = [sys.executable, "-P", "-m", "pytest", "-n", "1", *SKIPPED]
    said = subprocess.run(
        command, cwd=ROOT, env={**own, "PATH": str(tmp_path)}, capture_output=True, text=True, timeout=400
    ).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert line == (
        "SKIPPED [10] tools/debian_packages.sh: installs, as root, what these tests need: bubblewrap, chromium, "
        "shellcheck"
    ), said
