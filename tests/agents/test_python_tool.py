"""The tool that runs Python in a sandbox."""

import asyncio
import json
import shutil

import pytest

from dynamo_megatron.agents.python_tool import LONGEST, python_tool

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


@pytest.fixture(scope="module")
def run():
    """run(programs) -> what the model is told of each."""
    tool = python_tool(seconds=60.0, cpu_seconds=1)

    async def together(calls):
        return await asyncio.gather(*map(tool, calls))

    return lambda *programs: asyncio.run(together([json.dumps({"code": program}) for program in programs]))


def test_what_a_program_raises_is_shown(run):
    doctest = "def f():\n    '>>> f()\\n1'\nimport doctest\nprint(doctest.testmod(report=False).failed)"
    raised, syntax, failed = run("print(1)\n1 / 0", "(", doctest)
    assert raised == "1\nZeroDivisionError: division by zero\n"
    assert syntax == "SyntaxError: '(' was never closed (program, line 1)\n" and failed.endswith("\n1\n")


def test_limits_are_named(run):
    endless, chatty = run("print(1, end='')\nwhile True: pass", f"print('x' * {LONGEST + 1})")
    assert endless == "1error: the time limit ended it"
    assert chatty == f"{'x' * LONGEST}error: it did not end well, or wrote more than {LONGEST} bytes"


@pytest.mark.parametrize("arguments", ["{", "{}", "[]", "3"])
def test_arguments_without_a_program(arguments):
    assert asyncio.run(python_tool()(arguments)) == "error: give an object with the program as code"
