"""Every launch of the Triton kernels, up to the compiled kernel, as on an H100 that is not there.

What the interpreter does not show: how Triton binds arguments (None, 1, odd sizes) and types the code with them.
"""

import subprocess
import sys
from types import SimpleNamespace

import torch

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.weight_sync.proof import LANES, TILE_WORDS


def test_every_launch_binds_and_compiles():
    """In a process of its own: in one with the interpreter there is nothing to compile."""
    run = subprocess.run([sys.executable, "-P", __file__], capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "49\n"


LEAST = PolicyLossConfig()
DYNAMO = PolicyLossConfig(clip_ratio_c=None, modulation=ModulationConfig())
MOST = PolicyLossConfig(0.2, 0.28, 3.0, ModulationConfig(), 0.1, "k1", 0.01)


def main() -> int:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from dynamo_megatron.kernels import layer_kernels, tile_hash
    from dynamo_megatron.kernels import triton_backend as backend
    from dynamo_megatron.kernels.types import Shard, Tokens

    hopper = SimpleNamespace(  # a driver that knows what it has and cannot run anything
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(hopper)
    compiled, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    for tokens, columns, rows in ((1, 1, 16), (3, 20, 33)):
        logits, labels = torch.randn(tokens, rows), torch.zeros(tokens, dtype=torch.int64)
        shard, v = Shard(0, rows, columns), torch.zeros(tokens)
        part, _ = backend.shard_statistics_(logits, labels, shard, 0.7)
        for shards in (1, 2):
            parts = torch.stack([part] * shards)
            backend.merge(parts, 1.0)
            backend.merge_with_loss(parts, 1.0, LEAST, Tokens(v, v, None), None)
            backend.merge_with_loss(parts, 0.7, DYNAMO, Tokens(v, v, v), ModulationRanges(*torch.zeros(3)))
            backend.merge_with_loss(parts, 0.7, MOST, Tokens(v, v, v, v, v), ModulationRanges(*torch.zeros(3)))
        for operand in (torch.float32, torch.bfloat16):
            for grad_entropy in (None, v):
                backend.logits_gradient_(logits, labels, shard, v, v, v, v, grad_entropy, 0.7, operand)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, heads, width in ((1, 1, 1), (3, 48, 64)):
            x, table = torch.zeros(tokens, 2 * heads, 2 * width, dtype=dtype)[:, heads:], torch.zeros(2, tokens, width)
            y = torch.zeros(tokens, 2 * width, dtype=dtype)
            layer_kernels.rotated(x, table, -1.0)
            for weights in (None, torch.zeros(tokens, 1)):
                layer_kernels.swiglu_gradient(layer_kernels.swiglu(y, weights), y, weights)
    for start, words in ((0, 1), (TILE_WORDS - 1, 2 * TILE_WORDS), (1 << 33, 17)):
        tile_hash.tile_sums(torch.zeros(words, dtype=torch.int32), start, TILE_WORDS, LANES)
    assert all("cubin" in kernel.asm for kernel in compiled)
    return len(compiled)


if __name__ == "__main__":
    print(main())
