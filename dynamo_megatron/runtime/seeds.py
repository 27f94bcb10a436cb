"""Seeds of random draws. A seed depends on the purpose of the draw, given by names, and not on when it happens."""

from __future__ import annotations

import hashlib
import json


def derived_seed(seed: int, *names: str) -> int:
    """Returns the seed of the draw that `names` identify, in a run with `seed`: an integer in [0, 2**63). All later
    versions must return the same values."""
    text = json.dumps([seed, *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
