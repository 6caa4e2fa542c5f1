"""An MCP server without the SDK, for tests of its processes: it starts in milliseconds.

It speaks the protocol of 2025 on stdin and stdout. With the argument `stubborn` it ends neither at
the end of its stdin nor on SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

_count = 0


def count() -> str:
    """Count the calls of this tool."""
    global _count
    _count += 1
    return str(_count)


def end() -> str:
    """End the server in the middle of this call."""
    print("bye", file=sys.stderr, flush=True)
    os._exit(3)


def freeze() -> str:
    """Stop the server without ending it."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "thawed"


def processes() -> str:
    """Start a child that outlives this server, and return the ids of both."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return f"{os.getpid()} {child.pid}"


def cut() -> str:
    """Answer with half of a message."""
    print(_reply(content("hello"))[:-9], flush=True)
    return count()


def wrong() -> str:
    """Answer with JSON of another form."""
    print(json.dumps({"jsonrpc": "2.0", "id": _id, "result": "hello"}), flush=True)
    return count()


def nameless() -> str:
    """Answer with something that does not say to what."""
    print('{"jsonrpc": "2.0", "result', flush=True)
    return count()


def chatty() -> str:
    """Print other text before the answer."""
    print("Working ...\n5\n", flush=True)
    return count()


TOOLS = {
    tool.__name__: tool for tool in (count, end, freeze, processes, cut, wrong, nameless, chatty)
}
SILENT = ("cut", "wrong", "nameless")  # send no other answer
_id: Any = None


def content(text: str) -> dict[str, Any]:
    return {"result": {"content": [{"type": "text", "text": text}]}}


def _reply(answer: dict[str, Any]) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": _id, **answer})


def answer(method: str, params: Any) -> dict[str, Any]:
    match method:
        case "initialize":
            result: Any = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
        case "tools/list":
            schema = {"type": "object", "properties": {}}
            result = {"tools": [{"name": name, "inputSchema": schema} for name in TOOLS]}
        case "tools/call":
            return content(TOOLS[params["name"]]())
        case _:
            return {"error": {"code": -32601, "message": f"no method {method}"}}
    return {"result": result}


def main() -> None:
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    global _id
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            _id = message["id"]
            reply = _reply(answer(message["method"], message.get("params")))
            if (message.get("params") or {}).get("name") not in SILENT:
                print(reply, flush=True)
    if "stubborn" in sys.argv:
        time.sleep(600)


if __name__ == "__main__":
    main()
