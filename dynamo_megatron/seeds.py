"""Random numbers that belong to what they are drawn for, by name, and not to the order in which that comes."""

from __future__ import annotations

import hashlib
import json


def derived_seed(seed: int, *names: str) -> int:
    """Of what `names` say, under the run's `seed`: an integer in [0, 2**63). The same for ever."""
    text = json.dumps([seed, *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
