"""The built-in reward `code`: does the program in the response pass the problem's tests?"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward.extraction import Graded, after_thinking, fenced
from dynamo_megatron.reward.harness import PROGRAM_MODULE
from dynamo_megatron.reward.sandbox import Sandbox
from dynamo_megatron.types import Prompt

PYTHON = ("python", "python3", "py")
OUTPUT = 1 << 16  # bytes that a program may print beyond four times what is expected
TOLERANCE = 1e-6  # relative, below 1 absolute; for expected numbers with a decimal point or an exponent
# Without leading zeros: "0011" may be a string of digits.
INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
NUMBER = re.compile(INTEGER.pattern + r"(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,9})?")
RUNNING = (ast.Assert, ast.For, ast.While, ast.If, ast.With, ast.Try)


@dataclass(frozen=True)
class StreamTest:
    """The program has to print `expected` for `stdin`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """The program's function `name`, or the method of that name of its class Solution, has to return `expected` for
    `args`. `wrapped`: a list of one in `expected` may also stand for the value in it, as APPS and TACO write it."""

    name: str
    args: list[Any]
    expected: Any
    wrapped: bool = False

    def passes(self, value: Any) -> bool:
        """Whether the program may return `value`, which was parsed from JSON."""
        return same_value(value, self.expected) or (self.wrapped and same_value([value], self.expected))


@dataclass(frozen=True)
class AssertTest:
    """Python code that uses the program's names; the test passes where the code raises nothing."""

    source: str


def code_reward(config: RewardConfig) -> Callable[[Prompt, str], float]:
    """Returns the reward function with the limits of `config.code`. Raises ValueError where no sandbox can be made."""
    sandbox, code = Sandbox(config.code), config.code
    sys.set_int_max_str_digits(0)  # of expected and returned integers; `longest` bounds them

    def code_answer(prompt: Prompt, response: str) -> float:
        """The share of the problem's tests that the program in `response` passes; with `score: all` 1.0 for all of
        them, else 0.0. No expected output enters a sandbox that has the program. Raises ValueError for tests that
        cannot be parsed (`problem_tests`)."""
        tests = problem_tests(prompt, packages=code.python is not None)[: code.tests]
        found = fenced(after_thinking(response) or "", PYTHON)
        if found is None:
            return Graded(0.0, "")
        program, passed = found.encode(errors="replace"), 0
        for test in tests:
            right, late = _outcome(sandbox, program, test)
            passed += right
            if late or (code.score == "all" and not right):
                break
        return Graded(passed / len(tests) if code.score == "share" else passed == len(tests), found)

    return code_answer


def _outcome(sandbox: Sandbox, program: bytes, test: StreamTest | CallTest | AssertTest) -> tuple[bool, bool]:
    """(passed, ended by a time limit)"""
    match test:
        case StreamTest(stdin, expected):
            result = sandbox.run("run", program, stdin.encode(errors="replace"), OUTPUT + 4 * len(expected))
            return result.ok and same_text(result.output.decode(errors="replace"), expected), result.late
        case CallTest(name, args, expected):
            request = json.dumps({"name": name, "args": args})
            longest = OUTPUT + 4 * len(json.dumps(expected))
            result = sandbox.run("call", program, request.encode(errors="replace"), longest)
            try:
                return result.ok and test.passes(json.loads(result.output)), result.late
            except (ValueError, RecursionError, OverflowError):  # the program can write anything, however deeply nested
                return False, result.late
        case AssertTest(source):
            result = sandbox.check(program, source.encode(errors="replace"))
            return result.ok, result.late


def problem_tests(prompt: Prompt, packages: bool = False) -> list[StreamTest | CallTest | AssertTest]:
    """The tests in `prompt.answer`, in a form of docs/rewards.md. Raises ValueError for anything else, for tests that
    run nothing, and unless the sandbox has `packages` for those that import one."""
    given = prompt.answer
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = [given]
    if isinstance(given, Mapping):
        given = list(_columns(given))
    if not isinstance(given, list) or not given:
        raise ValueError(f"the code reward needs tests as the answer, not {prompt.answer!r:.200}")
    if all(isinstance(test, str) for test in given):
        return [_assertions(test, prompt.meta, packages) for test in given]
    if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in given):
        return [_case(test, prompt.meta) for test in given]
    raise ValueError(f"the code reward's tests are neither all text nor all with input and output: {given!r:.200}")


