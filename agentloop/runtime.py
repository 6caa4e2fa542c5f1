"""The runtime: combines servers, router, sandbox and tools, and runs rollouts on them.

    async with Runtime() as runtime:
        trajectory = await runtime.rollout("What is 37 times 48?")

Resources start concurrently. Each is entered and left in a task of its own, so a server or pool
that fails for good ends the runtime with an error and stops everything that it has started.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.abc
import pydantic
from aiohttp import ClientSession

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.chat_settings import ChatSettings
from agentloop.agent.mcp import McpServer, McpServerSettings, mcp_servers, with_plain_names
from agentloop.agent.named_tools import AnyTool, check_tool_name, imported_tools, resolved_tools
from agentloop.agent.rollout import Budget, Reply, Rollout, TurnOptions, prompt_of
from agentloop.agent.sandbox_tools import JupyterCode, PythonCode
from agentloop.agent.sessions import ServedSessions, SessionSettings
from agentloop.agent.threads import in_daemon_thread
from agentloop.agent.tool_formats import ToolFormat
from agentloop.agent.tools import Tool, Tools
from agentloop.agent.turn_journal import TurnJournal
from agentloop.aio import LimiterVar, task_group
from agentloop.config import load_settings, with_values
from agentloop.environments.agent import conversation_of
from agentloop.environments.tasks.task import Task
from agentloop.errors import AgentLoopError, RequestError, SettingsError
from agentloop.events import Emit, Event, Feed, RolloutStream, ignore
from agentloop.inference.processes.keep_alive import keep_alive
from agentloop.inference.processes.server_log import folder_kept_on_error
from agentloop.inference.processes.supervise import (
    ServerProcess,
    ServerSettings,
    require_device,
    sglang_servers,
)
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.sampling import Sampling
from agentloop.models import SMALL
from agentloop.observe.exporters.otel import OtelSettings
from agentloop.rollouts.player import AgentPlayer
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import play_siblings
from agentloop.rollouts.stream import FinishedGroup, finished_groups
from agentloop.sandbox import Pool, PoolSettings
from agentloop.serving.access import ServeSettings
from agentloop.serving.sessions import SessionListener, listening_for_sessions
from agentloop.trajectory import Message, Trajectory

__all__ = ["Runtime", "Settings"]

log = logging.getLogger(__name__)

_loading_threads = LimiterVar("_loading_threads")

Question = TypeVar("Question", bound=str | Sequence[Message])
"""A question, or a conversation as OpenAI messages."""

Progress = Callable[[str], None]


class Settings(pydantic.BaseModel):
    """The settings of a runtime. Each section belongs to the component that it configures."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str | None = pydantic.Field(
        None,
        description="Model folder or Hugging Face hub name. By default, the model of `servers`, or "
        "without `servers` the small model that ships with agentloop.",
    )
    served_model_name: str = pydantic.Field(
        "",
        description="Name of the model for clients, such as Qwen/Qwen3-8B. By default, the last "
        "part of its folder or hub name.",
    )
    servers: list[str] = pydantic.Field(
        default_factory=list,
        description="URLs of running SGLang servers to use, such as http://gpu1:30000. By default, "
        "server.count servers are started on this machine.",
    )
    servers_key: pydantic.SecretStr | None = pydantic.Field(
        None, description="API key that `servers` require; set AGENTLOOP_SERVERS_KEY instead."
    )
    mcp: dict[str, McpServerSettings] = pydantic.Field(
        default_factory=dict,
        json_schema_extra={"is_one_setting": True},
        description="MCP servers, as tables [mcp.NAME]; docs/guides/mcp.md has their settings.",
    )
    tools: list[str] = pydantic.Field(
        default_factory=lambda: [PythonCode.name, JupyterCode.name],
        description="Tools that a rollout gets if it does not bring its own; [] for none. Built-in "
        "ones by name, `mcp:NAME` or `mcp:NAME/TOOL` for those of an MCP server in `mcp`, and "
        "`module:function` for a Python function.",
    )
    tool_timeout_s: float = pydantic.Field(
        4.0, gt=0, description="Time limit of one call of a built-in tool."
    )
    tool_format: ToolFormat = pydantic.Field(
        "plain",
        description="Wording of the built-in tools' schemas and of responses to calls: "
        "agentloop's own (plain), or as in rStar2-Agent's paper or its authors' code (release).",
    )
    log_dir: Path | None = pydantic.Field(
        None, description="Folder for the servers' logs. By default, a temporary one."
    )
    chat: ChatSettings = pydantic.Field(default_factory=ChatSettings)
    server: ServerSettings = pydantic.Field(default_factory=ServerSettings)
    router: RouterSettings = pydantic.Field(default_factory=RouterSettings)
    sandbox: PoolSettings = pydantic.Field(default_factory=PoolSettings)
    serve: ServeSettings = pydantic.Field(default_factory=ServeSettings)
    sessions: ServedSessions = pydantic.Field(default_factory=SessionSettings)
    otel: OtelSettings = pydantic.Field(
        default_factory=lambda: OtelSettings(),
        description="Traces of `agentloop serve`, `train` and `evaluate`.",
    )
    sampling: Sampling = pydantic.Field(default_factory=lambda: Sampling())
    budget: Budget = pydantic.Field(default_factory=lambda: Budget())

    @pydantic.field_validator("servers")
    @classmethod
    def _are_addresses(cls, servers: list[str]) -> list[str]:
        for server in servers:
            url = urlsplit(server)
            if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/"):
                raise ValueError(f"{server!r} is not of the form http://HOST:PORT")
        if len({server.rstrip("/") for server in servers}) < len(servers):
            raise ValueError("a server is named twice")
        return servers

    _plain = pydantic.field_validator("mcp")(with_plain_names)

    @pydantic.field_validator("tools")
    @classmethod
    def _are_tools(cls, tools: list[str], info: pydantic.ValidationInfo) -> list[str]:
        if (servers := info.data.get("mcp")) is not None:  # otherwise that is the error
            for tool in tools:
                check_tool_name(tool, servers)
        return tools


