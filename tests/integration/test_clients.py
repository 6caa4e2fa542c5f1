"""Agents and clients of others, unmodified, each in a session over a fake engine.

Some want other versions of OpenAI's client than SGLang: `tox -e clients`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from agentloop.errors import ServerUnavailable
from tests.agentloop.serving.test_app import CHAT, HELLO, THEIRS, Service, says, service
from tests.agentloop.serving.test_bare_model import trajectories
from tests.integration.conftest import need
from tests.patience import patient
from tests.support import END, Step, call_text, eventually, written

anthropic: Any = pytest.importorskip("anthropic", reason="Anthropic's client: tox -e clients")

pytestmark = [
    # What the libraries import is not ours, and their connections end with the event loop.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

QUESTIONS = ("What are 37 times 48 and 12 times 7?", "Thank you.")
ANSWERS = ["1776 and 84.", "You are welcome."]
TURNS = (
    "<think>Two products.</think>I multiply.\n"
    + call_text("multiply", {"a": 37, "b": 48})
    + call_text("multiply", {"a": 12, "b": 7}),
    "<think>Both are there.</think>1776 and 84.",
    "You are welcome.",
)

Session = dict[str, Any]


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


@dataclass
class Served:
    """A service with one open session."""

    at: Service
    session: Session

    async def status(self) -> dict[str, Any]:
        async with self.at.http.get(self.session["url"]) as response:
            actual: dict[str, Any] = await response.json()
            return actual

    async def check_is_one_chain(self, texts: Sequence[str]) -> None:
        """Check that one branch holds these turns, with the ids of which the engine knows."""
        (branch,) = (await self.status())["branches"]
        (record,) = await trajectories(self.at, self.session)
        ids = [written(CHAT, text + END) for text in texts]
        assert [turn["output_ids"] for turn in record["turns"]] == ids
        requests = [single.ids for single in self.at.router.asked]
        remainder = record["ids"]
        for prompt, sampled in zip(requests, ids, strict=True):
            # Each prompt is all that was recorded before it.
            assert record["ids"][: len(prompt)] == prompt
            assert record["ids"][len(prompt) :][: len(sampled)] == sampled
            remainder = record["ids"][len(prompt) + len(sampled) :]
        assert remainder == []
        assert branch["reason"] == ""


@asynccontextmanager
async def served(*turns: Sequence[Step]) -> AsyncIterator[Served]:
    async with service(*turns) as at, at.post("/v1/sessions", {}) as response:
        yield Served(at, await response.json())


# --- agents ---------------------------------------------------------------------------------------

Converse = Callable[[Session, bool], Awaitable[list[str]]]
"""Asks the questions in a session, with a stream or without, and returns the answers."""


def needs(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        need(f"{package}: tox -e clients")


def openais(session: Session, **options: Any) -> openai.AsyncOpenAI:
    options = {"max_retries": 0, **options}
    return openai.AsyncOpenAI(base_url=session["base_url"], api_key="x", **options)


def anthropics(session: Session, **options: Any) -> Any:
    options = {"max_retries": 0, **options}
    return anthropic.AsyncAnthropic(base_url=session["anthropic_base_url"], api_key="x", **options)


def agents_sdk(model_class: str) -> Converse:
    async def converse(session: Session, stream: bool) -> list[str]:
        needs("agents", "openai-agents")
        import agents

        agents.set_tracing_disabled(True)
        async with openais(session) as client:
            model = getattr(agents, model_class)("any", client)
            agent = agents.Agent("calculator", tools=[agents.function_tool(multiply)], model=model)
            answers, history = [], []
            for question in QUESTIONS:
                history.append({"role": "user", "content": question})
                if stream:
                    result: Any = agents.Runner.run_streamed(agent, history)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, history)
                answers.append(result.final_output)
                history = result.to_input_list()
        return answers

    return converse


def pydantic_ai(protocol: str) -> Converse:
    async def converse(session: Session, stream: bool) -> list[str]:
        needs("pydantic_ai", "pydantic-ai-slim")
        from pydantic_ai import Agent
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider

        async with openais(session) as client, anthropics(session) as second:
            model: Any
            if protocol == "messages":
                model = AnthropicModel("any", provider=AnthropicProvider(anthropic_client=second))
            else:
                kind = OpenAIChatModel if protocol == "chat" else OpenAIResponsesModel
                model = kind("any", provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, tools=[multiply])
            answers: list[str] = []
            history: Any = None
            for question in QUESTIONS:
                # `run_stream` takes the first text, which stands beside calls here, for the answer.
                watch = _read_all if stream else None
                done = await agent.run(
                    question, message_history=history, event_stream_handler=watch
                )
                answers.append(done.output)
                history = done.all_messages()
        return answers

    return converse


async def _read_all(context: Any, events: Any) -> None:
    async for _ in events:
        pass


def langchain(*, uses_responses: bool) -> Converse:
    async def converse(session: Session, stream: bool) -> list[str]:
        needs("langchain", "langchain")
        needs("langchain_openai", "langchain-openai")
        from langchain.agents import create_agent
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            model="any", base_url=session["base_url"], api_key="x", use_responses_api=uses_responses
        )
        agent = create_agent(model, [multiply])
        answers: list[str] = []
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            if stream:
                pair = ["messages", "values"]
                async for kind, part in agent.astream({"messages": messages}, stream_mode=pair):
                    if kind == "values":
                        state = part
            else:
                state = await agent.ainvoke({"messages": messages})
            messages = state["messages"]
            answers.append(str(messages[-1].text))
        return answers

    return converse


async def tool_runner(session: Session, stream: bool) -> list[str]:
    """Converse with what Anthropic's own client has for tools."""
    tool = anthropic.beta_async_tool(_multiply_as_text)
    async with anthropics(session) as client:
        answers, messages = [], []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            runner = client.beta.messages.tool_runner(
                model="any", max_tokens=500, tools=[tool], messages=messages, stream=stream
            )
            async for turn in runner:
                message = await turn.get_final_message() if stream else turn
                messages.append({"role": "assistant", "content": message.content})
                if response := await runner.generate_tool_call_response():
                    messages.append(response)
            answers.append(
                "".join(single.text for single in message.content if single.type == "text")
            )
    return answers


