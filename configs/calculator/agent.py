"""An agent that may use a calculator: `rollout.agent: configs.calculator.agent:agent` (docs/agents.md)."""

import ast
import json
import operator

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "The value of an expression of whole numbers with +, - and *.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def agent(prompt, session):
    messages = list(prompt.messages)
    while True:
        answer = await session.chat(messages, tools=TOOLS)
        messages.append(answer)
        if not answer.get("tool_calls"):
            return  # the reward functions score this answer
        for call in answer["tool_calls"]:
            result = calculate(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def calculate(arguments: str) -> str:
    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError):
        return "error"


def value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("neither a whole number nor a sum, a difference or a product")
