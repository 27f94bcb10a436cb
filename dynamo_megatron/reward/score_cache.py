"""A cache of the scores that services gave."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from dynamo_megatron.reward.outcomes import Outcome


class ScoreCache:
    """The `size` last used outcomes with a score (0: none), by the SHA-256 of a sample as it is sent. May be used from
    any thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, Outcome] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, sample: bytes) -> Outcome | None:
        if not self._size:
            return None
        key = hashlib.sha256(sample).digest()
        with self._lock:
            if key in self._scores:
                self._scores.move_to_end(key)
            return self._scores.get(key)

    def put(self, sample: bytes, scored: Outcome) -> None:
        if not self._size:
            return
        key = hashlib.sha256(sample).digest()
        with self._lock:
            self._scores[key] = scored
            self._scores.move_to_end(key)
            while len(self._scores) > self._size:
                self._scores.popitem(last=False)
