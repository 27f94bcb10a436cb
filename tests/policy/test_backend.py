"""What stands in for Megatron's own functions on a CPU: the same values, bit for bit."""

import os
import subprocess
import sys

import pytest
import torch

ROPE = """
import torch
from megatron.core.models.common.embeddings import rope_utils
from dynamo_megatron.policy import backend

by_sequence = rope_utils._apply_rotary_pos_emb_thd
backend.enable_cpu()
backend.rotate_whole_batches()
at_once = rope_utils._apply_rotary_pos_emb_thd
assert at_once is not by_sequence


class Alone:
    def size(self): return 1
    def rank(self): return 0


ends = torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)  # three sequences and padding
angles = torch.rand(9, 1, 1, 8)  # of more positions than the longest sequence has
for dtype in (torch.float32, torch.bfloat16):
    values, upstream = torch.randn(16, 2, 12).to(dtype), torch.randn(16, 2, 12).to(dtype)  # 4 of 12 are not rotated
    values[13:] = 0
    found = []
    for rotate in (by_sequence, at_once):
        t = values.clone().requires_grad_()
        rotated = rotate(t, ends, angles, mscale=1.5, cp_group=Alone())
        rotated.backward(upstream)
        found.append((rotated.detach(), t.grad))
    assert found[0][0].shape == values.shape and not torch.equal(found[0][0], values)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1]), dtype
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron's own runs there")
def test_the_rotation_of_packed_sequences_is_megatrons():
    """In a process of its own: enabling the CPU changes torch."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, "-P", "-c", ROPE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr[-3000:]
