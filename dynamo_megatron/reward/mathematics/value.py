"""What a parsed answer (`parser`) consists of, and the values of expressions: exactly where they are rational, else at
a high precision, and with variables at chosen points."""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from mpmath import mp

from dynamo_megatron.reward.mathematics.tokens import HYPERBOLIC, TRIGONOMETRIC, Unit

TOLERANCE = Fraction(5, 10**7)  # relative, where a side is written with a decimal point
DIGITS, WITH_VARIABLES = 800, 200  # decimal digits of a value, so that SURE of them remain where terms cancel
SURE = 30  # digits that two exact values have in common if they are equal
LOST, CANCELLED = 120, 100  # at these bits from the last one a term is too small, and a sum is 0 up to rounding
BITS = 100_000  # of an exact number
HUGE = 10**12  # no value above 2^HUGE, and no argument of a function above it
POINTS, ENOUGH = 12, 4  # points of variables; on how many both sides must have a value
INTEGERS = frozenset("nmkNMKdpqjlLPS")  # names of variables that may be integers only
CONSTANTS = {"pi": lambda: +mp.pi, "e": lambda: +mp.e, "i": lambda: mp.mpc(0, 1)}
FUNCTIONS = {
    **{name: getattr(mp, name.replace("arc", "a")) for name in (*TRIGONOMETRIC, *HYPERBOLIC)},
    **{"exp": mp.exp, "abs": abs, "floor": mp.floor, "ceil": mp.ceil, "binom": mp.binomial},
    **{"factorial": mp.factorial, "factorial2": mp.fac2, "degrees": lambda a: a * mp.pi / 180},
    **{"ln": lambda a: mp.log(a), "log": lambda a, base: mp.log(a) / mp.log(base)},
    **{"lg": lambda a: mp.log(a) / mp.log(10), "lb": lambda a: mp.log(a) / mp.log(2)},
}
ARITHMETIC = {
    **{"mul": operator.mul, "times": operator.mul, "div": operator.truediv, "neg": operator.neg},
    **{"percent": lambda a: a / 100, "max": lambda *args: max(args), "min": lambda *args: min(args)},
}
EXACT = {
    **{**ARITHMETIC, "add": operator.add, "sub": operator.sub, "abs": abs},
    **{"floor": lambda a: Fraction(math.floor(a)), "ceil": lambda a: Fraction(math.ceil(a))},
}
DISCRETE = frozenset(["floor", "ceil", "factorial", "factorial2", "binom", "gcd", "lcm"])
BRANCHED = frozenset(["ln", "log", "lg", "lb"])


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


def union_of(items: Sequence[Node]) -> Group | None:
    """x < 2 or x > 3, x < 0 or x = 1; None without an inequality, and for several variables."""
    parts: list[Node] = []
    for item in items:
        match item:
            case Relation(signs=("=",), members=(Symbol(), value), modulus=None):
                parts.append(Group("set", (value,)))
            case Relation(signs=signs) if set(signs) <= {"<", "<=", ">", ">="}:
                parts.append(item)
            case _:
                return None
    several = len(variables(*items)) > 1 or not any(part in items for part in parts)
    return None if several else Group("union", tuple(parts))


def is_plain_number(node: Node) -> bool:
    r"""A number as it is written before a noun: 7, -2.5, 3/4, 1 1/2, 6 \times 10^5, 2^{10}, 5!; not 2 \times 3."""
    if isinstance(node, Op) and node.name == "times":  # scientific notation
        power = node.args[1]
        return isinstance(power, Op) and power.name == "pow" and power.args[0] == Number(Fraction(10))
    if isinstance(node, Op) and node.name in ("neg", "div", "mul", "pow", "factorial", "binom"):
        return all(is_plain_number(part) for part in node.args)
    return isinstance(node, Number)


class Undefined(Exception):
    """The expression has no value at this point, or none that can be computed."""