@dataclass(frozen=True, slots=True)
class _Model:
    """The servers of a model and how to talk to it."""

    name: str
    chat: ChatFormat
    router: Router
    processes: Sequence[ServerProcess]
    session: ClientSession


@dataclass(frozen=True, slots=True)
class _Parts:
    model: _Model
    pool: Pool
    mcp: Mapping[str, McpServer] = field(default_factory=dict)


class Runtime:
    """Runs rollouts. Use as `async with Runtime(...) as runtime`."""

    def __init__(
        self,
        settings: Settings | str | Path | None = None,
        *,
        progress: Progress | None = None,
        **overrides: object,
    ) -> None:
        """
        Args:
            settings: a `Settings` or the path of a TOML file; None: the defaults and the
                environment (`AGENTLOOP_...`).
            progress: called with a line of text whenever something is started.
            overrides: top-level settings, such as `servers=["http://..."]`.

        Raises:
            SettingsError: a setting is unknown or invalid, or a function that `tools` names cannot
                be imported; the message names it.
        """
        if not isinstance(settings, Settings):
            settings = load_settings(Settings, [] if settings is None else [settings])
        self.settings = with_values(settings, overrides, source="Runtime()")
        self._progress = progress or (lambda line: None)
        self._stack = AsyncExitStack()
        self._parts_or_none: _Parts | None = None
        self._open: dict[str, Rollout] = {}  # rollouts in flight
        self._functions = imported_tools(self.settings.tools)
        self._keepers: anyio.abc.TaskGroup | None = None
        self._closing = anyio.Event()
        self._listening = anyio.Lock()
        self._listener: SessionListener | None = None

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._running())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)

    async def rollout(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[AnyTool] | None = None,
        sampling: Sampling | None = None,
        budget: Budget | None = None,
        options: TurnOptions | None = None,
        template_arguments: Mapping[str, object] | None = None,
        reply: Reply | None = None,
        group: str = "",
        prompt_ids: list[int] | None = None,
        id: str | None = None,
        on_event: Emit = ignore,
        with_text: bool = True,
        journal: TurnJournal | None = None,
    ) -> Trajectory:
        """Run one rollout to its end.

        Args:
            messages: a question, or a conversation as OpenAI messages.
            tools: tools that the model may call; None: those of the settings.
            options: conditions that end a turn besides the model's end-of-turn token.
            template_arguments: variables of the chat template, besides those of the settings.
            reply: called with each answer; returns the user's next message, or None to end.
            group: a name shared by rollouts that share KV cache: of the same messages and tools.
            prompt_ids: the token ids of `messages` with the tools, if they are known.
            id: id of the trajectory, which no other one in flight may have; None: a new one.
            on_event: called with each event as it happens; must not block.
            with_text: decode the tokens of `TokensSampled` events; otherwise they carry ids only.
            journal: keeps its turns, and has those that were kept before a kill.

        Raises:
            RequestError: the request is invalid. Later failures are recorded in the trajectory.
        """
        model = self._parts.model
        rollout = Rollout(
            engine=model.router,
            chat=model.chat.with_arguments(template_arguments or {}),
            messages=conversation_of(messages),
            tools=self.resolve_tools(tools),
            sampling=sampling or self.settings.sampling,
            budget=budget or self.settings.budget,
            options=options or TurnOptions(),
            tool_format=self.settings.tool_format,
            reply=reply,
            emit=on_event,
            with_text=with_text and on_event is not ignore,
            group=group,
            prompt_ids=prompt_ids,
            id=id or uuid.uuid4().hex,
            journal=journal,
        )
        return await self._run(rollout)

    async def run_group(
        self,
        messages: str | Sequence[Message],
        *,
        size: int,
        name: str | None = None,
        tools: Sequence[AnyTool] | None = None,
        sampling: Sampling | None = None,
        budget: Budget | None = None,
        enough: int | None = None,
        on_event: Emit = ignore,
        with_text: bool = True,
        queued: anyio.Event | None = None,
    ) -> list[Trajectory]:
        """Run `size` rollouts of one task concurrently.

        Wait first until the servers have KV capacity for the size that the group is expected to
        reach. Takes the arguments of `rollout`, and:

        Args:
            name: the trajectories' ids are `name.0`, `name.1`, ...; with `sampling.seed`, each
                rollout's seed is derived from the name and its index.
            enough: stop the remaining rollouts, the slowest ones, when this many have ended by
                themselves; what they have sampled is kept.
            queued: set when the prompt is encoded and the group begins to wait for capacity.

        Raises:
            RequestError: the request is invalid. Later failures are recorded in the trajectories.
        """
        if size < 1:
            raise RequestError(f"size: at least 1, not {size}")
        player = AgentPlayer(
            self,
            self.resolve_tools(tools),
            sampling=sampling or self.settings.sampling,
            emit=on_event,
            with_text=with_text and on_event is not ignore,
            has_names=name is not None,
        )
        name = name or uuid.uuid4().hex
        task = Task(name, conversation_of(messages), "")
        budget, queued = budget or self.settings.budget, queued or anyio.Event()
        request = GroupRequest(task, name, size, budget, queued=queued)
        async with player.group(request) as siblings:
            rollouts = await play_siblings(siblings, enough=enough or 0)
        return [rollout.trajectories[0] for rollout in rollouts]

    @asynccontextmanager
    async def groups(
        self,
        source: Iterable[Question] | AsyncIterable[Question],
        *,
        size: int,
        max_open: int = 1024,
        **options: Any,
    ) -> AsyncIterator[AsyncIterator[FinishedGroup[Question]]]:
        """Run a group of `size` rollouts for each task of `source`, yielding groups as they finish.

            async with runtime.groups(questions, size=8) as groups:
                async for group in groups: ...

        The next task is taken from the source only when there is KV capacity for one more group
        and fewer than `max_open` groups are in flight or unread. Leaving the context early cancels
        the rest. Takes the options of `run_group`. An error of the source ends the iteration.
        """
        if size < 1:
            raise RequestError(f"size: at least 1, not {size}")
        if "name" in options:
            raise RequestError("name: cannot be set: each group gets a name of its own")
        async with finished_groups(
            source,
            lambda task, queued: self.run_group(task, size=size, queued=queued, **options),
            partial(self._parts.model.router.gate.wait_for_capacity, size),
            max_open=max_open,
        ) as groups:
            yield groups

    async def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the token ids of a conversation with tools, before the model's first turn.

        Raises:
            RequestError: the messages or the tools are invalid, or too long for the model.
        """
        chat, longest = self._parts.model.chat, self._parts.model.router.context_length
        return await prompt_of(chat, messages, Tools(tools).schemas, longest)

    async def _run(self, rollout: Rollout) -> Trajectory:
        self._open[rollout.id] = rollout
        try:
            return await rollout.run()
        finally:
            del self._open[rollout.id]

    def cancel(self, rollout_id: str) -> bool:
        """Cancel a rollout and return whether it was in flight.

        Its trajectory ends with `StopReason.CANCELLED` and gets no reward.
        """
        rollout = self._open.get(rollout_id)
        if rollout is not None:
            rollout.cancel()
        return rollout is not None

    async def add_server(self, url: str) -> None:
        """Add a running SGLang server.

        Raises:
            ValueError: the server was added before.
            ServerUnavailable, ServerRefused: the server cannot be used.
        """
        model = self._parts.model
        stall_s = self.settings.router.stall_timeout_s
        await model.router.replicas.add(SGLangServer(url, model.session, stall_timeout_s=stall_s))

    def retire_server(self, url: str) -> None:
        """Remove a server, which keeps running, once its last request has ended.

        Raises:
            KeyError: there is no such server.
        """
        self._parts.model.router.replicas.retire(url)

    @asynccontextmanager
    async def stream(
        self, messages: str | Sequence[Message], *, on_event: Emit = ignore, **options: Any
    ) -> AsyncIterator[RolloutStream]:
        """Run one rollout and iterate over its events; leaving the context early cancels it.

        Takes the options of `rollout`. An error of the rollout is raised by the iteration.
        """
        feed = Feed()

        def forward(event: Event) -> None:
            on_event(event)
            feed(event)

        async def run() -> None:
            try:
                await self.rollout(messages, on_event=forward, **options)
            except AgentLoopError as error:
                feed.close(error)
            else:
                feed.close()

        async with task_group() as tasks:
            tasks.start_soon(run)
            try:
                yield RolloutStream(feed)
            finally:
                tasks.cancel_scope.cancel()
                feed.close()  # a reader that keeps iterating must come to an end

    async def listen_for_sessions(self) -> None:
        """Serve sessions on loopback from now on, for the clients that environments run."""
        async with self._listening:  # no deadline: opening a port does not wait
            if self._listener is None and self._keepers is not None:
                context = listening_for_sessions(
                    self.router,
                    self.chat,
                    model_name=self.model_name,
                    sampling=self.settings.sampling,
                    budget=self.settings.budget,
                )
                self._listener = await self._keepers.start(_keep, context, self._closing)

    @property
    def session_listener(self) -> SessionListener | None:
        return self._listener

    @property
    def chat(self) -> ChatFormat:
        return self._parts.model.chat

    @property
    def router(self) -> Router:
        return self._parts.model.router

    @property
    def processes(self) -> Sequence[ServerProcess]:
        """The servers that this runtime has started."""
        return self._parts.model.processes

    @property
    def pool(self) -> Pool:
        return self._parts.pool

    @property
    def model_name(self) -> str:
        return self._parts.model.name

    @property
    def _parts(self) -> _Parts:
        if self._parts_or_none is None:
            raise RuntimeError("use `async with Runtime(...) as runtime` first")
        return self._parts_or_none

    @property
    def own_tools(self) -> list[Tool]:
        """The tools of the settings."""
        return self.resolve_tools(None)

    def resolve_tools(self, tools: Sequence[AnyTool] | None) -> list[Tool]:
        """Return the tools themselves for functions, names and schemas.

        Args:
            tools: see `rollout`; None: those of the settings.

        Raises:
            RequestError: a name is unknown, or a function cannot become a tool.
        """
        return resolved_tools(
            self.settings.tools if tools is None else tools,
            pool=self._parts.pool,
            servers=self._parts.mcp,
            functions=self._functions,
            timeout_s=self.settings.tool_timeout_s,
            tool_format=self.settings.tool_format,
        )

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        if not self.settings.servers:
            require_device(self.settings.server)
        model: _Model
        pool: Pool
        servers: Mapping[str, McpServer]
        try:
            async with task_group() as keepers:
                closing, self._keepers = self._closing, keepers
                sandbox_line: list[str] = []  # the last one, while the sandbox starts

                def report_sandbox(line: str) -> None:
                    sandbox_line[:] = [line]
                    self._progress(line)

                async def start_model() -> None:
                    nonlocal model
                    model = await keepers.start(self._keep_model, closing)
                    for line in sandbox_line:  # what is still waited for
                        self._progress(line)

                async def start_pool() -> None:
                    nonlocal pool
                    context = Pool(self.settings.sandbox, on_progress=report_sandbox)
                    pool = await keepers.start(_keep, context, closing)
                    sandbox_line.clear()

                async def start_mcp() -> None:
                    nonlocal servers
                    context = mcp_servers(self.settings.mcp, log_dir=self.settings.log_dir)
                    servers = await keepers.start(_keep, context, closing)

                async with anyio.create_task_group() as starting:
                    for start in (start_model, start_pool, start_mcp):
                        starting.start_soon(start)
                self._parts_or_none = _Parts(model, pool, servers)
                try:
                    Tools(self.resolve_tools(None))  # can they be used together?
                except RequestError as error:
                    raise SettingsError(str(error)) from error
                try:
                    yield
                finally:
                    closing.set()
        finally:
            self._parts_or_none = self._listener = None

    async def _keep_model(
        self, closing: anyio.Event, *, task_status: anyio.abc.TaskStatus[_Model]
    ) -> None:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(http_session(self.settings.servers_key))
            urls, processes = self.settings.servers, []
            model = self.settings.model or (None if urls else SMALL)
            chat: ChatFormat | None = None
            if model is not None:
                # Report problems with the model before the servers start, which takes long.
                chat = await self._load_chat(model)
            if not urls:
                log_dir = self.settings.log_dir or stack.enter_context(folder_kept_on_error())
                processes = await stack.enter_async_context(
                    sglang_servers(
                        model or SMALL,
                        self.settings.server,
                        log_dir=log_dir,
                        on_progress=self._progress,
                    )
                )
                urls = [process.url for process in processes]
            stall_s = self.settings.router.stall_timeout_s
            servers = [SGLangServer(url, session, stall_timeout_s=stall_s) for url in urls]
            longest = self.settings.budget.max_response_tokens
            router = await stack.enter_async_context(
                Router.open(servers, self.settings.router, longest=longest)
            )
            model = model or router.replicas.model_path
            chat = chat or await self._load_chat(model)
            self.settings.budget.check(chat.family)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            if processes:
                tasks.start_soon(keep_alive, processes, self.settings.server, router.replicas)
            name = self.settings.served_model_name or Path(model).name
            task_status.started(_Model(name, chat, router, processes, session))
            await closing.wait()  # no deadline: lives as long as the runtime
            tasks.cancel_scope.cancel()

    async def _load_chat(self, model: Path | str) -> ChatFormat:
        """Load the model's chat format. Raises ModelError if it cannot be used."""
        # The hub may be slow. In a daemon thread, this does not delay Ctrl-C.
        load: Callable[[], ChatFormat] = partial(ChatFormat.load, model, self.settings.chat)
        return await in_daemon_thread(load, 1, _loading_threads)


async def _keep(
    context: AbstractAsyncContextManager[object],
    closing: anyio.Event,
    *,
    task_status: anyio.abc.TaskStatus[object],
) -> None:
    async with context as resource:
        task_status.started(resource)
        await closing.wait()  # no deadline: lives as long as the runtime
