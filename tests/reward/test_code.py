import json
import shutil

import pytest

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward.code import problem_tests, same_text, same_value
from dynamo_megatron.reward.extraction import fenced
from dynamo_megatron.reward.functions import load_function
from dynamo_megatron.types import Prompt

needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
ADD_LINES = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"
HUMAN_EVAL = """
METADATA = {'author': 'jt'}


def check(candidate):
    assert candidate(1, 2) == 3
    for n in range(3):
        assert candidate(n, n) == 2 * n
"""
# (answer, meta, a right program)
LAYOUTS = {
    "APPS, streams": ({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}, {}, ADD_LINES),
    "APPS, lines": ({"inputs": [["1 2"]], "outputs": [["3"]]}, {}, ADD_LINES),
    "verl, function": ({"fn_name": "add", "inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", "ab"]}, {}, ADD),
    "APPS, function": ({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}, {}, ADD),
    "LeetCode, a method named like a function of heapq": (
        {"fn_name": "merge", "inputs": [[[3], [1]]], "outputs": [[3, 1]]},
        {},
        "class Solution:\n    def merge(self, first: list, second: Optional[list]):\n        return first + second",
    ),
    "LeetCode, names that it imports, and deep recursion": (
        {"fn_name": "f", "inputs": [[9_000]], "outputs": [[9_002]]},
        {},
        "class Solution:\n    def f(self, n):\n"
        "        return gcd(2, 4) if n <= 0 or n == inf else 1 + self.f(deepcopy(n) - 1)",
    ),
    "assertions on what was changed in place": (
        [
            "nums = [3, 1]\nput_in_order(nums)\nassert nums == [1, 3]",
            "def check(candidate):\n    seen = {'a': [2, 1]}\n    candidate(items=seen['a'])\n"
            "    assert seen == {'a': [1, 2]}\ncheck(put_in_order)",
        ],
        {},
        "def put_in_order(items): items[:] = items[1:] + items[:1]",
    ),
    "CodeContests": ({"input": ["1 2\n"], "output": ["3\n"]}, {}, ADD_LINES),
    "LiveCodeBench, streams": ([{"input": "1 2", "output": "3", "testtype": "stdin"}], {}, ADD_LINES),
    "LiveCodeBench, function": (
        json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
        {"metadata": '{"func_name": "add"}'},
        ADD,
    ),
    "MBPP": (["assert add(1, 2) == 3", "assert math.isclose(add(.1, .2), .3)"], {"test_imports": ["import math"]}, ADD),
    "MBPP, a tree made of the program's objects": (
        ["assert height(root) == 2"],
        {"test_setup_code": "root = Node()\nroot.left = Node()"},
        "class Node: left = None\ndef height(node): return 1 + height(node.left) if node else 0",
    ),
    "MBPP, a generator without end": (
        ["assert next(f()) == 1"],
        {},
        "def f():\n    while True: yield 0 + 1",
    ),
    "MBPP, set-up": (["assert add(ONE, 2) == 3"], {"test_setup_code": "ONE = 1"}, ADD),
    "HumanEval": (HUMAN_EVAL, {"entry_point": "add"}, ADD),
}


def prompt(answer, **meta):
    return Prompt("p", text="?", answer=answer, meta=meta)


def response(program):
    return f"I think so.\n\n```python\n{program}\n```\nIt prints:\n```\n3\n```\n"


@pytest.fixture(scope="module")
def score():
    return load_function("code", configured())


def configured(**code):
    code = {"seconds": 60.0, "cpu_seconds": 30, **code}
    return RewardConfig(functions=["code"], deadline=120.0, code=code)


@needs_sandbox
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_public_data(score, layout):
    answer, meta, program = LAYOUTS[layout]
    assert score(prompt(answer, **meta), response(program)) == 1.0
    assert score(prompt(answer, **meta), response(program.replace("+", "*"))) == 0.0


@needs_sandbox
def test_the_share_of_the_tests_or_all_of_them(score):
    tests = prompt({"inputs": ["2 2", "1 2", "5 1"], "outputs": ["4", "2", "6"]})
    assert score(tests, response(ADD_LINES)) == pytest.approx(2 / 3)
    assert load_function("code", configured(score="all"))(tests, response(ADD_LINES)) == 0.0
    assert load_function("code", configured(score="all", tests=1))(tests, response("print(4)")) == 1.0


