"""Keys of the ranks' store whose values only the ranks can have written.

torch's TCPStore authenticates nobody: whoever reaches it can list, read, write and delete its keys. Every value
therefore carries a code (HMAC-SHA256) made with the secret of this start, and a value without the right code is
ignored. A stranger can still delete values; then the run ends with a timeout.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import sys
import time
from pathlib import Path

import torch.distributed as dist

from dynamo_megatron.runtime.whole_files import replacing

SECRET_FILE, PROOF = ".ranks", "proof"  # the secret's file, in the output folder; the key that proves which it is
SECRET_BYTES, CODE = 32, 64  # CODE: characters
POLL_EVERY = 0.05  # seconds


class SignedStore:
    """Texts by key in `store`, signed with `secret`."""

    def __init__(self, store: dist.Store, secret: bytes):
        self._store, self._secret = _of_this_start(store), secret

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> str | None:
        """Returns the value; None where no rank has set it."""
        return self._check(key, self._store.get(key)) if self._store.check([key]) else None

    def set_first(self, key: str, value: str) -> str:
        """Sets the value unless a rank has set it; returns the value that the key then has."""
        first = self._check(key, self._store.compare_set(key, "", self._sign(key, value)))
        if first is None:
            self.set(key, value)
        return value if first is None else first

    def _sign(self, key: str, value: str) -> str:
        return _code(self._secret, f"{key}={value}") + value

    def _check(self, key: str, signed: bytes) -> str | None:
        text = signed.decode(errors="replace")
        if hmac.compare_digest(text[:CODE].encode(), _code(self._secret, f"{key}={text[CODE:]}").encode()):
            return text[CODE:]
        if os.environ.get("RANK") == "0":
            _warn()
        return None


@functools.cache
def _warn() -> None:
    """Warns once in a process."""
    print(
        f"MASTER_ADDR: the ranks' store at {os.environ['MASTER_ADDR']} has values that no rank has signed; they are "
        "ignored, but whoever writes them can end the run (docs/security.md)",
        file=sys.stderr,
        flush=True,
    )


def _of_this_start(store: dist.Store) -> dist.Store:
    """Returns a view of the store for this start: torchrun's store outlives a restart of the ranks, and keys of an
    earlier start must not be taken for those of this one."""
    return dist.PrefixStore(f"coordination-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _code(secret: bytes, text: str) -> str:
    return hmac.digest(secret, text.encode(errors="surrogatepass"), "sha256").hex()


def share_secret(store: dist.Store, folder: Path, rank: int, timeout: float) -> bytes:
    """Returns the secret of this start (32 bytes). Rank 0 makes it, and the others read it from a file in `folder`
    (mode 0600), under every launcher. Raises TimeoutError where a rank does not see it within `timeout` seconds."""
    file, store = folder / SECRET_FILE, _of_this_start(store)
    if rank == 0:
        secret = secrets.token_bytes(SECRET_BYTES)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file, 0o600) as out:
            out.write(secret)
        store.set(PROOF, _code(secret, PROOF))
        return secret
    deadline = time.monotonic() + timeout
    while True:
        if store.check([PROOF]):  # NFS caches for a minute that a file is missing: no rank looks before
            try:
                secret = file.read_bytes()
            except OSError:  # a network file system may show an earlier start's file for a while, and then none
                secret = b""
            # A stranger could have signed with an incomplete secret.
            if len(secret) == SECRET_BYTES and hmac.compare_digest(store.get(PROOF), _code(secret, PROOF).encode()):
                return secret
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {rank} waited {timeout:g} s for what rank 0 writes to {file}: all nodes must see output_dir"
            )
        time.sleep(POLL_EVERY)


def forget_secret(folder: Path) -> None:
    """Removes the file; call it on rank 0, once all ranks have the secret."""
    (folder / SECRET_FILE).unlink(missing_ok=True)