async def _multiply_as_text(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


_multiply_as_text.__name__ = "multiply"

AGENTS = {
    "openai-agents, chat": agents_sdk("OpenAIChatCompletionsModel"),
    "openai-agents, responses": agents_sdk("OpenAIResponsesModel"),
    "pydantic-ai, chat": pydantic_ai("chat"),
    "pydantic-ai, responses": pydantic_ai("responses"),
    "pydantic-ai, messages": pydantic_ai("messages"),
    "langchain, chat": langchain(uses_responses=False),
    "langchain, responses": langchain(uses_responses=True),
    "anthropic's tool runner": tool_runner,
}


@pytest.mark.timeout(120)  # the first one imports its library
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", AGENTS)
async def test_agent_has_its_answers_and_is_one_branch(agent: str, stream: bool) -> None:
    async with served(*map(says, TURNS)) as near:
        assert await AGENTS[agent](near.session, stream) == ANSWERS
        await near.check_is_one_chain(TURNS)
        observed = CHAT.decode(near.at.router.asked[1].ids)
        assert observed.index("1776\n</tool_response>") < observed.index("84\n</tool_response>")


@pytest.mark.timeout(120)
async def test_program_of_the_guide_works() -> None:
    needs("agents", "openai-agents")
    guide = (Path(__file__).parents[2] / "docs/guides/your-agent.md").read_text("utf-8")
    programs = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (program,) = (single for single in programs if "AGENTLOOP_TASK" in single)
    call = call_text("multiply", {"a": 37, "b": 48})
    async with served(says(call), says("1776")) as near:
        variables = {
            "OPENAI_BASE_URL": near.session["base_url"],
            "OPENAI_API_KEY": "x",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "AGENTLOOP_TASK": "What is 37 times 48?",
        }
        command = [sys.executable, "-c", program]
        with anyio.fail_after(patient(100)):
            ended = await anyio.run_process(command, env={**os.environ, **variables}, check=False)
        assert (ended.stdout, ended.returncode) == (b"1776\n", 0), ended.stderr.decode()
        await near.check_is_one_chain([call, "1776"])


# --- clients --------------------------------------------------------------------------------------

TOOL: Any = {"name": "theirs", "description": "d", "parameters": {"type": "object"}}
OTHER = {**TOOL, "name": "other"}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
CALL = call_text("theirs", {"n": 1})

Ask = Callable[..., Awaitable[tuple[str, list[str]]]]
"""Asks a model with options of its protocol; returns the answer's text and the names of calls."""


async def chat(session: Session, *, client: dict[str, Any] = {}, **options: Any) -> Any:  # noqa: B006
    async with openais(session, **client) as asks:
        answer = await asks.chat.completions.create(model="any", messages=HELLO, **options)
    message = answer.choices[0].message
    return message.content or "", [single.function.name for single in message.tool_calls or ()]


async def responses(session: Session, *, client: dict[str, Any] = {}, **options: Any) -> Any:  # noqa: B006
    async with openais(session, **client) as asks:
        answer = await asks.responses.create(model="any", input="hello", **options)
    return answer.output_text, [
        single.name for single in answer.output if single.type == "function_call"
    ]


async def messages(session: Session, *, client: dict[str, Any] = {}, **options: Any) -> Any:  # noqa: B006
    async with anthropics(session, **client) as asks:
        options = {"max_tokens": 100, **options}
        answer = await asks.messages.create(model="any", messages=HELLO, **options)
    text = "".join(single.text for single in answer.content if single.type == "text")
    return text, [single.name for single in answer.content if single.type == "tool_use"]


PROTOCOLS = pytest.mark.parametrize("ask", [chat, responses, messages])
_FUNCTIONS = [{"type": "function", "function": single} for single in (TOOL, OTHER)]
_FLAT = [{"type": "function", **single} for single in (TOOL, OTHER)]
_CUSTOM = [
    {"name": single["name"], "input_schema": single["parameters"]} for single in (TOOL, OTHER)
]


@pytest.mark.parametrize(
    ("ask", "options"),
    [
        (chat, {"tools": _FUNCTIONS, "tool_choice": "required"}),
        (chat, {"tools": _FUNCTIONS, "tool_choice": THEIRS}),
        (responses, {"tools": _FLAT, "tool_choice": "required"}),
        (responses, {"tools": _FLAT, "tool_choice": {"type": "function", "name": "theirs"}}),
        (messages, {"tools": _CUSTOM, "tool_choice": {"type": "any"}}),
        (messages, {"tools": _CUSTOM, "tool_choice": {"type": "tool", "name": "theirs"}}),
    ],
)
async def test_call_that_is_required_or_named_is_enforced(
    ask: Ask, options: dict[str, Any]
) -> None:
    async with served(says(CALL)) as near:
        assert await ask(near.session, **options) == ("", ["theirs"])
        (requests,) = near.at.router.asked
        assert "structural_tag" in requests.parameters
        is_named = isinstance(options["tool_choice"], dict) and "any" not in str(options)
        assert ("other" in str(requests.parameters)) != is_named


@pytest.mark.parametrize(
    ("ask", "options"),
    [
        (chat, {"tools": _FUNCTIONS, "parallel_tool_calls": False}),
        (responses, {"tools": _FLAT, "parallel_tool_calls": False}),
        (
            messages,
            {"tools": _CUSTOM, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
    ],
)
async def test_calls_are_not_parallel_if_they_must_not_be(
    ask: Ask, options: dict[str, Any]
) -> None:
    async with served(says(CALL + CALL)) as near:
        assert await ask(near.session, **options) == ("", ["theirs"])


_STRICT = {"name": "answer", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("ask", "options"),
    [
        (chat, {"response_format": {"type": "json_schema", "json_schema": _STRICT}}),
        (responses, {"text": {"format": {"type": "json_schema", **_STRICT}}}),
        (messages, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
)
async def test_answers_schema_is_enforced(ask: Ask, options: dict[str, Any]) -> None:
    async with served(says('{"n": 3}')) as near:
        assert await ask(near.session, **options) == ('{"n": 3}', [])
        (requests,) = near.at.router.asked
        assert '"integer"' in str(requests.parameters["structural_tag"])


@pytest.mark.parametrize(
    ("ask", "options"),
    [
        (chat, {"stop": [" STOP"]}),
        (responses, {"extra_body": {"stop": [" STOP"]}}),
        (messages, {"stop_sequences": [" STOP"]}),
    ],
)
async def test_stop_sequence_ends_the_answer(ask: Ask, options: dict[str, Any]) -> None:
    async with served([*says("hello world STOP no")[:-1], anyio.sleep_forever]) as near:
        assert await ask(near.session, **options) == ("hello world", [])


@PROTOCOLS
async def test_tokens_of_an_answer_are_limited(ask: Ask) -> None:
    names: dict[Ask, str] = {chat: "max_completion_tokens", responses: "max_output_tokens"}
    async with served(says("It")) as near:
        await ask(near.session, **{names.get(ask, "max_tokens"): 7})
        assert [single.max_new_tokens for single in near.at.router.asked] == [7]


async def test_response_has_the_log_probabilities_of_its_tokens() -> None:
    async with served(says("hello")) as near, openais(near.session) as asks:
        answer = await asks.responses.create(
            model="any", input="hello", include=["message.output_text.logprobs"]
        )
        (item,) = answer.output
        assert item.type == "message"
        (part,) = item.content
        assert part.type == "output_text"
        (record,) = await trajectories(near.at, near.session)
        assert [single.logprob for single in part.logprobs or ()] == record["turns"][0]["logprobs"]


async def test_four_choices_are_four_branches() -> None:
    async with served(*[says("It")] * 4) as near, openais(near.session) as asks:
        answer = await asks.chat.completions.create(model="any", messages=HELLO, n=4)
        assert [single.message.content for single in answer.choices] == ["It"] * 4
        branches = (await near.status())["branches"]
        assert [single["reason"] for single in branches[1:]] == [
            "the same history was asked again"
        ] * 3
        assert len(await trajectories(near.at, near.session)) == 4


@PROTOCOLS
@pytest.mark.parametrize("fault", ["refused", "silent"])
async def test_retry_after_an_error_or_a_timeout_leaves_one_branch(ask: Ask, fault: str) -> None:
    first: list[Step] = [*says("hello")[:1]]
    first.append(ServerUnavailable("gone") if fault == "refused" else anyio.sleep_forever)
    timeout_s = 15 if fault == "refused" else 1
    async with served(first, says("hello")) as near:
        answer = await ask(near.session, client={"max_retries": 1, "timeout": timeout_s})
        assert answer == ("hello", [])
        await eventually(lambda: near.at.router.num_open == 0)
        status = await near.status()
        assert (len(status["branches"]), status["num_turns"]) == (1, 1)
        assert status["num_cut"] == 1


@PROTOCOLS
async def test_client_that_leaves_a_stream_ends_its_turn(ask: Ask) -> None:
    sampled = written(CHAT, "hello world" + END)
    async with served([*says("hello world")[:3], anyio.sleep_forever]) as near:
        async with openais(near.session) as asks, anthropics(near.session) as second:
            stream: Any
            if ask is chat:
                stream = await asks.chat.completions.create(
                    model="any", messages=HELLO, stream=True
                )
            elif ask is responses:
                stream = await asks.responses.create(model="any", input="hello", stream=True)
            else:
                stream = await second.messages.create(
                    model="any", max_tokens=100, messages=HELLO, stream=True
                )
            async with stream:
                text = ""
                while "hello" not in text:
                    text += _text_in(await anext(aiter(stream)))
        await eventually(lambda: near.at.router.num_open == 0)
        (record,) = await trajectories(near.at, near.session)
        read = record["turns"][0]["output_ids"]
        assert CHAT.decode(read).startswith("hello")
        assert read == sampled[: len(read)]


def _text_in(event: Any) -> str:
    """Return the text that an event of any of the three protocols adds to the answer."""
    if choices := getattr(event, "choices", None):
        return choices[0].delta.content or ""
    delta = getattr(event, "delta", "")
    return delta if isinstance(delta, str) else getattr(delta, "text", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_that_of_the_tokens(stream: bool) -> None:
    num_sampled = len(written(CHAT, "hello" + END))
    async with served(*[says("hello")] * 3) as near:
        actual: list[tuple[int, int]] = []
        async with openais(near.session) as asks, anthropics(near.session) as second:
            if stream:
                async with asks.chat.completions.stream(
                    model="any", messages=HELLO, stream_options={"include_usage": True}
                ) as single:
                    usage: Any = (await single.get_final_completion()).usage
                actual.append((usage.prompt_tokens, usage.completion_tokens))
                async with asks.responses.stream(model="any", input="hello") as two:
                    usage = (await two.get_final_response()).usage
                actual.append((usage.input_tokens, usage.output_tokens))
                async with second.messages.stream(
                    model="any", max_tokens=100, messages=HELLO
                ) as three:
                    usage = (await three.get_final_message()).usage
            else:
                answer = await asks.chat.completions.create(model="any", messages=HELLO)
                usage = answer.usage
                actual.append((usage.prompt_tokens, usage.completion_tokens))
                usage = (await asks.responses.create(model="any", input="hello")).usage
                actual.append((usage.input_tokens, usage.output_tokens))
                usage = (
                    await second.messages.create(model="any", max_tokens=100, messages=HELLO)
                ).usage
            actual.append((usage.input_tokens, usage.output_tokens))
        assert actual == [(len(single.ids), num_sampled) for single in near.at.router.asked]
