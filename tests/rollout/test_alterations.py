"""The grammar itself: seeded, and each kind does what its name says."""

import json
import random

import pytest
from alterations import CONTENT, DEEP, KINDS, alter

BODY = json.dumps({"id": "r", "meta": {"n": 3, "version": "0", "items": [[-1.5, 7, None]] * 9}, "none": []}).encode()


def test_the_same_seed_gives_the_same_alterations():
    first, second = ([alter(rng, BODY, huge=1000) for _ in range(200)] for rng in (random.Random(3), random.Random(3)))
    assert first == second and {a.kind for a in first} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_alters_and_says_what(kind):
    rng = random.Random(kind)
    made = [alter(rng, BODY, kinds=[kind], huge=1000) for _ in range(100)]
    assert all(a.kind == kind and 0 < len(a.what) < 200 and a.what.isprintable() for a in made)
    assert len({(a.http(), a.delay) for a in made}) > 2
    if kind in CONTENT:
        assert all(a.body != BODY and a.status == 200 and a.sent is None for a in made)


def test_rows_of_other_shapes_can_be_altered():
    rng = random.Random(1)
    for body in (b"1", b'"text"', b"[]", b"{}", b"null", b'{"a": "\\u00e9"}'):
        for kind in CONTENT:
            assert alter(rng, body, kinds=[kind]).body != body


def test_brackets_are_deep_enough_to_end_a_recursive_parser():
    with pytest.raises(RecursionError):
        json.loads(b"[" * DEEP)