def equal_values(first: Node, second: Node) -> bool:
    """Whether two expressions have the same value, wherever both have one.

    Where neither is written with a decimal point they must agree exactly; else within `TOLERANCE`, and of two decimal
    numbers one must be the other, rounded or cut.
    """
    rounded = any(isinstance(part, Number) and part.places is not None for part in walk(first, second))
    mine, other = exact(first), exact(second)
    if mine is not None and other is not None:
        if mine == other or not rounded or abs(mine - other) > TOLERANCE * abs(mine):
            return mine == other
        places = [decimals(first), decimals(second)]
        if 1 in (mine.denominator, other.denominator) and places != [None, None]:
            return abs(mine - other) <= TOLERANCE  # whole numbers that differ are never rounded
        return None in places or abs(mine - other) < Fraction(10) ** -min(places)  # type: ignore[type-var]
    names = variables(first, second)
    tolerance = mp.mpf(TOLERANCE.numerator) / TOLERANCE.denominator if rounded else mp.mpf(10) ** -SURE
    if not names:
        if any(value is not None and value.denominator == 1 for value in (mine, other)):
            tolerance = mp.mpf(10) ** -SURE  # whole numbers are never rounded
        return _equal_at([{}], first, second, tolerance, 1)
    operations = [part for part in walk(first, second) if isinstance(part, Op)]
    used = {operation.name for operation in operations}
    powers = [(operation.args[0], operation.args[1]) for operation in operations if operation.name == "pow"]
    kinds = ["real"]
    of_negative = any(not isinstance(power, Number) and (exact(base) or 1) < 0 for base, power in powers)  # (-1)^n
    if all(name[0] in INTEGERS for name in names) and (used & DISCRETE or of_negative):
        kinds.append("integer")
    if used & BRANCHED or any((value := exact(power)) is None or value.denominator != 1 for _, power in powers):
        kinds.append("positive")
    if used & {"floor", "ceil"} and not _equal_at(points(names, "integer"), first, second, tolerance, 0):
        return False  # the others are never whole, where ceil(x) is floor(x) + 1
    if bool(variables(first)) != bool(variables(second)):
        kinds = ["real"]  # a constant: x/|x| is 1 where x is positive
    return any(_equal_at(points(names, kind), first, second, tolerance, ENOUGH) for kind in kinds)


def variables(*nodes: Node) -> list[str]:
    return sorted({part.name for part in walk(*nodes) if isinstance(part, Symbol)} - CONSTANTS.keys())


def walk(*nodes: Node) -> Iterator[Node]:
    """The nodes and all nodes in them."""
    for node in nodes:
        yield node
        match node:
            case Op(args=parts) | Group(items=parts) | Relation(members=parts):
                yield from walk(*parts)
            case Quantity():
                yield from walk(node.value)


def points(names: list[str], kind: str) -> Iterator[dict[str, Fraction]]:
    """Values for variables, always the same ones: "real" of both signs, "positive", or "integer" from 1 on."""
    for k in range(POINTS if kind != "integer" else 4 * POINTS):
        point: dict[str, Fraction] = {}
        size = (1, 1, 30, 700)[k % 4]  # max(x, 3) is 3 near 1 alone
        for name in names:
            drawn = int.from_bytes(hashlib.sha256(f"{name} {k}".encode()).digest()[:6], "big")
            if kind == "integer":
                point[name] = Fraction(1 + drawn % (3 + k if k < 2 * POINTS else 10 * k))
            else:
                value = size * (Fraction(3, 10) + Fraction(drawn, 2**47))
                point[name] = -value if kind == "real" and drawn % 2 else value
        yield point


def exact(node: Node) -> Fraction | None:
    """The value of rational arithmetic on numbers; None for everything else, and beyond BITS bits."""
    try:
        return _value(node, None)  # type: ignore[return-value]
    except (Undefined, ZeroDivisionError, TypeError):  # TypeError: floor(1, 2)
        return None


def in_base(number: Number) -> int:
    digits = str(number.value.numerator)
    base = number.base or 10
    if max(map(int, digits)) >= base or base < 2:
        return -1
    return sum(int(digit) * base**k for k, digit in enumerate(reversed(digits)))


def _exact_operation(name: str, *args: Fraction) -> Fraction | None:
    if name == "pow":
        base, power = args
        if power.denominator != 1 or abs(power) * max(1, _bits(base)) > BITS:
            return None
        return base ** int(power)
    if name in ("gcd", "lcm") and all(arg.denominator == 1 for arg in args):
        return Fraction(getattr(math, name)(*map(int, args)))
    return EXACT[name](*args) if name in EXACT else None


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def decimals(node: Node) -> int | None:
    r"""The digits after the decimal point of a decimal number or an integer, also of 1.5 \times 10^{-3}; else None."""
    if isinstance(node, Op) and node.name == "neg":
        return decimals(node.args[0])
    if isinstance(node, Op) and node.name in ("times", "mul"):
        power = node.args[1]
        if isinstance(power, Op) and power.name == "pow" and exact(power.args[0]) == 10:
            places, exponent = decimals(node.args[0]), exact(power.args[1])
            fits = places is not None and exponent is not None and exponent.denominator == 1
            return places - int(exponent) if fits else None  # type: ignore[operator, arg-type]
    if not isinstance(node, Number) or (node.value.denominator != 1 and node.places is None):
        return None
    return node.places or 0