@needs_sandbox
def test_tests_after_one_that_is_late_are_not_run():
    late = load_function("code", configured(cpu_seconds=1))
    program = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    assert late(prompt({"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]}), response(program)) == 0.25
    program = "def f(n):\n    while n == 2: pass\n    return n"
    assert late(prompt([f"assert f({n}) == {n}" for n in (1, 2, 3, 4)]), response(program)) == 0.25


FORGERIES = {
    "leaves in the function": "import os\ndef add(a, b): os._exit(0)",
    "writes a verdict everywhere": """
import os
for descriptor in range(64):
    for verdict in (b"passed\\n", b'{"value": true}\\n', b"3\\n"):
        try: os.write(descriptor, verdict)
        except OSError: pass
def add(a, b): raise SystemExit(0)
""",
    "an object that is equal to anything": """
class Equal:
    def __eq__(self, other): return True
    def __bool__(self): return True
def add(a, b): return Equal()
""",
    "changes the harness": """
import sys, json, builtins
main = sys.modules["__main__"]
for name in list(vars(main)):
    if callable(vars(main)[name]) and name not in ("load", "imported", "serve", "call", "main"):
        setattr(main, name, lambda *args, **named: True)
builtins.AssertionError = type("Quiet", (Exception,), {"__init__": lambda *args: None})
json.dumps = lambda *args, **named: '{"value": true}'
def add(a, b): return 4
""",
    "the tests' names": """
class Always:
    def __call__(self, *args): return True
    isclose = eq = __call__
import math
math.isclose = lambda *args, **named: True
abs = len = all = sorted = range = check = print = Always()
def add(a, b): return 4
""",
    "ends the loop of the tests": "def add(a, b): raise StopIteration",
    "reads what is expected": """
import gc, os, sys
def is_it(value):
    return "".join(["918", "273"]) in str(value) if isinstance(value, (str, bytes, int)) else False
def search():
    for folder, folders, names in os.walk("/"):
        folders[:] = [name for name in folders if name not in ("usr", "lib", "lib64", "dev", "sys") and name[0] != "."]
        for name in names:
            with open(os.path.join(folder, name), errors="replace") as file:
                if is_it(file.read()): return True
    for descriptor in range(3, 64):
        try:
            os.set_blocking(descriptor, False)
            if is_it(os.read(descriptor, 1 << 16)): return True
        except OSError:
            continue
        finally:
            try: os.set_blocking(descriptor, True)
            except OSError: pass
    frame = sys._getframe()
    while frame:
        if any(map(is_it, frame.f_locals.values())): return True
        frame = frame.f_back
    for holder in gc.get_objects():
        if isinstance(holder, (list, tuple)) and any(map(is_it, holder)): return True
        if isinstance(holder, dict) and any(map(is_it, list(holder.values()))): return True
    return False
def add(a, b): return int("".join(["918", "273"])) if search() else 4
def solve(): print(add(1, 2))
""",
}


@needs_sandbox
@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_verdict_is_forged(score, forgery):
    expected = 918_273
    program = FORGERIES[forgery]
    names = [
        f"assert math.isclose(add(1, 2), {expected})",
        f"assert all([add(1, 2) == {expected}])",
        f"assert all(map(lambda a: add(a, 2) == {expected}, range(3)))",
        f"assert Counter([add(1, 2)]) == Counter([{expected}])",
    ]
    for answer, meta in (
        ([f"assert add(1, 2) == {expected}"], {}),
        (names, {}),
        (f"def check(candidate):\n    assert candidate(1, 2) == {expected}", {"entry_point": "add"}),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [expected]}, {}),
    ):
        assert score(prompt(answer, **meta), response(program)) == 0.0
    stream = prompt({"inputs": ["1 2"], "outputs": [str(expected)]})
    assert score(stream, response(program + "\nif 'solve' in globals(): solve()")) == 0.0


@needs_sandbox
def test_what_tests_and_programs_can_give_each_other(score):
    program = """
class Pair:
    def __init__(self, first, second): self.first, self.second = first, second
    def total(self): return self.first + self.second
def longest(pairs): return max(pairs, key=Pair.total)
def plain(x): return x, {1: {2, 3}, "k": b"b"}, frozenset([1j]), None, float("inf")
def lazily(n): return (i for i in range(n))
def lists(d): return range(2), deque([3], maxlen=1), d.keys(), d.values(), d.items()
def fails(): raise KeyError("k")
def sum(a, b): return a - b
from bisect import bisect
def merge(a, b): return [3]
def own():
    class Own(Exception): pass
    raise Own("o")
"""
    tests = [
        "assert longest([Pair(1, 2), Pair(3, 4)]).first == 3 and Pair(1, 2).total() == 3",
        "assert plain((1, [2])) == ((1, [2]), {1: {2, 3}, 'k': b'b'}, frozenset([1j]), None, float('inf'))",
        "from .solution import lists as made\nr, q, k, v, i = made({1: 2})\nassert [q.popleft()] == [3] and 2 in v\n"
        "assert r == range(2) and q == collections.deque() and q.maxlen == 1 and k == {1} and i == {(1, 2)}",
        "def check():\n    from solution import sum as sum, merge, bisect\n"
        f"    assert sum(9, merge(1, 2)[0]) == {'1+' * 700}0 - 694\ncheck()",
        "assert list(lazily(3)) == [0, 1, 2] and lazily(0) != []",
        "try:\n    fails()\nexcept KeyError: pass\nelse: assert False",
        "try:\n    own()\nexcept RuntimeError as error: assert str(error) == 'o'",
        "pairs = [Pair(1, 2), Pair(3, 4)]\nfirst = pairs[0]\nassert longest(pairs) == pairs[1] and pairs[0] is first",
        "assert plain('x' * 1_000_000)[0] == 'x' * 1_000_000",
        "assert sum(10, 15) == -5",  # the program's, not Python's
        "assert set(merge([1], [2])) == {3}",
        "def check(candidate):\n    assert candidate(10, 15) == -5\ncheck(sum)",
    ]
    for test in tests:
        assert score(prompt([test]), response(program)) == 1.0, test
    lacked = ("max", "permutations as p", "absent as len")
    none = [f"from solution import {name}\nassert {name.split()[-1]}([1, 2])" for name in lacked]
    for test in ("assert plain(lambda: 1)", "assert Pair(1, 2) == Pair(1, 2)", "assert absent(1)", *none):
        assert score(prompt([test]), response(program)) == 0.0, test


@needs_sandbox
@pytest.mark.parametrize("program", ["(" * 100_000, "print(9 ** 9 ** 9)", "\ud800 = 1"], ids=range(3))
def test_broken_programs_get_nothing(program):
    quick = load_function("code", configured(cpu_seconds=1))
    assert quick(prompt({"inputs": ["1 2"], "outputs": ["3"]}), response(program)) == 0.0


def test_the_program_is_the_last_block_of_python():
    def found(text):
        return fenced(text, ("python", "py"))

    assert found("```python\na\n```\n```Python\nb\n```\n```\nout\n```") == "b\n"
    assert found("```\na\n```\n```cpp\nb\n```\n```\nc\n```") == "c\n"
    assert found("~~~py\n```\n~~~\n") == "```\n"
    assert found("````python\n```\nx\n```\n````") == "```\nx\n```\n"
    assert found("```python\na\n```\n```python\ncut off") == "a\n"
    assert found("  ```python\n  a\n    b\n c\n  ```") == "a\n  b\nc\n"
    assert found('```python title="x.py"\na\n```') == "a\n"
    assert found("```python\n```") == ""
    for text in ("", "a = 1", "```python\na", "```cpp\na\n```", "`a`"):
        assert found(text) is None
    assert found("```" * 300_000) is None


@needs_sandbox
def test_integers_of_any_length_are_printed_returned_and_compared(score):
    long = "1" + "0" * 5000
    returned = {"fn_name": "f", "inputs": [[5000]], "outputs": ["LONG"]}
    for answer in ({"inputs": [""], "outputs": [long]}, json.dumps(returned).replace('"LONG"', long)):
        program = "def f(n): return 10**n\nif __name__ == '__main__': print(f(5000))"
        assert score(prompt(answer), response(program)) == 1.0
        assert score(prompt(answer), response(program.replace("10**n", "10**n + 1"))) == 0.0


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("YES", "Yes", False),
        ("1 2", "1 2 3", False),
        ("0.3333333", "0.33333333333", True),
        ("0.34", "0.33", False),
        ("3", "3.0", True),
        ("3.0000001", "3", False),
        ("100000000000001.0", "100000000000002", False),
        ("0011", "11", False),
        ("nan", "1", False),
    ],
)
def test_when_an_output_is_right(output, expected, same):
    assert same_text(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, [2.0000000001]], [1, [2.0]], True),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ([1, 2], [1], False),
        ("1", 1, False),
        (10**16 + 1, 10**16, False),
    ],
)
def test_when_a_value_is_right(value, expected, same):
    assert same_value(value, expected) is same


