"""Files of JSON lines, compressed as they grow: a zstd frame for each line, one after another.

`zstdcat` reads them. A killed writer leaves at most one torn frame, at the end: readers stop before it, and the next
writer cuts it off.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import zstandard

from dynamo_megatron.errors import InputError

LEVEL = 1  # level 3 compresses token ids and logprobs no better, and takes twice the time
CHUNK, LONGEST_LINE = 1 << 20, 1 << 28  # bytes
LONGEST_HEADER = 18  # bytes
BLOCK_HEADER, CHECKSUM = 3, 4  # bytes
RUN_LENGTH = 1  # type of a block of one repeated byte
_compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)


def compressed(line: bytes) -> bytes:
    """Returns a zstd frame of one line, which includes its newline."""
    return _compressor.compress(line)


def read_raw_lines(path: Path) -> Iterator[bytes]:
    """Yields the complete lines, each with its newline, one in memory at a time. Raises ValueError where bytes are
    damaged."""
    with path.open("rb") as file:
        rest = b""
        for start, end in whole_frames(file.fileno(), path):
            file.seek(start)
            frame = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(file.read(end - start)))
            try:
                while text := frame.read(CHUNK):
                    *lines, rest = (rest + text).split(b"\n")
                    yield from (line + b"\n" for line in lines)
                    if len(rest) > LONGEST_LINE:  # a few bytes can stand for any number of zeros
                        raise zstandard.ZstdError(f"a line of more than {LONGEST_LINE} bytes")
            except zstandard.ZstdError as error:
                raise InputError(f"{path}: damaged between byte {start} and {end}: {error}") from None


def whole_frames(descriptor: int, path: Path) -> Iterator[tuple[int, int]]:
    """Yields where each complete frame begins and ends, in bytes; nothing is decompressed.

    Raises ValueError where a frame should begin and none does. Zeros count as a torn end: a machine that lost power may
    leave them where it had not written yet.
    """
    size, start = os.fstat(descriptor).st_size, 0
    while start < size:
        head = os.pread(descriptor, LONGEST_HEADER, start)
        try:
            checked = zstandard.get_frame_parameters(head).has_checksum
            end = start + zstandard.frame_header_size(head)
        except zstandard.ZstdError as error:
            if len(head) < LONGEST_HEADER or not head.strip(b"\0"):
                return
            raise InputError(f"{path}: damaged at byte {start}: {error}") from None
        last = False
        while not last:
            header = int.from_bytes(os.pread(descriptor, BLOCK_HEADER, end), "little")
            if end + BLOCK_HEADER > size:
                return
            last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
            end += BLOCK_HEADER + (1 if kind == RUN_LENGTH else length)
        end += CHECKSUM * checked
        if end > size:
            return
        yield start, end
        start = end
