"""The service as its users meet it: the command, OpenAI's own client, curl-like requests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentloop.trajectory import Trajectory
from tests.commands import run_python
from tests.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is 37 times 48?"}]
PYTHON = {
    "type": "function",
    "function": {
        "name": "python_code_with_standard_io",
        "description": "Run Python.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "input": {"type": "string"}},
            "required": ["code"],
        },
    },
}


def start(sglang_url: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The command, and the URL of its one line."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "agentloop.serve"),
            *(f'servers=["{sglang_url}"]', "serve.port=0", "sampling.temperature=0"),
            "tool_timeout_s=60",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("agentloop is ready: http://127.0.0.1:"):
        stop(process, signal.SIGKILL)
        pytest.fail(f"the service said {line!r}")
    return process, line.split()[3].removesuffix("/v1")


def stop(process: subprocess.Popen[str], number: int) -> int:
    process.send_signal(number)
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(patient(120))


@pytest.fixture(scope="module")
def url(docker_engine: None, sglang_url: str) -> Iterator[str]:
    process, url = start(sglang_url)
    yield url
    assert stop(process, signal.SIGINT) == 130


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none needed", max_retries=0) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=patient(60), trust_env=False) as client:
        yield client


@pytest.mark.gate
def test_openais_client_streams_it(client: openai.OpenAI) -> None:
    content, reasoning, executed, finish = "", "", [], None
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="small-agent", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            extra = choice.delta.model_extra or {}
            content += choice.delta.content or ""
            reasoning += extra.get("reasoning_content", "")
            executed += extra.get("executed_tools", [])
            finish = choice.finish_reason or finish
    complete = client.chat.completions.create(model="small-agent", messages=QUESTION)  # type: ignore[arg-type]
    message = complete.choices[0].message
    assert content == message.content == "\\boxed{1776}"
    assert reasoning == (message.model_extra or {})["reasoning_content"]
    assert [tool["output"] for tool in executed] == ["1776"]
    assert finish == "stop"
    assert usage is not None
    assert complete.usage is not None
    assert usage.completion_tokens == complete.usage.completion_tokens > 10
    assert [model.id for model in client.models.list()] == ["small-agent", "small"]


def test_answer_ends_at_a_stop_sequence_or_its_limit(http: httpx.Client) -> None:
    """By tokens that SGLang samples: across their borders, and beyond the end of a turn."""

    def ask(**fields: object) -> tuple[str, str, int]:
        body = {"messages": QUESTION, **fields}
        complete = http.post("/v1/chat/completions", json=body).json()
        (choice,) = complete["choices"]
        num_tokens = complete["usage"]["completion_tokens"]
        return choice["message"]["content"], choice["finish_reason"], num_tokens

    complete, _, num_tokens = ask()
    assert complete == "\\boxed{1776}"
    stated, reported, num_sampled = ask(stop=["xed{17", "nothing"])
    assert (stated, reported) == ("\\bo", "stop")
    assert num_sampled < num_tokens
    assert ask(max_tokens=num_tokens - 1)[1:] == ("length", num_tokens - 1)
    assert ask(max_tokens=num_tokens + 20, ignore_eos=True)[1:] == ("length", num_tokens + 20)


def test_log_probabilities_are_those_of_the_sampled_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="small-agent",
        messages=QUESTION,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.usage is not None
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert len(tokens) == answer.usage.completion_tokens
    assert tokens[-1].token == "<|im_end|>"
    for token in tokens:  # greedy: the likeliest
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert bytes(token.bytes or ()).decode() == token.token


def test_client_that_leaves_cancels_its_rollout(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "stream": True, "temperature": 2}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_raw(64))
    deadline = time.monotonic() + patient(60)
    while "agentloop_rollouts_in_flight 0.0" not in http.get("/metrics").text:
        assert time.monotonic() < deadline


@pytest.mark.gate
def test_agent_of_an_environment_is_served_by_its_name(sglang_url: str) -> None:
    example = "env=agentloop.environments.examples.guess_number:guess"
    process, url = start(sglang_url, example, "budget.max_response_tokens=200", "--task", "2")
    try:
        with httpx.Client(base_url=url, timeout=patient(60)) as http:
            agent, _ = http.get("/v1/models").json()["data"]
            body = {"model": agent["id"], "messages": QUESTION}
            answer = http.post("/v1/chat/completions", json=body).json()
    finally:
        stop(process, signal.SIGINT)
    assert agent["id"].endswith("-guess")
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_sigterm_ends_it_and_leaves_no_container(docker_engine: None, sglang_url: str) -> None:
    process, url = start(sglang_url)
    owners = ["docker", "ps", "-a", "--format", '{{.Label "agentloop.sandbox.owner"}}']
    with httpx.Client(base_url=url, timeout=patient(60), trust_env=False) as http:
        http.post("/v1/chat/completions", json={"messages": QUESTION}).raise_for_status()
    assert stop(process, signal.SIGTERM) == 143
    remaining = subprocess.run(owners, capture_output=True, text=True, check=True).stdout.split()
    assert not [owner for owner in remaining if owner.startswith(f"{process.pid}-")]


def test_another_address_needs_a_token() -> None:
    ended = run_python("-m", "agentloop.serve", "serve.host=0.0.0.0", status=2)
    assert "serve.token" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.gate
def test_session_is_recorded_shown_scored_and_exported(
    docker_engine: None, sglang_url: str, tmp_path: Path
) -> None:
    record, tasks, out = (tmp_path / name for name in ("served", "tasks.jsonl", "good.jsonl"))
    process, url = start(sglang_url, f"record={record}")
    try:
        session = httpx.post(f"{url}/v1/sessions", timeout=patient(60)).json()
        body: dict[str, Any] = {"messages": [*QUESTION], "tools": [PYTHON]}

        def ask() -> Any:
            answer = httpx.post(
                f"{session['base_url']}/chat/completions", json=body, timeout=patient(60)
            )
            return answer.json()["choices"][0]["message"]

        call = ask()
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "1776"}
        body["messages"] += [call, result]
        assert "1776" in ask()["content"]
        ask()  # again: a branch
        lines = httpx.get(f"{session['url']}/trajectories", timeout=patient(60)).text.splitlines()
    finally:
        assert stop(process, signal.SIGINT) == 130
    (file,) = (record / "trajectories").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    served = [json.loads(line)["trajectory"] for line in lines]
    recorded = [Trajectory.from_dict(row["trajectory"] | {"id": row["served_id"]}) for row in rows]
    assert [trajectory.to_dict_per_token() for trajectory in recorded] == served
    assert [row["answer"] for row in rows] == 2 * ["\\boxed{1776}"]
    assert rows[1]["parent"] == rows[0]["trajectory"]["id"]

    def agentloop(*arguments: str | Path) -> str:
        return run_python("-m", "agentloop", *arguments).stdout

    tasks.write_text(json.dumps({"problem": QUESTION[0]["content"], "answer": "1776"}))
    assert "2 conversations scored, mean reward 1.000" in agentloop(
        "data", "score", record, "--tasks", tasks
    )
    agentloop("data", "dialogues", record, "--out", out)
    exported = [json.loads(line) for line in out.read_text().splitlines()]
    assert [single["prompt_ids"] for single in exported] == [
        single["prompt_ids"] for single in served
    ]
    page = tmp_path / "page.html"
    agentloop("runs", "view", record, "--export", page)
    assert rows[1]["branch"] in page.read_text()