def _equal_at(points: Iterable[Mapping], first: Node, second: Node, tolerance: mp.mpf, enough: int) -> bool:
    count = 0
    for mine, other in both_values(first, second, points):
        if abs(mine - other) > tolerance * abs(mine):
            return False
        count += 1
    return count >= enough


def both_values(first: Node, second: Node, points: Iterable[Mapping]) -> Iterator[tuple[mp.mpf | mp.mpc, ...]]:
    """The values of two expressions at each different point at which both have one."""
    met = []
    for point in points:
        if point not in met:
            with contextlib.suppress(Undefined):
                yield value_at(first, point), value_at(second, point)
                met.append(point)


def value_at(node: Node, point: Mapping[str, Fraction]) -> mp.mpf | mp.mpc:
    """The value at DIGITS or WITH_VARIABLES digits. Raises Undefined."""
    with mp.workdps(WITH_VARIABLES if point else DIGITS):
        try:
            value = _decimal(_value(node, point))
        except (ZeroDivisionError, OverflowError, ValueError, TypeError, mp.NoConvergence) as error:
            raise Undefined(str(error)) from error
        if not mp.isfinite(value):
            raise Undefined("infinite")
        return value


def _value(node: Node, point: Mapping[str, Fraction] | None) -> Fraction | mp.mpf | mp.mpc:
    """A Fraction where all of it is rational arithmetic. `point` None: raises Undefined where it is not."""
    if isinstance(node, Number):
        return node.value if node.base is None else Fraction(in_base(node))
    if isinstance(node, Op):
        args = [_value(arg, point) for arg in node.args]
        if all(isinstance(arg, Fraction) for arg in args):
            found = _exact_operation(node.name, *args)
            if found is not None and _bits(found) <= (BITS if point is None else mp.prec - LOST):
                return found
    if point is None:
        raise Undefined("not rational")
    if isinstance(node, Op):
        value = _operation(node.name, args)
        if value and mp.isfinite(value) and abs(_size(value)) > HUGE:
            raise Undefined("too large")
        return value
    if isinstance(node, Symbol) and node.name in CONSTANTS:
        return CONSTANTS[node.name]()
    if isinstance(node, Symbol) and node.name in point:
        return _decimal(point[node.name])
    raise Undefined("no expression")


def _operation(name: str, given: list) -> mp.mpf | mp.mpc:
    args = [_decimal(arg) for arg in given]
    if name in ("add", "sub"):
        return _sum(args[0], args[1] if name == "add" else -args[1])
    if name in ARITHMETIC:
        return ARITHMETIC[name](*args)
    if name == "pow":
        return _power(args[0], given[1])
    if name.startswith("call "):
        return _unknown_function(name, args)
    if name not in FUNCTIONS or any(abs(arg) > HUGE for arg in args):
        raise Undefined(name)
    return FUNCTIONS[name](*args)


def _decimal(value: Fraction | mp.mpf | mp.mpc) -> mp.mpf | mp.mpc:
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _sum(a: mp.mpf, b: mp.mpf) -> mp.mpf:
    """0 where the terms cancel up to rounding. Raises Undefined where one is below the other's last digits."""
    total = a + b
    if a and b and abs(_size(a) - _size(b)) > mp.prec - LOST:
        raise Undefined("terms of too different sizes")
    cancelled = a and b and total and max(_size(a), _size(b)) - _size(total) > mp.prec - CANCELLED
    return mp.mpf(0) if cancelled else total


def _power(base: mp.mpf, power: Fraction | mp.mpf) -> mp.mpf:
    """The real one of the values for an odd denominator: (-8)^(1/3) = -2."""
    size, sign = _decimal(power), 1
    if isinstance(power, Fraction) and power.denominator % 2 and mp.im(base) == 0 and mp.re(base) < 0:
        base, sign = -base, (-1) ** (power.numerator % 2)
    if base and abs(size) * max(1, abs(_size(base))) > HUGE:
        raise Undefined("too large")
    return base**size * sign


def _unknown_function(name: str, args: list) -> mp.mpf:
    """A value that depends on the arguments alone, so that f(2x) is f(x + x)."""
    text = " ".join([name, *(mp.nstr(arg, 15) for arg in args)])
    return 1 + mp.mpf(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")) / 2**48


def _size(value: mp.mpf | mp.mpc) -> int:
    """The binary exponent."""
    return int(mp.mag(value))
