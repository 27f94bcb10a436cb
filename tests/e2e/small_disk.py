"""A small file system of its own, in memory, for tests that fill a disk."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def mounting(folder: Path, size: str) -> Iterator[bool]:
    """Mounts one of `size` ("64k", "1m") at `folder`; the value is whether that worked, which needs root. It is
    unmounted afterwards, also after an exception and while files of it are open."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
