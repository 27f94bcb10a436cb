"""The built-in reward `code`: does the program in the response pass the problem's tests?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward.code_tests import AssertTest, CallTest, StreamTest, problem_tests, same_text
from dynamo_megatron.reward.extraction import after_thinking, fenced
from dynamo_megatron.reward.sandbox import Sandbox
from dynamo_megatron.types import Prompt

PYTHON = ("python", "python3", "py")
OUTPUT = 1 << 16  # bytes that a program may print beyond four times what is expected


def code_reward(config: RewardConfig) -> Callable[[Prompt, str], float]:
    """Returns the reward function with the limits of `config.code`. Raises ValueError where no sandbox can be made."""
    sandbox, code = Sandbox(config.code), config.code
    sys.set_int_max_str_digits(0)  # of expected and returned integers; `longest` bounds them

    def code_answer(prompt: Prompt, response: str) -> float:
        """Returns the share of the problem's tests that the program in `response` passes. With `score: all` returns
        1.0 where the program passes every test, else 0.0. Returns 0.0 where `response` has no program.

        The program is the last complete fenced block marked as Python, else the last unmarked block; only the text
        `after_thinking` is searched. No expected output enters a sandbox that has the program.
        Raises ValueError for tests that cannot be parsed (`problem_tests`).
        """
        tests = problem_tests(prompt)[: code.tests]
        found = fenced(after_thinking(response) or "", PYTHON)
        if found is None:
            return 0.0
        program, passed = found.encode(errors="replace"), 0
        for test in tests:
            right, late = _outcome(sandbox, program, test)
            passed += right
            if late or (code.score == "all" and not right):
                break
        return passed / len(tests) if code.score == "share" else float(passed == len(tests))

    return code_answer


def _outcome(sandbox: Sandbox, program: bytes, test: StreamTest | CallTest | AssertTest) -> tuple[bool, bool]:
    """(passed, ended by a time limit)"""
    match test:
        case StreamTest(stdin, expected):
            result = sandbox.run("run", program, _encoded(stdin), OUTPUT + 4 * len(expected))
            return result.ok and same_text(result.output.decode(errors="replace"), expected), result.late
        case CallTest(name, args, expected):
            request = json.dumps({"name": name, "args": args})
            longest = OUTPUT + 4 * len(json.dumps(expected))
            result = sandbox.run("call", program, _encoded(request), longest)
            return result.ok and _returned(result.output, test), result.late
        case AssertTest(source):
            result = sandbox.check(program, _encoded(source))
            return result.ok, result.late


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")


def _returned(output: bytes, test: CallTest) -> bool:
    try:
        return test.passes(json.loads(output))
    except (ValueError, RecursionError, OverflowError):  # the program can write anything, however deeply nested
        return False
