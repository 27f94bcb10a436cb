"""The checksums of weights: what differs is named, whichever ranks sent the parts; running servers report the same."""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dynamo_megatron.models import load_model_config
from dynamo_megatron.weight_sync.proof import ExpectedChecksums, Sha256, TileHash, compare, joined

QUERIES, KEYS = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "qk")
FUSED = "model.layers.1.self_attn.qkv_proj.weight"
ONE = "1 parameters are not those that were sent: "


@pytest.fixture(scope="module")
def model(make_tiny_model, tmp_path_factory):
    """make(family, dtype) -> (its folder, spec, tensors); equally many query and key heads, so that they can swap."""

    def make(family: str = "qwen3", dtype: str = "bfloat16"):
        folder = tmp_path_factory.mktemp("models") / family
        options = {"vocab": 131, "heads": 4, "kv_heads": 4, "tied": family == "qwen2"}
        make_tiny_model(folder, family, dtype=dtype, **options)
        return folder, load_model_config(folder), load_file(folder / "model.safetensors")

    return make


def expected(spec, parts, tp=1, device="cpu"):
    """What rank 0 makes of `parts`, the tensors that each training rank sends."""
    ranks = [ExpectedChecksums(spec, tp, device) for _ in parts]
    for checksums, tensors in zip(ranks, parts, strict=True):
        checksums.add(tensors.items())
    return joined([c._hashes for c in ranks], tp)


@pytest.fixture
def server(server_parameters):
    """server(spec, tensors, tp) -> the `ranks` that an honest server on a CPU would report of `tensors`."""

    def report(spec, tensors, tp=1):
        reports = []
        for rank in range(tp):
            checksums = {}
            for name, values in server_parameters(spec, tensors, rank, tp).items():
                raw = values.contiguous().view(torch.uint8).numpy().tobytes()
                checksums[name] = hashlib.sha256(raw).hexdigest()[:16]
            reports.append({"checksums": checksums, "parallelism_info": [{"tp_rank": rank}]})
        return reports

    return report


def wrong(tensors):
    """What must be noticed -> (tensors with it, the parameter to be named)."""
    one = tensors[KEYS].clone()
    one.view(torch.int16 if one.dtype is torch.bfloat16 else torch.int32)[3, 5] ^= 1
    yield "the last bit of one value", {**tensors, KEYS: one}, FUSED
    yield "q and k swapped", {**tensors, QUERIES: tensors[KEYS], KEYS: tensors[QUERIES]}, FUSED
    flipped = tensors["model.norm.weight"].flip(0)
    yield "a norm in another order", {**tensors, "model.norm.weight": flipped}, "model.norm.weight"


@pytest.mark.parametrize("tp", [1, 2])
def test_what_differs_is_named(model, server, tp):
    _, spec, tensors = model()
    should = expected(spec, [tensors], tp)
    assert compare(should, server(spec, tensors, tp)) is None
    for what, changed, name in wrong(tensors):
        assert compare(should, server(spec, changed, tp)) == f"{ONE}{name}", what
    lacking = {n: t for n, t in tensors.items() if n != KEYS}
    assert compare(expected(spec, [lacking], tp), server(spec, tensors, tp)) == f"{ONE}{FUSED}"
    ranks = server(spec, tensors, tp)
    del ranks[-1]["checksums"]["model.norm.weight"]
    ranks[-1]["checksums"]["model.bias"] = "0"
    assert compare(should, ranks).endswith(": model.bias, model.norm.weight")
    assert compare(should, server(spec, tensors, 3 - tp)).endswith(f"where {tp} are expected")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_of_several_ranks_are_one_parameter(model, device):
    _, spec, tensors = model("qwen3_moe")
    parts = [
        {n: t for n, t in tensors.items() if (".mlp.experts." not in n and rank == 0) or f"experts.{rank}" in n}
        for rank in range(4)
    ]
    assert expected(spec, parts, 2, device) == expected(spec, [tensors], 2, device)
    parts[1].popitem()
    assert len(expected(spec, parts, 2, device)[0]) == len(expected(spec, [tensors], 2, device)[0]) - 1


# -- the two hashes ----------------------------------------------------------------------------------------------------
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


def hashed(kind, values: torch.Tensor, cuts: list[int]) -> str:
    """`values` in parts, the last one first."""
    running = kind(values.nbytes)
    for first, last in reversed(list(zip([0, *cuts], [*cuts, len(values)], strict=True))):
        running.add(first * values.element_size(), values[first:last])
    return running.digest()


@pytest.mark.parametrize(("n", "dtype"), SAID)
def test_a_gpu_servers_hash(n, dtype):
    values = torch.arange(n).to(getattr(torch, dtype))
    assert hashed(TileHash, values, []) == hashed(TileHash, values, [2, n // 3 // 2 * 2]) == f"{SAID[n, dtype]:016x}"


@pytest.mark.full
def test_its_kernel_says_the_same(interpreter):
    package = Path(importlib.util.find_spec("sglang").origin).parent
    source = package / "kernels" / "ops" / "memory" / "gpu_tensor_hash.py"
    command, environment = [sys.executable, "-P", "-c", KERNEL, str(source)], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=True)
    lines = (line.split() for line in done.stdout.splitlines())
    assert {(int(n), dtype): int(said) for n, dtype, said in lines} == SAID


@pytest.mark.parametrize("kind", [Sha256, TileHash])
def test_parts_of_two_ranks(kind):
    values = torch.arange(60000).float()
    one, other = kind(values.nbytes), kind(values.nbytes)
    one.add(30000 * 4, values[30000:])
    other.add(0, values[:20000])
    other.add(20000 * 4, values[20000:30000])
    assert one.left == 30000 * 4
    one.merge(other)
    assert not one.left and one.digest() == hashed(kind, values, [])
    if kind is Sha256:
        assert one.digest() == hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
