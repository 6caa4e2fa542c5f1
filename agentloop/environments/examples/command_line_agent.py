"""An agent that is a program of its own: it asks a model over HTTP and runs the model's Python.

It knows nothing of agentloop, and needs nothing but Python. docs/guides/your-agent.md trains it.
"""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "python_code_with_standard_io",
        "description": "Execute Python code with standard input and capture standard output. Each "
        "call is a program of its own.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The Python program."},
                "input": {
                    "type": "string",
                    "description": "Its standard input. Default: empty.",
                },
            },
            "required": ["code"],
        },
    },
}


def ask(messages: list[dict[str, object]]) -> Any:
    """Return the model's next message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, "tools": [TOOL]}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def run(code: str, given: str = "") -> str:
    """Run a program, in this container, and return its output."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "[timeout]"
    return done.stdout + done.stderr[-1000:]


def main() -> None:
    question = os.environ["AGENTLOOP_TASK"]
    messages: list[dict[str, object]] = [{"role": "user", "content": question}]
    for _ in range(8):
        message = ask(messages)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            try:
                arguments = json.loads(call["function"]["arguments"])
                output = run(arguments["code"], arguments.get("input", ""))
            except (ValueError, KeyError, TypeError) as error:
                output = f"[bad arguments] {error!r}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        if not message.get("tool_calls"):
            print(message["content"])
            return


if __name__ == "__main__":
    main()
