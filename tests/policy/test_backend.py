"""What stands in for Megatron's own functions: the same values."""

import os
import subprocess
import sys

import pytest
import torch

FUNCTIONS = """
from types import SimpleNamespace
import torch
from megatron.core.fusions import fused_bias_swiglu as swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers as linears
from dynamo_megatron.kernels.layers import rotary_table
from dynamo_megatron.policy import backend

y, gradient, weights = torch.randn(4, 10), torch.randn(4, 5), torch.rand(4, 1)
CALLS = {
    "swiglu": (y,),
    "swiglu_back": (gradient, y),
    "weighted_swiglu": (y, weights),
    "weighted_swiglu_back": (gradient, y, weights),
}
by_sequence = rope_utils._apply_rotary_pos_emb_thd
theirs = {name: getattr(swiglu, name)(*given) for name, given in CALLS.items()}
gradients = [[torch.randn(3, 2), torch.randn(5)] for _ in range(2)]
gradients[1] = [g.clone() for g in gradients[0]]
backend.enable_cpu()
norm, _ = clip_grads.l2_norm_impl(1, None, [gradients[0]], False)
clip_grads.multi_tensor_scale_impl(1, None, [gradients[0], gradients[0]], 0.3)
backend.use_layer_functions(torch.float32, transformer_engine=False)


alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
ends = torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)  # three sequences and padding
positions = torch.cat([torch.arange(n) for n in ends.diff()])
frequencies = torch.rand(6)
angles = torch.outer(torch.arange(9.0), frequencies)[:, None, None].repeat(1, 1, 1, 2)  # of more positions than needed
found = []
table = rotary_table(positions, frequencies)
for rotate, freqs in ((by_sequence, angles), (rope_utils._apply_rotary_pos_emb_thd, table)):
    t = torch.rand(16, 2, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rotated = rotate(t, ends, freqs, mscale=1.0, cp_group=alone)
    rotated.backward(rotated.detach().flip(0))
    found.append((rotated.detach(), t.grad))
assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])

for name, given in CALLS.items():
    torch.testing.assert_close(getattr(swiglu, name)(*given), theirs[name])

assert torch.equal(clip_grads.l2_norm_impl(1, None, [gradients[1]], False)[0], norm)
clip_grads.multi_tensor_scale_impl(1, None, [gradients[1], gradients[1]], 0.3)
assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))

main_grad = torch.ones(3, 2)
linears.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(y[:, :2].bfloat16(), y[:, 2:5].bfloat16(), main_grad)
torch.testing.assert_close(main_grad, 1 + y[:, 2:5].bfloat16().float().t() @ y[:, :2].bfloat16().float())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron's own runs there")
def test_what_layers_use_is_megatrons():
    """In a process of its own: enabling the CPU changes torch."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, "-P", "-c", FUNCTIONS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr[-3000:]
