import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynamo_megatron.weight_sync.tensor_hash import Sha256, TileHash

# SGLang 0.5.23's own kernel, in Triton's interpreter, on torch.arange(n) of a dtype
KERNEL = """
import importlib.util, sys, torch, triton
spec = importlib.util.spec_from_file_location("theirs", sys.argv[1])
theirs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(theirs)
seed, mask = 0x243F6A88, 0xFFFFFFFF
for n, dtype in ((10, "bfloat16"), (20001, "bfloat16"), (50000, "float32")):
    raw = torch.arange(n).to(getattr(torch, dtype)).view(torch.uint8)
    words = torch.cat([raw, raw.new_zeros(-len(raw) % 4)]).view(torch.uint32)
    tiles = torch.empty(triton.cdiv(len(words), 8192), dtype=torch.uint64)
    theirs.hash_tiles32_kernel_blocked[(len(tiles),)](
        words, tiles, len(words), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & mask,
        FM_C1=theirs.FMIX32_C1, FM_C2=theirs.FMIX32_C2, POS_A=theirs.POS_C1, POS_B=theirs.POS_C2,
        TILE=8192, BLOCK=256, USE_CG=True)
    total = torch.empty(1, dtype=torch.uint64)
    theirs.add_tree_reduce_u64_kernel[(1,)](tiles, total, len(tiles), CHUNK=1024)
    print(n, dtype, theirs._final_splitmix64(int(total.item())))
"""
SAID = {  # by KERNEL
    (10, "bfloat16"): 4084968716711240478,
    (20001, "bfloat16"): 14274851831382151356,
    (50000, "float32"): 11675425441195361721,
}


def hashed(kind, values: torch.Tensor, cuts: list[int]) -> int:
    """`values` in parts, the last one first."""
    running = kind(values.nbytes)
    for first, last in reversed(list(zip([0, *cuts], [*cuts, len(values)], strict=True))):
        running.add(first * values.element_size(), values[first:last])
    return running.digest()


@pytest.mark.parametrize(("n", "dtype"), SAID)
def test_a_gpu_servers_hash(n, dtype):
    values = torch.arange(n).to(getattr(torch, dtype))
    assert hashed(TileHash, values, []) == hashed(TileHash, values, [2, n // 3 // 2 * 2]) == SAID[n, dtype]


@pytest.mark.full
def test_its_kernel_says_the_same(interpreter):
    package = Path(importlib.util.find_spec("sglang").origin).parent
    source = package / "kernels" / "ops" / "memory" / "gpu_tensor_hash.py"
    command, environment = [sys.executable, "-P", "-c", KERNEL, str(source)], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=True)
    lines = (line.split() for line in done.stdout.splitlines())
    assert {(int(n), dtype): int(said) for n, dtype, said in lines} == SAID


def test_a_cpu_servers_hash():
    values = torch.arange(1001).bfloat16()
    want = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    assert f"{hashed(Sha256, values, [7, 500]):016x}" == want


@pytest.mark.parametrize("kind", [Sha256, TileHash])
def test_parts_of_two_ranks_with_padding_between_and_after_them(kind):
    values = torch.arange(60000).float()
    values[20000:30000] = values[50000:] = 0
    one, other = kind(values.nbytes), kind(values.nbytes)
    one.add(30000 * 4, values[30000:50000])
    other.add(0, values[:20000])
    one.merge(other)
    assert one.digest() == hashed(kind, values, [])
    values[123] += 1
    assert one.digest() != hashed(kind, values, [])