def same_text(output: str, expected: str) -> bool:
    """Compares word by word. Where a number with a decimal point or an exponent is expected, a number within TOLERANCE
    is equal; where an integer is expected, the same value in another notation ("1.0") is."""
    found, right = output.split(), expected.split()
    return len(found) == len(right) and all(map(_same_word, found, right))


def same_value(value: Any, expected: Any) -> bool:
    """Compares two values that were parsed from JSON. Where a float is expected, a number within TOLERANCE is equal."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[key], item) for key, item in expected.items())
        )
    if isinstance(expected, float) and isinstance(value, int | float):
        return _close(value, expected)
    return bool(value == expected)


def _same_word(found: str, right: str) -> bool:
    if found == right:
        return True
    if INTEGER.fullmatch(right):
        return NUMBER.fullmatch(found) is not None and Decimal(found) == Decimal(right)
    if not any(mark in right for mark in ".eE"):
        return False
    try:
        return _close(float(found), float(right))
    except ValueError:
        return False


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _columns(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tests of the layouts that have a list of inputs and a list of outputs."""
    inputs, outputs = (given.get(f"{name}s", given.get(name)) for name in ("input", "output"))
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise ValueError(f"the code reward needs as many inputs as outputs, and the answer is {given!r:.200}")
    for each, right in zip(inputs, outputs, strict=True):
        yield {"input": each, "output": right, "fn_name": given.get("fn_name")}


def _case(test: Mapping[str, Any], meta: Mapping[str, Any]) -> StreamTest | CallTest:
    name = test.get("fn_name")
    if test.get("testtype") == "functional":
        name = name or _function_name(test.get("metadata")) or _function_name(meta.get("metadata"))
        if name is None:
            raise ValueError("the code reward needs the function's name: fn_name, or func_name in metadata")
    if name is None:
        return StreamTest(_text(test["input"]), _text(test["output"]))
    args, expected = test["input"], test["output"]
    try:
        if isinstance(args, str):  # LiveCodeBench: one argument per line
            args = [json.loads(line) for line in args.splitlines() if line.strip()]
        if isinstance(expected, str) and "testtype" in test:
            expected = json.loads(expected)
        elif isinstance(expected, str) and isinstance(test["input"], str):  # in verl, where a result may be bare text
            with contextlib.suppress(ValueError):
                expected = json.loads(expected)
    except ValueError as error:
        raise ValueError(f"the code reward cannot read a test of {name} as JSON: {error}") from None
    return CallTest(name, list(args), expected, wrapped="testtype" not in test)


def _function_name(metadata: Any) -> str | None:
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def _text(stream: Any) -> str:
    return "\n".join(map(str, stream)) if isinstance(stream, list) else str(stream)


def _assertions(test: str, meta: Mapping[str, Any], packages: bool) -> AssertTest:
    imports = meta.get("test_imports")
    before = [*(imports if isinstance(imports, list) else []), str(meta.get("test_setup_code") or "")]
    after = []
    if "def check(" in test and meta.get("entry_point"):
        after = [f"check({meta['entry_point']})"]
    source = "\n".join([*map(str, before), test, *after])
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the code reward cannot read a test as Python ({error}): {test!r:.200}") from None
    if not any(map(_tests, ast.parse("\n".join([test, *after])).body)):
        raise ValueError(f"the code reward's test asserts nothing when it is run: {test!r:.200}")
    imported = [each.module or "" for each in statements if isinstance(each, ast.ImportFrom) and not each.level]
    imported = [name for name in imported if name != PROGRAM_MODULE]
    imported += [name.name for each in statements if isinstance(each, ast.Import) for name in each.names]
    roots = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    if PROGRAM_MODULE in roots:
        raise ValueError(f"a test imports {PROGRAM_MODULE} as a module; have it import the program's names from it")
    if roots and not packages:
        raise ValueError(
            f"a test imports {', '.join(sorted(roots))}, which the sandbox's Python lacks; name one that has it as "
            "reward.code.python"
        )
    return AssertTest(source)


def _tests(statement: ast.stmt) -> bool:
    """Whether it may assert something when it is run: not what is for scripts alone, nor random.seed(0)."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        return (
            not isinstance(function, ast.Attribute)
            or not isinstance(function.value, ast.Name)
            or (function.attr.startswith(("assert", "check", "test")))
        )
    script = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
    return isinstance(statement, RUNNING) and not script
