"""Sets of real numbers as disjoint pieces, so that unions and differences that are written differently are equal."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mpmath import mp

from dynamo_megatron.reward.mathematics.nodes import INFINITY, REALS, Group, Node, Op, Relation, Symbol
from dynamo_megatron.reward.mathematics.value import Undefined, value_at, walk


@dataclass(frozen=True)
class Piece:
    """The numbers between `low` and `high`; a point where both are the same. Infinite ends are open."""

    low: mp.mpf
    high: mp.mpf
    low_open: bool = False
    high_open: bool = False


LESS = {"<": "<", "<=": "<=", ">": "<", ">=": "<="}
Pieces = list[Piece]
ALL = [Piece(-mp.inf, mp.inf, True, True)]


def same_set(first: Node, second: Node) -> bool | None:
    """Whether two unions, differences or the like are one set; None where one of them is no set of real numbers."""
    sets = [_pieces(node) for node in (first, second)]
    if None in sets:
        return None
    mine, other = (_merged(pieces or []) for pieces in sets)
    return len(mine) == len(other) and all(_same_piece(a, b) for a, b in zip(mine, other, strict=True))


def is_composed(node: Node) -> bool:
    r"""A union, an intersection, a difference, x \ne 3 or all real numbers."""
    kinds = ("union", "cap", "minus")
    return node == REALS or (
        node.kind in kinds if isinstance(node, Group) else isinstance(node, Relation) and node.signs == ("!=",)
    )


def interval_of(relation: Relation) -> Group | None:
    """The numbers that satisfy a < x <= b, x < b or b > x; None for other relations."""
    if not set(relation.signs) <= LESS.keys():
        return None
    turned = turned_left(relation)
    if len(turned.signs) == 2 and isinstance(turned.members[1], Symbol):
        low, _, high = turned.members
        return _ends(turned.signs[0], low, high, turned.signs[1])
    if len(turned.signs) == 1:
        left, right = turned.members
        if isinstance(left, Symbol) and is_constant(right):
            return _ends("<", Op("neg", (INFINITY,)), right, turned.signs[0])
        if isinstance(right, Symbol) and is_constant(left):
            return _ends(turned.signs[0], left, INFINITY, "<")
    return None


def is_constant(node: Node) -> bool:
    return not any(isinstance(part, Symbol) and part.name not in ("pi", "e", "infinity") for part in walk(node))


def _ends(left: str, low: Node, high: Node, right: str) -> Group:
    return Group(("[" if left == "<=" else "(") + ("]" if right == "<=" else ")"), (low, high))


def turned_left(relation: Relation) -> Relation:
    """With < and <= only."""
    if all(sign in ("<", "<=") for sign in relation.signs):
        return relation
    if all(sign in (">", ">=") for sign in relation.signs):
        return Relation(tuple(LESS[sign] for sign in reversed(relation.signs)), relation.members[::-1])
    return relation


def _pieces(node: Node) -> Pieces | None:
    match node:
        case Symbol():
            return ALL if node == REALS else [] if node.name == "emptyset" else None
        case Relation(signs=("!=",), members=(Symbol(), value)):
            number = _number(value)
            return None if number is None else _complement([Piece(number, number)])
        case Relation(signs=("in",), members=(Symbol(), inside)):
            return _pieces(inside)
        case Relation():
            return None if (between := interval_of(node)) is None else _pieces(between)
        case Group(kind="set", items=items):
            numbers = [_number(item) for item in items]
            return None if None in numbers else [Piece(number, number) for number in numbers]
        case Group(kind="()" | "[]" | "(]" | "[)" as ends, items=(low, high)):
            return _between(_number(low), _number(high), ends[0] == "(", ends[1] == ")")
        case Group(kind="union" | "cap" | "minus" as kind, items=items):
            sets = [_pieces(item) for item in items]
            if None in sets:
                return None
            first, *others = (pieces or [] for pieces in sets)
            for each in others:
                first = _combined(kind, first, each)
            return first
    return None


def _between(low: mp.mpf | None, high: mp.mpf | None, low_open: bool, high_open: bool) -> Pieces | None:
    if low is None or high is None or low > high or (low == high and (low_open or high_open)):
        return None
    return [Piece(low, high, low_open or low == -mp.inf, high_open or high == mp.inf)]


def _number(node: Node) -> mp.mpf | None:
    if node == INFINITY or node == Op("neg", (INFINITY,)):
        return mp.inf if node == INFINITY else -mp.inf
    try:
        value = value_at(node, {})
    except Undefined:
        return None
    return mp.re(value) if mp.im(value) == 0 else None


def _combined(kind: str, first: Pieces, second: Pieces) -> Pieces:
    if kind == "union":
        return first + second
    outside = _complement(first) + (_complement(second) if kind == "cap" else second)
    return _complement(outside)


def _merged(pieces: Pieces) -> Pieces:
    merged: Pieces = []
    for piece in sorted(pieces, key=lambda each: (each.low, each.low_open)):
        last = merged[-1] if merged else None
        if last is None or piece.low > last.high or (piece.low == last.high and piece.low_open and last.high_open):
            merged.append(piece)
        elif (piece.high, not piece.high_open) > (last.high, not last.high_open):
            merged[-1] = Piece(last.low, piece.high, last.low_open, piece.high_open)
    return merged


def _complement(pieces: Pieces) -> Pieces:
    ends = [Piece(-mp.inf, -mp.inf, True, True), *_merged(pieces), Piece(mp.inf, mp.inf, True, True)]
    gaps = [Piece(a.high, b.low, not a.high_open or a.high == -mp.inf, not b.low_open or b.low == mp.inf)
            for a, b in pairwise(ends)]  # fmt: skip
    return [gap for gap in gaps if gap.low < gap.high or not (gap.low_open or gap.high_open)]


def _same_piece(a: Piece, b: Piece) -> bool:
    ends = ((a.low, b.low), (a.high, b.high))
    near = all(x == y or (mp.isfinite(x) and abs(x - y) <= mp.mpf(10) ** -30 * abs(x)) for x, y in ends)
    return near and (a.low_open, a.high_open) == (b.low_open, b.high_open)
