"""What a parsed answer consists of."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

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
