"""A server and a learner for runs that are struck: they start fast, and need no weights.

    python -m tests.agentloop.cli.struck_parts --model-path FOLDER --port PORT ...    the server
    python -m tests.agentloop.cli.struck_parts RUN/logs/learner.json                  the learner

What the server says is a function of the prompt and of the weights, which are a digest of all that
the learner was trained on, so two runs that were trained alike have the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web

from agentloop.models import SMALL
from bench import kill_learner
from bench.kill_parts import PlayedServer

_MODEL = ("config.json", "tokenizer.json", "tokenizer_config.json")
_NUM_REPLY = 4
_FIRST_WORD, _NUM_WORDS = 100, 300  # ids of the vocabulary that are words


class Server(PlayedServer):
    """Answers each prompt; the model that it starts with has no digest."""

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/ready", self._ready)
        return app

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["input_ids"]
        drawn = hashlib.sha256(f"{prompt} {self._digest}".encode()).digest()[:_NUM_REPLY]
        ids = [_FIRST_WORD + number % _NUM_WORDS for number in drawn]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": self._version,
            "completion_tokens": len(ids),
            "output_token_logprobs": [[-token / 1000, token, None] for token in ids],
        }
        response = web.StreamResponse()
        await response.prepare(request)
        frame = {"output_ids": ids, "meta_info": meta}
        await response.write(b"data: " + json.dumps(frame).encode() + b"\n\ndata: [DONE]\n\n")
        return response


class Learner(kill_learner.PlayedLearner):
    """Publishes models that the runtime can load, and says when they cannot be written."""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return super().handle(request)
        except OSError as error:
            return {"ok": False, "error": str(error)}

    def model(self, version: str) -> dict[str, Any]:
        files = {name: json.loads((SMALL / name).read_bytes()) for name in _MODEL}
        template = (SMALL / "chat_template.jinja").read_text()
        files["tokenizer_config.json"]["chat_template"] = template
        files["published.json"] = {"version": version, "sha256": {}}
        return super().model(version) | files


def serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    assert (options.model_path / "config.json").is_file()

    async def run() -> None:
        runner = web.AppRunner(Server().app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", options.port).start()
        await anyio.sleep_forever()

    anyio.run(run)


if __name__ == "__main__":
    if sys.argv[1].startswith("--"):
        serve()
    else:
        kill_learner.main(Learner)
