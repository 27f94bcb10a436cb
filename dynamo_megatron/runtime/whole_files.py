"""Files that are written under another name and renamed when they are whole."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, sync: bool = False, shared: bool = False) -> Iterator[BinaryIO]:
    """Opens a file to write, in binary mode, that gets the name `path` when the block ends. If the block raises, an
    older file of that name stays. Only one process at a time may write a `path`; with `shared`, several may.

    `mode`: the permissions, less the umask. `sync`: the file is on disk when the block has ended, so that a power cut
    does not lose it. Raises OSError.
    """
    aside = path.with_name(f".{path.name}{f'.{uuid.uuid4().hex}' if shared else ''}.tmp")
    aside.unlink(missing_ok=True)  # left by a kill
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with naming(path), open(descriptor, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(descriptor)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    if sync:
        sync_to_disk(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError of the system in the block that has no file name. Those of writing to an open file have
    none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
