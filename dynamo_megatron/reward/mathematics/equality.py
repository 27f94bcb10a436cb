"""Whether two parsed answers (`parser`) are equal: values, quantities, lists, sets, intervals, relations."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from mpmath import mp

from dynamo_megatron.reward.mathematics.tokens import PURE, TRIGONOMETRIC
from dynamo_megatron.reward.mathematics.value import (
    DIGITS,
    DOTS,
    ENOUGH,
    INFINITY,
    REALS,
    Group,
    Node,
    Number,
    Op,
    Quantity,
    Relation,
    Symbol,
    Undefined,
    both_values,
    decimals,
    equal_values,
    exact,
    points,
    rebuilt,
    value_at,
    variables,
    walk,
)

MOST_ITEMS = 100
PROPORTIONAL = (("=",), ("!=",), ("<",), ("<=",))
LESS = {"<": "<", "<=": "<=", ">": "<", ">=": "<="}


def equal(reference: Node, answer: Node) -> bool:
    """Whether two answers are equal. A unit, a percent sign, a base or "x =" may be missing in one of them. The order
    does not matter in lists and sets, and matters in tuples, intervals and sequences with dots."""
    reference, answer = _shape(reference), _shape(answer)
    if _about_one_variable(reference, answer) and same_set(reference, answer):
        return True
    if isinstance(reference, Relation) or isinstance(answer, Relation):
        return _equal_relations(reference, answer)
    if isinstance(reference, Group) or isinstance(answer, Group):
        if not isinstance(reference, Group) and answer.kind == "list" and len(answer.items) == 2:  # 11/2 or 5.5
            value, again = answer.items
            if value != again and not any(map(_is_structured, answer.items)) and _rounds_to(value, again):
                return equal(reference, value)
        return _equal_groups(reference, answer)
    if isinstance(reference, Quantity) or isinstance(answer, Quantity):
        return _equal_quantities(reference, answer)
    if isinstance(reference, Number) and isinstance(answer, Number) and reference.base is not None:
        return reference.value == answer.value and answer.base in (None, reference.base)
    return equal_values(reference, answer)


def _shape(node: Node) -> Node:
    """Lists of one element are the element, a ± b is two elements, 30° and 10% are quantities."""
    if isinstance(node, Op) and node.name in PURE:
        return Quantity(node.args[0], PURE[node.name])
    if isinstance(node, Op) and node.name == "neg" and isinstance(node.args[0], Op) and node.args[0].name in PURE:
        return Quantity(Op("neg", node.args[0].args), PURE[node.args[0].name])
    if isinstance(node, Op) or (isinstance(node, Group) and node.kind in ("list", "set", "()")):
        several = isinstance(node, Group) and node.kind != "()"
        items = [each for item in (node.items if several else (node,)) for each in _both_signs(item)]
        if len(items) == 1:
            return node if items[0] is node else _shape(items[0])  # {(x, y) = (1, 2)}
        return Group(node.kind if several else "list", tuple(items))
    if isinstance(node, Relation) and node.signs == ("=",):
        if all(isinstance(member, Group) and member.kind == "()" for member in node.members):  # (x, y) = (1, 2)
            names, values = (member.items for member in node.members)  # type: ignore[union-attr]
            if len(names) == len(values) and all(isinstance(name, Symbol) for name in names):
                return Group("list", tuple(Relation(("=",), pair) for pair in zip(names, values, strict=True)))
        values = _both_signs(node.members[1])
        if len(values) > 1:
            return Group("list", tuple(replace(node, members=(node.members[0], value)) for value in values))
    return node


def _both_signs(node: Node) -> list[Node]:
    if not any(isinstance(part, Op) and part.name in ("pm", "mp") for part in walk(node)):
        return [node]
    return [_with_sign(node, sign) for sign in (1, -1)]


def _with_sign(node: Node, sign: int) -> Node:
    if isinstance(node, Op) and node.name in ("pm", "mp"):
        name = "add" if (node.name == "pm") == (sign == 1) else "sub"
        if isinstance(node.args[1], Group):  # \pm(1, 2)
            return node.args[1] if name == "add" else rebuilt(node.args[1], lambda item: Op("neg", (item,)))
        node = Op(name, node.args)
    return rebuilt(node, lambda part: _with_sign(part, sign))


# Quantities


def _equal_quantities(reference: Node, answer: Node) -> bool:
    if not isinstance(reference, Quantity) or not isinstance(answer, Quantity):
        quantity, bare = (reference, answer) if isinstance(reference, Quantity) else (answer, reference)
        assert isinstance(quantity, Quantity)
        if quantity.compound:
            return False
        pure = [Op(name, (quantity.value,)) for name, unit in PURE.items() if unit.powers == quantity.unit.powers]
        return equal(quantity.value, bare) or any(equal_values(number, bare) for number in pure)
    if reference.unit.powers != answer.unit.powers:
        return False
    ratio = answer.unit.factor / reference.unit.factor
    return equal_values(reference.value, Op("mul", (Number(ratio), answer.value)) if ratio != 1 else answer.value)


# Lists, sets, tuples, intervals, matrices


def _equal_groups(reference: Node, answer: Node) -> bool:
    if not isinstance(reference, Group) or not isinstance(answer, Group):
        return False
    kinds = {reference.kind, answer.kind}
    if len(reference.items) > MOST_ITEMS or len(answer.items) > MOST_ITEMS:
        return False
    if reference.kind == "()" and answer.kind == "list":  # "3, 4" and "x = 3, y = 4" for (3, 4)
        return _equal_in_order(reference.items, _values_by_name(answer))
    if answer.kind == "()" and _assigns_several(reference):  # (3, 4) for "x = 3, y = 4"
        return _equal_in_order(_values_by_name(reference), answer.items)
    if kinds <= {"list", "set"}:
        if DOTS in reference.items + answer.items or _assigns_several(reference) != _assigns_several(answer):
            return _equal_in_order(reference.items, answer.items)
        if "set" in kinds:
            return _contained(reference.items, answer.items) and _contained(answer.items, reference.items)
        return _equal_in_any_order(reference.items, answer.items)
    if kinds == {"matrix", "()"}:  # a column as a tuple
        return _equal_in_order(_column(reference), _column(answer))
    same = _equal_in_any_order if reference.kind in ("union", "cap") else _equal_in_order
    return reference.kind == answer.kind and same(reference.items, answer.items)


def _column(group: Group) -> list[Node]:
    """The items of a tuple, or of a matrix of one column."""
    rows = (item.items if isinstance(item, Group) and item.kind == "row" else (item,) for item in group.items)
    return [row[0] if len(row) == 1 else Group("row", row) for row in rows]


def _values_by_name(group: Group) -> list[Node]:
    """3 and 4 of y = 4, x = 3; in the order of the alphabet where the names are usual coordinates, else as written. The
    items themselves where they are no such relations."""
    relations = [item for item in group.items if isinstance(item, Relation) and isinstance(item.members[0], Symbol)]
    if len(relations) != len(group.items):
        return list(group.items)
    names = [item.members[0].name for item in relations]  # type: ignore[union-attr]
    if set(names) <= set("xyzabc"):
        relations = [relation for _, relation in sorted(zip(names, relations, strict=True), key=lambda pair: pair[0])]
    return [item.members[-1] for item in relations]


def _assigns_several(group: Group) -> bool:
    """x = 1, y = 2: values of several variables; not x_1 = 1, x_2 = 2, which are several values of one."""
    return len({_without_index(item.members[0]) for item in group.items if isinstance(item, Relation)}) > 1


def _without_index(node: Node) -> Node:
    return Symbol(re.sub(r"_\d+$", "", node.name)) if isinstance(node, Symbol) else node


def _equal_in_order(reference: Sequence[Node], answer: Sequence[Node]) -> bool:
    pairs = zip(reference, answer, strict=False)
    return len(reference) == len(answer) and all(
        mine == other if DOTS in (mine, other) else equal(mine, other) for mine, other in pairs
    )


def _equal_in_any_order(reference: Sequence[Node], answer: Sequence[Node]) -> bool:
    if len(reference) != len(answer):
        return False
    left = list(answer)
    for item in reference:
        found = next((other for other in left if equal(item, other)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _contained(items: Sequence[Node], others: Sequence[Node]) -> bool:
    return all(any(equal(item, other) for other in others) for item in items)


# Relations


def _equal_relations(reference: Node, answer: Node) -> bool:
    if not isinstance(reference, Relation) or not isinstance(answer, Relation):
        relation, other = (reference, answer) if isinstance(reference, Relation) else (answer, reference)
        assert isinstance(relation, Relation)
        stated = _stated(relation, of_answer=relation is answer)
        return any(equal(value, other) if relation is reference else equal(other, value) for value in stated)
    intervals = [interval_of(each) or _element_of(each) for each in (reference, answer)]
    if all(intervals) and _variable(reference) == _variable(answer):
        return equal(*intervals)  # type: ignore[arg-type]
    if reference.modulus or answer.modulus:
        return _congruent(reference, answer)
    mine, other = (turned_left(_renamed(each)) for each in (reference, answer))
    if _without_index(other.members[0]) == mine.members[0]:  # x_1 = 3 for x = 3
        other = replace(other, members=(mine.members[0], *other.members[1:]))
    if mine.signs == other.signs and equal(mine.members[0], other.members[0]):
        return _equal_in_order(mine.members[1:], other.members[1:])
    return mine.signs == other.signs and mine.signs in PROPORTIONAL and _proportional(mine, other)


def _element_of(relation: Relation) -> Node | None:
    r"""The set of x \in [1, 2]; None for other relations."""
    return relation.members[-1] if relation.signs == ("in",) else None


def _stated(relation: Relation, of_answer: bool) -> list[Node]:
    r"""What a relation says that something is: 3 of x = 3, f(x) = 3 and 1 + 2 = 3, in an answer also of a + b = 3; the
    set of x \in [1, 2] and of x < 3; of x = 1/3 \approx 0.333 both, if the second is the first, rounded. Empty for
    others and for chains of different numbers (x = 8 = 7)."""
    members = relation.members
    if relation.signs[-1] == "approx" and set(relation.signs) <= {"=", "approx"}:
        *_, value, last = members
        if len(members) == 2 and _is_name(value, False) and not (is_constant(value) and _rounds_to(value, last)):
            return [last]  # not of pi = 3.14
        if _is_structured(value) or _is_structured(_bare_value(last)):
            return []
        if not is_constant(value):
            stated = last if is_constant(last) else value  # both would be two answers
            return [stated] if _is_name(members[0], False) else []
        return [value, last] if _rounds_to(_bare_value(value), _bare_value(last)) else [value]
    if set(relation.signs) != {"="} or relation.modulus is not None:
        found = _element_of(relation) or interval_of(relation)
        return [] if found is None else [found]
    if isinstance(members[-1], Symbol) and not _is_name(members[0], True):  # 3 = x
        members = members[::-1]
    names = _is_name(members[0], of_answer) or (of_answer and isinstance(members[-1], Group))
    chain = members[1:] if names else members
    values = [_bare_value(member) for member in chain]
    checked = [value for value in values if not _is_structured(value) and (not names or is_constant(value))]
    if not names and len(checked) < len(values):
        return []
    last = chain[-1]  # 18/30 * 100 = 60% is 60, and 18/30 * 100% = 60% is .6
    percent = isinstance(last, Op) and last.name == "percent"
    holds = (_rounds_to(value, checked[-1]) or (percent and equal_values(value, last)) for value in checked[:-1])
    return [last] if all(holds) else []


def _rounds_to(value: Node, last: Node) -> bool:
    """Whether a chain of equations may go from `value` to `last`: the second is the first, or the first rounded."""
    if equal_values(value, last):
        return True
    places = decimals(last)
    if not places or abs(places) > 100 or decimals(value) is not None:
        return False
    pairs = both_values(value, last, [{}])
    return any(abs(exactly - about) <= min(mp.mpf(10) ** -places, abs(exactly) / 50) for exactly, about in pairs)


def _is_structured(node: Node) -> bool:
    return any(isinstance(part, Group | Relation | Quantity) for part in walk(node))


def _bare_value(node: Node) -> Node:
    """12 of 12 cm and of 12 degrees, for a chain such as 3 * 4 = 12 cm."""
    if isinstance(node, Quantity) and not node.compound:
        return node.value
    return node.args[0] if isinstance(node, Op) and node.name in PURE else node


def _is_name(node: Node, combined: bool) -> bool:
    """What is asked for, as the left side of an answer: x, f(2), AB, and if `combined` a + b, m/n, P(2); not 2x."""
    match node:
        case Symbol():
            return True
        case Op(name="mul", args=args) if all(isinstance(arg, Symbol) and arg.name.isupper() for arg in args):
            return True
        case Op(name="add" | "sub" | "mul" | "times" | "div", args=args):
            powers = [arg.args[0] if isinstance(arg, Op) and arg.name == "pow" else arg for arg in args]
            return combined and all(_is_name(arg, True) for arg in powers)
        case Op(name=name):
            return name.startswith("call ") or (combined and name in TRIGONOMETRIC)
    return False


def _about_one_variable(*nodes: Node) -> bool:
    return len({_variable(node) for node in nodes if isinstance(node, Relation)}) < 2


def _variable(relation: Relation) -> Node | None:
    return next((member for member in relation.members if isinstance(member, Symbol) and member != INFINITY), None)


def _renamed(relation: Relation) -> Relation:
    """f(n) = n^2 with another name for n: the argument of a defined function has no meaning outside."""
    first = relation.members[0]
    if not isinstance(first, Op) or not first.name.startswith("call "):
        return relation
    names = {arg.name: f"argument {k}" for k, arg in enumerate(first.args) if isinstance(arg, Symbol)}
    return rebuilt(relation, lambda member: _with_names(member, names))  # type: ignore[return-value]


def _with_names(node: Node, names: dict[str, str]) -> Node:
    if isinstance(node, Symbol):
        return Symbol(names.get(node.name, node.name))
    return rebuilt(node, lambda part: _with_names(part, names))


def _congruent(reference: Relation, answer: Relation) -> bool:
    if reference.modulus is None or answer.modulus is None or not equal(reference.modulus, answer.modulus):
        return False
    if len(reference.members) != len(answer.members) or not equal(reference.members[0], answer.members[0]):
        return False
    modulus, mine, other = map(exact, (reference.modulus, reference.members[-1], answer.members[-1]))
    if modulus and mine is not None and other is not None:
        return (mine - other) % modulus == 0
    return equal(reference.members[-1], answer.members[-1])


def _proportional(reference: Relation, answer: Relation) -> bool:
    """Whether left - right of one is a constant times that of the other, so that both say the same."""
    mine, other = (Op("sub", each.members) for each in (reference, answer))
    if _is_structured(mine) or _is_structured(other):
        return False
    pairs = list(both_values(mine, other, points(variables(mine, other), "real")))
    if len(pairs) < ENOUGH or any(a == 0 or b == 0 for a, b in pairs):
        return False
    ratios = [b / a for a, b in pairs]
    same = all(abs(ratio - ratios[0]) <= abs(ratios[0]) * 1e-25 for ratio in ratios)
    return same and (reference.signs[0] not in LESS or ratios[0].real > 0)


# Sets of real numbers


def same_set(first: Node, second: Node) -> bool:
    """Whether two intervals, unions, differences or the like are one set of real numbers. Membership can change only at
    the numbers in them, so it is compared at these, between them and beyond them."""
    with mp.workdps(2 * DIGITS), contextlib.suppress(Undefined):
        if _holds(first, mp.mpf(0)) == _holds(second, mp.mpf(0)):  # not for what is no set
            ends = sorted(_numbers(first, second)) or [mp.mpf(0)]
            between = [(low + high) / 2 for low, high in pairwise(ends) if not _near(low, high)]
            return all(_holds(first, x) == _holds(second, x) for x in [ends[0] - 1, *ends, *between, ends[-1] + 1])
    return False


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
    """With < and <= in place of > and >=."""
    if all(sign in (">", ">=") for sign in relation.signs):
        return Relation(tuple(LESS[sign] for sign in reversed(relation.signs)), relation.members[::-1])
    return relation


def _holds(node: Node, x: mp.mpf) -> bool:
    """Whether a set has the number `x`. Raises Undefined for what is no set of real numbers."""
    match node:
        case Symbol() if node == REALS or node.name == "emptyset":
            return node == REALS
        case Relation(signs=("!=",), members=(Symbol(), value)):
            return not _near(x, _number(value))
        case Relation() if (between := interval_of(node)) is not None:
            return _holds(between, x)
        case Group(kind="set", items=items):
            numbers = [_number(item) for item in items]
            return any(_near(x, number) for number in numbers)
        case Group(kind="()" | "[]" | "(]" | "[)" as ends, items=(left, right)):
            low = -mp.inf if left == Op("neg", (INFINITY,)) else _number(left)
            high = mp.inf if right == INFINITY else _number(right)
            if low > high or (low == high and ends != "[]"):
                raise Undefined("no interval")
            above = ends[0] == "[" if _near(x, low) else x > low
            return above and (ends[1] == "]" if _near(x, high) else x < high)
        case Group(kind="union" | "cap" | "minus" as kind, items=items):
            first, *others = [_holds(item, x) for item in items]
            if kind == "minus":
                return first and not any(others)
            return any([first, *others]) if kind == "union" else all([first, *others])
    raise Undefined("no set of real numbers")


def _number(node: Node) -> mp.mpf:
    value = value_at(node, {})
    if mp.im(value) != 0:
        raise Undefined("not real")
    return mp.re(value)


def _numbers(*nodes: Node) -> Iterator[mp.mpf]:
    """Those in the nodes."""
    for part in walk(*nodes):
        with contextlib.suppress(Undefined):
            yield _number(part)


def _near(x: mp.mpf, y: mp.mpf) -> bool:
    return abs(x - y) <= mp.mpf(10) ** -30 * abs(x)
