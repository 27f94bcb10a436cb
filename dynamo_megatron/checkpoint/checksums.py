"""Checksums of a checkpoint's files: XXH3 of 128 bits over the whole file, as `xxhsum -H2` prints them.

They detect flipped bits and mixed-up files, but not an attacker's changes. XXH3 hashes as fast as memory is read. A
save hashes its files while it writes them, and a load can afford to read every file once more (docs/checkpoints.md).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash


class ChecksumWriter(io.BufferedWriter):
    """A binary file that is written from beginning to end and hashed meanwhile."""

    def __init__(self, file: Path, mode: str = "wb"):
        super().__init__(io.FileIO(file, mode))
        self.digest = xxhash.xxh3_128()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self.digest.update(data)
        return super().write(data)


def file_checksum(file: Path) -> str:
    """The file's checksum in hexadecimal digits. Raises OSError."""
    with open(file, "rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def file_checksums(files: Iterable[Path]) -> Mapping[Path, str]:
    """The checksums of several files, which threads read side by side. Raises OSError."""
    files = list(files)
    with ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(file_checksum, files), strict=True))
