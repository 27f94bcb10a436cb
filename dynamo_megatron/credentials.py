"""Secrets, by the names of variables and options and in URLs: what may not be written to a file or a message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

SECRET_NAME = re.compile(  # of an environment variable
    r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(^|_)PASS(_|$)", re.IGNORECASE
)
SECRET_OPTION = re.compile(r"api[-_]?key\b|auth[-_]token\b|secret|passw(or)?d|passphrase|credential", re.IGNORECASE)
USER_IN_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/?#\s@]*@", re.IGNORECASE)
WITH_QUERIES = ("http://", "https://", "datasets:")
SECRET_PARAMETER = re.compile(r"(.*[-_])?(api[-_]?key|key|token|secret|password|passwd|pass)", re.IGNORECASE)
INSTEAD = {
    "reward.functions": "name the environment variable that holds the service's key with reward.api_key_env",
    "rollout.urls": "name the environment variable that holds the servers' key with rollout.api_key_env",
    "data.source": "give it to the job's environment, as HF_TOKEN for datasets:",
    "eval.data": "give it to the job's environment, as HF_TOKEN for datasets:",
}


def in_urls(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, what is wrong in words that do not show it) of every text in a configuration that is a URL with a
    user, a password or a key in it."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from in_urls(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for value in tree:
            yield from in_urls(value, key)
    elif isinstance(tree, str):
        what = "a user or password" if USER_IN_URL.search(tree) else ""
        if not what and tree.startswith(WITH_QUERIES) and "?" in tree:
            names = [name for name, _ in parse_qsl(tree.partition("?")[2], keep_blank_values=True)]
            what = next((f"the parameter {name}" for name in names if SECRET_PARAMETER.fullmatch(name)), "")
        if what:
            instead = INSTEAD.get(key, "give it to the job's environment")
            yield (
                key,
                f"the URL has {what} in it, which would be written to config.yaml, logs and messages; {instead}",
            )
