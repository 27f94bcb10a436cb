"""Proof of sync: hashes of the server's own parameters as they should be, and whether a server has just those.

SGLang's `weights_checker` (0.5.23) has two 64-bit hashes: a server on a CPU uses `Sha256`, one on a GPU `TileHash`.

The ranks that send weights hash what they send, cut and fused as each server rank holds it; rank 0 gathers the hashes
and compares them with what SGLang's `weights_checker` says of the server's memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from dynamo_megatron.models.mapping import HF_EMBEDDING, HF_HEAD
from dynamo_megatron.models.server_layout import check_server_parallel, server_layout, server_shard
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.rollout.servers.server_api import CONTROL_TIMEOUT, Endpoint, call_for
from dynamo_megatron.runtime.plain_text import on_one_line

NAMED = 5  # parameters that a message names
MASK = 0xFFFFFFFF
TILE_WORDS = 8192
CHUNK_WORDS = 1 << 22  # hashed at once; some 30 times as many bytes of temporaries
SEED = 0x243F6A88
# Seed, factor and rotation of each of the two lanes
LANES = ((SEED, 0x27D4EB2D, 15), (((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & MASK, 0x165667B1, 13))


class Sha256:
    """The first 8 bytes of SHA-256 over `nbytes` bytes, added as parts in any order; they are held in host memory until
    the end."""

    def __init__(self, nbytes: int):
        self.left = nbytes
        self._parts: dict[int, np.ndarray] = {}

    def add(self, start: int, data: torch.Tensor) -> None:
        """`data`: any contiguous tensor; its first byte is byte `start`."""
        # `numpy` of a parameter itself would fix its storage, which is emptied where memory is released.
        self._parts[start] = data.flatten().view(torch.uint8).to("cpu", copy=True).numpy()
        self.left -= data.nbytes

    def merge(self, other: Sha256) -> None:
        self.left -= sum(map(len, other._parts.values()))
        self._parts.update(other._parts)

    def digest(self) -> str:
        """Returns the hash, 16 hex digits, once no bytes are left."""
        return hashlib.sha256(np.concatenate([self._parts[start] for start in sorted(self._parts)])).hexdigest()[:16]


class TileHash:
    """The hash of `nbytes` bytes, added as parts in any order on any device; only 16 bytes for each tile of 32 KiB are
    held. As SGLang's kernel gpu_tensor_hash, it sums mixed 32-bit words over tiles of 8192, mixes each tile's sums and
    adds the tiles."""

    def __init__(self, nbytes: int):
        self.left, self._nbytes, self._words = nbytes, nbytes, -(-nbytes // 4)
        self._sums = torch.zeros(2, -(-self._words // TILE_WORDS), dtype=torch.int64)

    def add(self, start: int, data: torch.Tensor) -> None:
        """`data`: any contiguous tensor; its first byte is byte `start`. Parts begin and end on multiples of 4 bytes,
        except that the last part may end anywhere."""
        self.left -= data.nbytes
        raw = data.flatten().view(torch.uint8)
        if tail := -len(raw) % 4:
            raw = torch.cat([raw, raw.new_zeros(tail)])
        assert start % 4 == 0 and (not tail or start + len(raw) == self._words * 4), "a part within a word"
        start, words = start // 4, raw.view(torch.int32)
        if len(words):
            total = tile_sums(words, start).cpu()  # one transfer
            tile = start // TILE_WORDS
            self._sums[:, tile : tile + total.shape[1]] += total

    def merge(self, other: TileHash) -> None:
        self.left -= other._nbytes - other.left
        self._sums += other._sums

    def digest(self) -> str:
        """As `Sha256.digest`."""
        high, low = (_mix((lane & MASK) ^ (self._words * 4 & MASK)) for lane in self._sums)
        x = ((int(high.sum()) << 32) + int(low.sum())) & 0xFFFFFFFFFFFFFFFF
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
        return f"{x ^ (x >> 31):016x}"


def tile_sums(words: torch.Tensor, start: int) -> torch.Tensor:
    """int64 [2, tiles], modulo 2^32, of int32 words, the first of which is word `start` of the tensor."""
    if words.is_cuda:  # the operators below are 48 launches a chunk
        from dynamo_megatron.kernels import tile_hash

        return tile_hash.tile_sums(words, start, TILE_WORDS, LANES)
    sums = []
    for offset in range(-(start % TILE_WORDS), len(words), CHUNK_WORDS):  # chunks begin with a tile
        chunk = words[max(0, offset) : offset + CHUNK_WORDS].long() & MASK
        first = start + max(0, offset)
        i = torch.arange(first, first + len(chunk), device=words.device) & MASK
        around = first % TILE_WORDS, -(first + len(chunk)) % TILE_WORDS  # words of these tiles in other parts
        lanes = []
        for seed, factor, rotation in LANES:
            rotated = ((i << rotation) | (i >> (32 - rotation))) & MASK
            mixed = _mix(chunk ^ ((i * factor + seed) & MASK) ^ rotated)
            lanes.append(functional.pad(mixed, around).view(-1, TILE_WORDS).sum(1))
        sums.append(torch.stack(lanes))
    return torch.cat(sums, 1) & MASK


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's fmix32 of values in [0, 2^32), int64."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


HASHES = {"cpu": Sha256, "cuda": TileHash}
Expected = list[dict[str, str]]  # by server rank: parameter -> 16 hex digits


class ExpectedChecksums:
    """One training rank's part: `add` what it sends, then `gather` once.

    `device`: of the servers, "cpu" or "cuda". Tensors may come in any order and division into buckets, and the parts of
    a fused parameter (experts) from several ranks. Raises ValueError where `tp_size` does not fit the model.
    """

    def __init__(self, spec: ModelSpec, tp_size: int, device: str):
        self._spec, self._tp_size, self._hash = spec, tp_size, HASHES[device]
        check_server_parallel(spec, tp_size, device)
        self._layout = server_layout(spec, tp_size)
        self._hashes: dict[tuple[str, int], Sha256 | TileHash | str] = {}  # (parameter, server rank); str: complete

    @torch.no_grad()
    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """(Hugging Face name, whole tensor) in the servers' dtype. Nothing of a tensor is kept on its device."""
        for name, tensor in tensors:
            parameter, start = self._layout.places[name]
            for rank in range(self._tp_size):
                shard = server_shard(self._spec, name, tensor, rank, self._tp_size).contiguous()
                size, key = self._layout.sizes[parameter], (parameter, rank)
                hashed = self._hashes.setdefault(key, self._hash(size * shard.element_size()))
                hashed.add(start * shard.element_size(), shard)
                if name in (HF_EMBEDDING, HF_HEAD) and size > shard.numel():
                    hashed.add(shard.nbytes, shard.new_zeros(size - shard.numel()))  # the vocabulary's padding
                if not hashed.left:
                    self._hashes[key] = hashed.digest()

    def gather(self, group: dist.ProcessGroup) -> Expected | None:
        """What every rank of a server should report: of the parameters whose parts have all come. Collective over
        `group` (of host tensors), whose first rank gets the result and the others None."""
        everyone = [None] * group.size() if group.rank() == 0 else None
        dist.gather_object(self._hashes, everyone, dst=dist.get_global_rank(group, 0), group=group)
        return joined(everyone, self._tp_size) if everyone is not None else None


