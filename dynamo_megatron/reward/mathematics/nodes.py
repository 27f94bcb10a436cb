"""What a parsed answer consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from dynamo_megatron.reward.mathematics.units import Unit


@dataclass(frozen=True)
class Number:
    value: Fraction
    places: int | None = None  # digits after the decimal point; None: an integer
    base: int | None = None  # "204_5": value 204, base 5


@dataclass(frozen=True)
class Symbol:
    name: str


@dataclass(frozen=True)
class Op:
    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True)
class Group:
    """`kind`: "list", "set", "union", "cap", "minus", "matrix", "row", a clock, or the brackets of a tuple."""

    kind: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Relation:
    """a = b < c: `signs` stand between `members`. `modulus` belongs to the sign "equiv"."""

    signs: tuple[str, ...]
    members: tuple[Node, ...]
    modulus: Node | None = None


@dataclass(frozen=True)
class Quantity:
    value: Node
    unit: Unit
    compound: bool = False  # 5 hours 20 minutes


Node = Number | Symbol | Op | Group | Relation | Quantity

DOTS = Symbol("...")
INFINITY = Symbol("infinity")
PI = Symbol("pi")
REALS = Symbol("mathbb R")


def rebuilt(node: Node, change: Callable[[Node], Node]) -> Node:
    """`node` with `change` of each of its parts; as it is if it has none."""
    match node:
        case Op(args=parts):
            return replace(node, args=tuple(map(change, parts)))
        case Group(items=parts):
            return replace(node, items=tuple(map(change, parts)))
        case Relation(members=parts):
            return replace(node, members=tuple(map(change, parts)))
    return node


def compound(items: Sequence[Node]) -> Quantity | None:
    """5 hours (and) 20 minutes as one quantity; None where the items are not one in smaller and smaller units."""
    quantities = [item for item in items if isinstance(item, Quantity) and item.unit.known and item.unit.powers]
    first = quantities[0] if len(quantities) == len(items) else None
    if first is None or any(each.unit.powers != first.unit.powers for each in quantities):
        return None
    if any(small.unit.factor >= large.unit.factor for large, small in pairwise(quantities)):
        return None
    value = first.value
    for each in quantities[1:]:
        value = Op("add", (value, Op("mul", (Number(each.unit.factor / first.unit.factor), each.value))))
    return Quantity(value, first.unit, compound=True)


def is_plain_number(node: Node) -> bool:
    r"""A number as it is written before a noun: 7, -2.5, 3/4, 1 1/2, 6 \times 10^5; not 2 \times 3."""
    if isinstance(node, Op) and node.name == "times":  # scientific notation
        power = node.args[1]
        return isinstance(power, Op) and power.name == "pow" and power.args[0] == Number(Fraction(10))
    if isinstance(node, Op) and node.name in ("neg", "div", "mul"):
        return all(is_plain_number(part) for part in node.args)
    return isinstance(node, Number)
