"""Files of JSON lines, compressed as they grow: a zstd frame for each line, one after another.

`zstdcat` reads them. A killed writer leaves at most one torn frame, at the end: readers stop before it, and the next
writer cuts it off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import zstandard

from dynamo_megatron.errors import ConfigError

LEVEL = 1  # level 3 compresses token ids and logprobs no better, and takes twice the time
CHUNK, LONGEST_FRAME = 1 << 16, 1 << 28  # bytes


def compressed(line: bytes) -> bytes:
    """Returns a zstd frame of one line, which includes its newline."""
    # A compressor for each call: two threads that share one, of rollouts and of token rows say, damage their frames.
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(line)


def read_raw_lines(path: Path) -> Iterator[bytes]:
    """Yields the complete lines, each with its newline, one frame in memory at a time. Raises ValueError where bytes
    are damaged."""
    with path.open("rb") as file:
        for _, text in whole_frames(file.fileno(), path):
            yield from (line + b"\n" for line in text.split(b"\n")[:-1])


def whole_frames(descriptor: int, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields where each complete frame ends, in bytes, and its text. Zeros count as a torn end: a machine that lost
    power may leave them where it had not written yet. Raises ValueError where bytes are damaged."""
    start, rest = 0, b""
    while True:
        frame, text, end = zstandard.ZstdDecompressor().decompressobj(), bytearray(), start + len(rest)
        try:
            while not frame.eof:
                if not rest:
                    rest = os.pread(descriptor, CHUNK, end)
                    end += len(rest)
                if not rest:
                    return
                text += frame.decompress(rest)
                rest = frame.unused_data
                if len(text) > LONGEST_FRAME:  # a few bytes can stand for any number of zeros
                    raise zstandard.ZstdError(f"more than {LONGEST_FRAME} bytes")
        except zstandard.ZstdError as error:
            if not os.pread(descriptor, CHUNK, start).strip(b"\0"):
                return
            raise ConfigError(f"{path}: damaged between byte {start} and {end}: {error}") from None
        start = end - len(rest)
        yield start, bytes(text)
