"""A calculator, written with the OpenAI Agents SDK (`pip install openai-agents`), and its training.

The agent is what it would be for any other model. `python3 calculator_agent.py` is a program that
answers one question; calculator.py is an environment of it. docs/guides/your-agent.md trains both.
"""

import ast
import asyncio
import json
import operator
import os
from collections.abc import Callable

from agents import Agent, FunctionTool, OpenAIProvider, RunConfig, Runner
from agents.tool_context import ToolContext
from openai import AsyncOpenAI

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
MAX_CHARS = 200


def value_of(node: ast.expr) -> int:
    """Return the value of an expression of integers."""
    match node:
        case ast.Call(func=ast.Name(id="print"), args=[inner], keywords=[]):
            return value_of(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value_of(left), value_of(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.Constant(value=int(value)):
            return value
    raise ValueError(f"cannot compute {ast.unparse(node)}")


async def compute(context: ToolContext[None], arguments: str) -> str:
    """Compute what the model asks for; what is wrong with that is for the model to read."""
    try:
        code = json.loads(arguments)["code"]
        if len(code) > MAX_CHARS:
            raise ValueError("too long")
        return str(value_of(ast.parse(code.strip(), mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        return f"[error] {error}"


# Its name and parameters are those of agentloop's own tool, which the laptop recipe's model knows.
CALCULATOR = FunctionTool(
    name="python_code_with_standard_io",
    description="Execute Python code with standard input and capture standard output. Each call is "
    "a program of its own.",
    params_json_schema={
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The Python program."},
            "input": {"type": "string", "description": "Its standard input. Default: empty."},
        },
        "required": ["code"],
    },
    on_invoke_tool=compute,
    strict_json_schema=False,
)
AGENT = Agent[None](name="calculator", tools=[CALCULATOR])


async def answer(question: str, client: AsyncOpenAI | None = None) -> str:
    """Return what the agent says to a question. Without a client, OPENAI_BASE_URL is asked."""
    provider = OpenAIProvider(openai_client=client)
    config = RunConfig(model_provider=provider, tracing_disabled=True)
    return str((await Runner.run(AGENT, question, run_config=config)).final_output)


if __name__ == "__main__":
    print(asyncio.run(answer(os.environ["AGENTLOOP_TASK"])))
