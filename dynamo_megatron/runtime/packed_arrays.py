"""Arrays of small whole numbers as JSON holds them."""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

import numpy as np
import zstandard

LARGEST = 1 << 30  # bytes: a few can stand for any number of zeros
WIDTHS = {1: np.uint8, 2: np.uint16}
_compressor = zstandard.ZstdCompressor(level=1)


def packed(array: np.ndarray) -> dict[str, Any]:
    """Plain data for an array [N, ...] of uint8 or uint16. Each of its columns is compressed after the other: a column
    is more alike than a row."""
    columns = np.ascontiguousarray(np.moveaxis(array, 0, -1))
    data = base64.b64encode(_compressor.compress(columns.tobytes())).decode()
    return {"shape": list(array.shape), "bytes": array.itemsize, "data": data}


def unpacked(plain: Any) -> np.ndarray:
    """The array that `packed` was given. Raises ValueError for what is not of its form."""
    try:
        shape, width, data = plain["shape"], plain["bytes"], base64.b64decode(plain["data"], validate=True)
        size = math.prod(shape) * width
        if not all(type(n) is int and n >= 0 for n in shape) or size > LARGEST:
            raise ValueError(f"an array of shape {shape!r:.80}")
        if zstandard.frame_content_size(data) != size:
            raise ValueError(f"not the bytes of an array of shape {shape!r:.80}")
        columns = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), WIDTHS[width])
        return np.ascontiguousarray(np.moveaxis(columns.reshape(*shape[1:], *shape[:1]), -1, 0))
    except (LookupError, TypeError, binascii.Error, zstandard.ZstdError) as error:
        raise ValueError(f"no packed array ({error!r:.80})") from None
