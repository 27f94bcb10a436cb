"""The two 64-bit hashes of SGLang's weights_checker (0.5.23): a server on a CPU uses one, on a GPU the other.

`Sha256` is the first 8 bytes of SHA-256 over the bytes. `TileHash` (SGLang's Triton kernel gpu_tensor_hash) sums mixed
32-bit words over tiles of 8192, mixes each tile's sums and adds the tiles: parts may come in any order and from any
rank.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch.nn import functional

MASK = 0xFFFFFFFF
TILE_WORDS = 8192
CHUNK_WORDS = 1 << 22  # hashed at once; some 30 times as many bytes of temporaries
SEED = 0x243F6A88
SEEDS = (SEED, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & MASK)
POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))  # factor and rotation of each of the two lanes


class Sha256:
    """The hash of `nbytes` bytes, added as parts in any order; they are held in host memory until the end."""

    def __init__(self, nbytes: int):
        self._nbytes, self._parts = nbytes, {}

    def add(self, start: int, data: torch.Tensor) -> None:
        """`data`: any contiguous tensor; its first byte is byte `start`."""
        # `numpy` of a parameter itself would fix its storage, which is emptied where memory is released.
        self._parts[start] = data.flatten().view(torch.uint8).to("cpu", copy=True).numpy()

    def merge(self, other: Sha256) -> None:
        self._parts.update(other._parts)

    def digest(self) -> int:
        """Returns the hash. Bytes that no part covers (the vocabulary's padding) count as 0."""
        whole = np.zeros(self._nbytes, np.uint8)
        for start, part in self._parts.items():
            whole[start : start + len(part)] = part
        return int.from_bytes(hashlib.sha256(whole).digest()[:8], "big")


class TileHash:
    """The hash of `nbytes` bytes, added as parts in any order on any device; only 16 bytes for each tile of 32 KiB are
    held."""

    def __init__(self, nbytes: int):
        self._words = -(-nbytes // 4)
        self._covered: list[tuple[int, int]] = []  # words
        self._sums = torch.zeros(2, -(-self._words // TILE_WORDS), dtype=torch.int64)

    def add(self, start: int, data: torch.Tensor) -> None:
        """`data`: any contiguous tensor; its first byte is byte `start`. Parts begin and end on multiples of 4 bytes,
        except that the last part may end anywhere."""
        raw = data.flatten().view(torch.uint8)
        if tail := -len(raw) % 4:
            raw = torch.cat([raw, raw.new_zeros(tail)])
        assert start % 4 == 0 and (not tail or start // 4 + len(raw) // 4 == self._words), "a part within a word"
        self._add_words(start // 4, raw.view(torch.int32))

    def merge(self, other: TileHash) -> None:
        self._covered += other._covered
        self._sums += other._sums

    def digest(self) -> int:
        """Returns the hash. Bytes that no part covers (the vocabulary's padding) count as 0."""
        end = 0
        for first, last in sorted([*self._covered, (self._words, self._words)]):
            if first > end:
                self._add_words(end, torch.zeros(first - end, dtype=torch.int32))
            end = max(end, last)
        if not self._words:
            return 0
        high, low = (_mix((lane & MASK) ^ (self._words * 4 & MASK)) for lane in self._sums)
        x = ((int(high.sum()) << 32) + int(low.sum())) & 0xFFFFFFFFFFFFFFFF
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
        return x ^ (x >> 31)

    def _add_words(self, start: int, words: torch.Tensor) -> None:
        self._covered.append((start, start + len(words)))
        sums = []
        for offset in range(-(start % TILE_WORDS), len(words), CHUNK_WORDS):  # chunks begin with a tile
            chunk = words[max(0, offset) : offset + CHUNK_WORDS].long() & MASK
            first = start + max(0, offset)
            i = torch.arange(first, first + len(chunk), device=words.device) & MASK
            around = first % TILE_WORDS, -(first + len(chunk)) % TILE_WORDS  # words of these tiles in other parts
            lanes = []
            for seed, (factor, rotation) in zip(SEEDS, POSITION, strict=True):
                rotated = ((i << rotation) | (i >> (32 - rotation))) & MASK
                mixed = _mix(chunk ^ ((i * factor + seed) & MASK) ^ rotated)
                lanes.append(functional.pad(mixed, around).view(-1, TILE_WORDS).sum(1))
            sums.append(torch.stack(lanes))
        if sums:
            total = torch.cat(sums, 1).cpu()  # one transfer
            tile = start // TILE_WORDS
            self._sums[:, tile : tile + total.shape[1]] += total


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's fmix32 of values in [0, 2^32), int64."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)
