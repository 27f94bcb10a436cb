"""The sums of SGLang's hash of weights (weight_sync/proof.py, which has them in torch) in one read of a GPU tensor."""

import torch
import triton
import triton.language as tl


@triton.jit
def _lane(word, i, SEED: tl.constexpr, FACTOR: tl.constexpr, ROTATION: tl.constexpr):
    place = i * tl.full((), FACTOR, tl.uint32) + tl.full((), SEED, tl.uint32)
    x = word ^ place ^ ((i << ROTATION) | (i >> (32 - ROTATION)))
    x = (x ^ (x >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)  # MurmurHash3's fmix32
    x = (x ^ (x >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=("n", "start", "tiles"))
def tile_sums_kernel(
    words, sums, n, start, tiles, A: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """A program takes a tile of the int32 words [n], the first of which is word `start` of the whole tensor; sums int64
    [2, tiles]. A and B: seed, factor and rotation of the two lanes."""
    tile = tl.program_id(0).to(tl.int64)
    a, b = tl.zeros((BLOCK,), tl.uint32), tl.zeros((BLOCK,), tl.uint32)
    for offset in range(0, TILE, BLOCK):
        at = tile * TILE - start % TILE + offset + tl.arange(0, BLOCK)
        inside = (at >= 0) & (at < n)
        word = tl.load(words + at, inside, other=0).to(tl.uint32, bitcast=True)
        i = (start + at).to(tl.uint32)
        a += tl.where(inside, _lane(word, i, A[0], A[1], A[2]), 0)
        b += tl.where(inside, _lane(word, i, B[0], B[1], B[2]), 0)
    tl.store(sums + tile, tl.sum(a, 0).to(tl.uint32).to(tl.int64))
    tl.store(sums + tiles + tile, tl.sum(b, 0).to(tl.uint32).to(tl.int64))


def tile_sums(words: torch.Tensor, start: int, tile: int, lanes: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """int64 [2, tiles], modulo 2^32, of int32 words that begin with word `start`; `lanes`: (seed, factor, rotation)."""
    tiles = triton.cdiv(start % tile + len(words), tile)
    sums = words.new_empty(2, tiles, dtype=torch.int64)
    tile_sums_kernel[(tiles,)](words, sums, len(words), start, tiles, *lanes, TILE=tile, BLOCK=1024)
    return sums