def joined(everyone: Iterable[dict[tuple[str, int], Sha256 | TileHash | str]], tp_size: int) -> Expected:
    """The hashes of the parameters whose parts have all come, from those of every training rank."""
    whole: dict[tuple[str, int], Sha256 | TileHash | str] = {}
    for hashes in everyone:
        for key, one in hashes.items():
            if key in whole:
                assert not isinstance(whole[key], str), f"two ranks sent {key}"
                whole[key].merge(one)
            else:
                whole[key] = one
    expected: Expected = [{} for _ in range(tp_size)]
    for (parameter, rank), one in whole.items():
        if isinstance(one, str) or not one.left:
            expected[rank][parameter] = one if isinstance(one, str) else one.digest()
    return expected


def compare(expected: Expected, ranks: Iterable[Mapping]) -> str | None:
    """What is wrong with `ranks`, the `ranks` of a weights_checker reply, one line; None: nothing. A parameter that was
    not sent, or that only one side has, differs."""
    try:
        reported = {r["parallelism_info"][0]["tp_rank"]: dict(r["checksums"]) for r in ranks}
    except (LookupError, TypeError, ValueError):
        return "/weights_checker does not answer in the form of SGLang 0.5.23"
    if reported.keys() != set(range(len(expected))):
        return f"{len(reported)} ranks report where {len(expected)} are expected"
    pairs = [(should, reported[rank]) for rank, should in enumerate(expected)]
    wrong = sorted({p for should, has in pairs for p in should.keys() | has.keys() if should.get(p) != has.get(p)})
    if not wrong:
        return None
    named = ", ".join(on_one_line(parameter, 100) for parameter in wrong[:NAMED])
    more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    return f"{len(wrong)} parameters are not those that were sent: {named}{more}"


def mismatch(endpoint: Endpoint, expected: Expected, timeout: float) -> str | None:
    """Why the server's weights are not those expected, one line, or None where they are.

    `timeout` in seconds. Raises ServerError where the server does not say.
    """
    (ranks,) = call_for(endpoint, "/weights_checker", {"action": "checksum"}, timeout, "ranks")
    return compare(expected, ranks)


def server_device(endpoint: Endpoint) -> str:
    """ "cpu" or "cuda": which of the two hashes the server has. Raises ServerError."""
    (device,) = call_for(endpoint, "/server_info", None, CONTROL_TIMEOUT, "device")
    return "cpu" if device == "cpu" else "cuda"
