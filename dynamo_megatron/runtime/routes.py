"""The experts that a mixture routes tokens to, as arrays, and how a rollout's line of JSON holds them."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from dynamo_megatron.errors import InputError

LARGEST = 1 << 30  # bytes of a rollout's routes: a few bytes of a file can stand for any number of zeros
WIDTHS = {1: np.uint8, 2: np.uint16}


class RouteShape(NamedTuple):
    """The routes of a mixture of experts: each token is routed to `topk` of `experts` experts in each of `layers`."""

    layers: int
    topk: int
    experts: int

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """Holds the numbers of the experts, and `no_route`."""
        return np.uint8 if self.experts < 256 else np.uint16

    @property
    def token_bytes(self) -> int:
        return self.layers * self.topk * np.dtype(self.dtype).itemsize

    def unknown(self, tokens: int) -> np.ndarray:
        """The routes of `tokens` tokens of which none is known."""
        return np.full((tokens, self.layers, self.topk), no_route(self.dtype), self.dtype)


def no_route(dtype: np.dtype | type[np.unsignedinteger]) -> int:
    """What stands in routes where there is no expert's number."""
    return int(np.iinfo(dtype).max)


def filled_routes(parts: Sequence[tuple[np.ndarray | None, int]]) -> list[np.ndarray]:
    """The routes of each part, (its routes, its tokens), where at least one has some. Raises InputError."""
    known = {(routes.dtype, routes.shape[1:]) for routes, _ in parts if routes is not None}
    if len(known) > 1:
        raise InputError(f"routes of several models: {', '.join(f'{dtype} {shape}' for dtype, shape in known)}")
    ((dtype, shape),) = known
    return [np.full((n, *shape), no_route(dtype), dtype) if routes is None else routes for routes, n in parts]


def packed(array: np.ndarray) -> dict[str, Any]:
    """Plain data for an array [N, ...] of uint8 or uint16. Each of its columns is compressed after the other: a column
    is more alike than a row."""
    columns = np.ascontiguousarray(np.moveaxis(array, 0, -1))
    data = base64.b64encode(zstandard.ZstdCompressor(level=1).compress(columns.tobytes())).decode()
    return {"shape": list(array.shape), "bytes": array.itemsize, "data": data}


def unpacked(plain: Any, tokens: int) -> np.ndarray:
    """The array of `tokens` tokens that `packed` was given. Raises ValueError for what is not of its form, before it
    takes memory."""
    try:
        shape, data = plain["shape"], base64.b64decode(plain["data"])
        size = math.prod(shape) * plain["bytes"]
        if [tokens, size] != [shape[0], zstandard.frame_content_size(data)] or size > LARGEST or len(shape) != 3:
            raise ValueError(f"no routes of {tokens} tokens (shape {shape!r:.40})")
        columns = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), WIDTHS[plain["bytes"]])
        return np.ascontiguousarray(np.moveaxis(columns.reshape(*shape[1:], *shape[:1]), -1, 0))
    except (LookupError, TypeError, zstandard.ZstdError) as error:
        raise ValueError(f"no packed array ({error!r:.80})") from None
