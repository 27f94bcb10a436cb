"""A tool for agents: Python in the sandbox of the reward `code` (docs/agents.md). Needs the trainer's interpreter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo_megatron.config.reward import CodeConfig
from dynamo_megatron.reward.sandbox import Sandbox

LONGEST = 1 << 14  # bytes of output
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program that has no network and no packages. Gives what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
PROGRAM = """
import io, sys
# Without a buffer: what it printed before a limit ends it is shown.
sys.stdout = sys.stderr = io.TextIOWrapper(sys.stdout.buffer.raw, "utf-8", write_through=True)
del io, sys
try:
    exec(compile({code!r}, "program", "exec"), globals())
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


def python_tool(**limits: Any) -> Callable[[str], Awaitable[str]]:
    """A function that runs a call of PYTHON, given its arguments as JSON, and returns the text for the model.

    `limits`: keys of `reward.code`, such as seconds and memory. Raises InputError where no sandbox can be made.
    """
    sandbox = Sandbox(CodeConfig(**limits))

    async def run(arguments: str) -> str:
        try:
            code = json.loads(arguments)["code"]
        except (ValueError, KeyError, TypeError):
            return "error: give an object with the program as code"
        program = PROGRAM.format(code=str(code)).encode("utf-8", "replace")
        result = await asyncio.to_thread(sandbox.run, "run", program, b"", LONGEST)
        output = result.output.decode(errors="replace")
        if result.late:
            return f"{output}error: the time limit ended it"
        return output if result.ok else f"{output}error: it did not end well, or wrote more than {LONGEST} bytes"

    return run
