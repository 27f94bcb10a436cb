"""What ptxas makes of the kernels for GPUs that are not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def output_of(script: str, *words: str):
    command = [sys.executable, "-P", Path(__file__).with_name(script), *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.full
def test_no_spill_and_wide_loads():
    kernels = output_of("compile_kernels.py", "80,90,100")
    assert len(kernels) >= 12
    for name, k in kernels.items():
        assert k["spills"] == k["stack"] == k["local"] == 0 and k["registers"] <= 128, (name, k)
        if name.startswith(("statistics", "gradient")):
            # What is not 128 bits wide are a row's own values: two labels and targets, or six of the gradient.
            assert k["wide_loads"] >= 4 and k["narrow_loads"] <= 6, (name, k)
            assert k["fused"] >= 16, (name, k)
        if name.startswith("gradient_bf16"):
            # In place: no store before the barrier that follows the loads.
            order = k["order"]
            first, last = order.index("LDG.E.128"), len(order) - order[::-1].index("LDG.E.128")
            assert set(order[first:last]) == {"LDG.E.128"} and order[last] == "BAR.SYNC", (name, k)


def test_every_launch_binds_and_compiles():
    assert output_of("launch_kernels.py") == 39
