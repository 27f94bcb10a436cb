"""Sets of real numbers by their members, so that unions and differences that are written differently are equal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from mpmath import mp

from dynamo_megatron.reward.mathematics.nodes import INFINITY, REALS, Group, Node, Op, Relation, Symbol
from dynamo_megatron.reward.mathematics.value import DIGITS, Undefined, value_at, walk

LESS = {"<": "<", "<=": "<=", ">": "<", ">=": "<="}
Members = tuple[list[mp.mpf], Callable[[mp.mpf], bool]]  # the ends of a set's intervals; whether it has a number


def same_set(first: Node, second: Node) -> bool | None:
    """Whether two unions, differences or the like are one set; None where one of them is no set of real numbers.
    Membership can change only at the ends of intervals, so it is compared at these, between them and beyond them."""
    sets = [_members(node) for node in (first, second)]
    if None in sets:
        return None
    with mp.workdps(2 * DIGITS):
        (ends, mine), (more, other) = sets  # type: ignore[misc]
        ends = sorted(end for end in ends + more if mp.isfinite(end)) or [mp.mpf(0)]
        between = [(low + high) / 2 for low, high in pairwise(ends) if not _near(low, high)]
        return all(mine(x) == other(x) for x in [ends[0] - 1, *ends, *between, ends[-1] + 1])


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


def _members(node: Node) -> Members | None:
    match node:
        case Symbol():
            return ([], lambda x: node == REALS) if node == REALS or node.name == "emptyset" else None
        case Relation(signs=("!=",), members=(Symbol(), value)):
            number = _number(value)
            return None if number is None else ([number], lambda x: not _near(x, number))
        case Relation(signs=("in",), members=(Symbol(), inside)):
            return _members(inside)
        case Relation():
            return None if (between := interval_of(node)) is None else _members(between)
        case Group(kind="set", items=items):
            numbers = [_number(item) for item in items]
            return None if None in numbers else (numbers, lambda x: any(_near(x, number) for number in numbers))
        case Group(kind="()" | "[]" | "(]" | "[)" as ends, items=(left, right)):
            low = -mp.inf if left == Op("neg", (INFINITY,)) else _number(left)
            high = mp.inf if right == INFINITY else _number(right)
            closed = ends[0] == "[", ends[1] == "]"
            if low is None or high is None or low > high or (low == high and not all(closed)):
                return None
            return [
                low,
                high,
            ], lambda x: (closed[0] if _near(x, low) else x > low) and (closed[1] if _near(x, high) else x < high)
        case Group(kind="union" | "cap" | "minus" as kind, items=items):
            sets = [_members(item) for item in items]
            if None in sets:
                return None
            holding = [holds for _, holds in sets]  # type: ignore[misc]
            holds = {
                "union": lambda x: any(holds(x) for holds in holding),
                "cap": lambda x: all(holds(x) for holds in holding),
                "minus": lambda x: holding[0](x) and not any(holds(x) for holds in holding[1:]),
            }
            return [end for ends, _ in sets for end in ends], holds[kind]  # type: ignore[misc]
    return None


def _number(node: Node) -> mp.mpf | None:
    try:
        value = value_at(node, {})
    except Undefined:
        return None
    return mp.re(value) if mp.im(value) == 0 else None


def _near(x: mp.mpf, y: mp.mpf) -> bool:
    return abs(x - y) <= mp.mpf(10) ** -30 * abs(x)