def test_only_layouts_that_wrap_results_take_a_list_of_one_for_the_value_in_it():
    bare = [{"input": "1", "output": "[3]", "testtype": "functional", "metadata": {"func_name": "f"}}]
    for answer, wrapped in (({"fn_name": "f", "inputs": [[1]], "outputs": [[3]]}, True), (bare, False)):
        (test,) = problem_tests(prompt(answer))
        assert test.passes([3]) and test.passes(3) is wrapped and not test.passes([[3]])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "needs tests as the answer"),
        ({"inputs": ["1"], "outputs": []}, "as many inputs as outputs"),
        ([{"input": "1"}], "neither all text nor all with input and output"),
        ("import unittest\nclass Tests(unittest.TestCase):\n    def test(self): assert f()", "asserts nothing"),
        (
            "import random\nrandom.seed(0)\ndef test(): assert f()\nif __name__ == '__main__':\n    test()",
            "asserts nothing",
        ),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "needs the function's name"),
        ({"fn_name": "f", "inputs": ["not JSON"], "outputs": [1]}, "as JSON"),
        ("(" * 10_000, "cannot read a test as Python"),
        ("import math, numpy.linalg\nassert f()", "imports numpy, which the sandbox's Python lacks"),
        ("import solution\nassert solution.f()", "imports solution as a module"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_of_the_row(answer, words):
    with pytest.raises(ValueError, match=words):
        problem_tests(prompt(answer))
