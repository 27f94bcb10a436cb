"""SLURM sends the signals that ask the ranks to stop to every process of a job, those that torch has started too."""

import signal
import subprocess
import sys

import pytest

SHARES = """
import os, sys, time, psutil, torch
from dynamo_megatron.weight_sync.transports.tensor import TensorTransport

transport = TensorTransport()
transport.stage(1, {"weight": torch.zeros(4)})
children = psutil.Process().children(recursive=True)
assert any("torch_shm_manager" in word for child in children for word in child.cmdline()), children
for child in children:
    child.send_signal(int(sys.argv[1]))
time.sleep(1)
print(transport.stage(2, {"weight": torch.zeros(4096)}))
children = psutil.wait_procs(children, 0)[1]
transport.end()
print(len(children), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_push_outlives_a_signal_to_all_children_of_a_rank(number):
    done = subprocess.run(
        [sys.executable, "-P", "-c", SHARES, str(int(number))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["16384", "2"]  # torch's manager of shared memory, multiprocessing's tracker
