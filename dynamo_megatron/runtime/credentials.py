"""Finds secrets in URLs, and keeps known ones out of messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

SHORTEST_SECRET = 8  # characters; shorter values are words that messages contain anyway
# A user alone is a token for HTTP; docker://USER@REGISTRY and the like take the password from elsewhere.
USER_IN_URL = re.compile(r"\b([\w.+-]*https?://[^/?#\s@]*|[a-z][a-z0-9+.-]*://[^/?#\s@:]*:[^/?#\s@]*)@", re.IGNORECASE)
SECRET_PARAMETER = re.compile(  # by their whole names: max_token, cache_key and sort_key are not secrets
    r"(https?://|datasets:)\S*[?&;](?P<name>key|token|auth|pass|sig|([\w-]+[-_])?(secret|password|passwd|passphrase|signature"
    r"|(api|access|secret|private|account|auth)[-_]?key|(access|auth|security|refresh|id|bearer|hf)[-_]?token))=",
    re.IGNORECASE,
)


def without(text: str, secrets: Iterable[str]) -> str:
    """Returns `text` with "[API key]" in place of each of `secrets`, also where JSON has escaped its slashes or quotes.
    Secrets shorter than SHORTEST_SECRET characters stay."""
    for secret in secrets:
        if len(secret) >= SHORTEST_SECRET:
            for written in (secret, json.dumps(secret)[1:-1], secret.replace("/", "\\/")):
                text = text.replace(written, "[API key]")
    return text


def in_urls(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, what is wrong in words that do not show the secret) for every string in a configuration that
    is a URL with a user, a password or a key in it."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from in_urls(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for value in tree:
            yield from in_urls(value, key)
    elif isinstance(tree, str) and (USER_IN_URL.search(tree) or SECRET_PARAMETER.search(unquote(tree))):
        yield (
            key,
            "the URL has a user, password or key in it, which would be written to config.yaml, logs and messages; give "
            "it to the job's environment: HF_TOKEN for datasets, a variable that api_key_env names for services",
        )
