"""The page in a real browser, over real rollouts: what a visitor sees, does and cannot do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright.sync_api import Browser, expect

from agentloop.agent.rollout import Budget
from agentloop.api.guard import ServeSettings
from agentloop.api.http import bind
from agentloop.events import CallStarted, Event
from agentloop.groups.reward import RewardSettings, Scorer
from agentloop.groups.roc import RocSettings
from agentloop.groups.tasks import Task
from agentloop.inference.sglang import Sampling
from agentloop.models import SMALL
from agentloop.runtime import Runtime, Settings
from agentloop.serve import App, listening
from agentloop.training.rollouts import Rollouts
from agentloop.training.run_folder import RunFolder
from sandbox import PoolSettings
from tests.integration.page import browser, looking, violations

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

QUESTION = "What is 37 times 48?"
TOKEN = "let-me"
WAIT_S = 60.0
VIEWS = ["", "servers", "rollouts", "groups", "curves", "sandbox", "ask"]


@dataclass
class Service:
    url: str
    runtime: Runtime
    app: App
    portal: BlockingPortal

    def group(self, name: str, folder: RunFolder | None = None) -> str:
        """Roll one out, score it and choose from it; its name on the page."""
        return self.portal.call(self._group, name, folder)

    async def _group(self, name: str, folder: RunFolder | None) -> str:
        task = Task("t1", QUESTION, "1776")
        async with Scorer(RewardSettings(function="exact")) as scorer:
            rollouts = Rollouts(
                self._run_group,
                self.runtime.router.has_room,
                scorer,
                RocSettings(down_sample_to_n=2),
                seed=1,
                emit=self.app.seen,
            )
            group = await rollouts.group(task, name, size=4, budget=Budget(), oldest=0)
        if folder is not None:
            rows = [{"group": int(name), "version": 0, **row} for row in group.rows()]
            folder.add_group(int(name), rows)
        return f"{name}-{task.id}"

    @contextmanager
    def held(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """A rollout that is in its first call until it is released: its id, and what does so."""
        go_on = self.portal.call(anyio.Event)

        def release() -> None:
            self.portal.call(go_on.set)

        future, key = self.portal.start_task(self._held, go_on)
        try:
            yield key, release
        finally:
            release()
            future.result(WAIT_S)

    async def _held(self, go_on: anyio.Event, *, task_status: anyio.abc.TaskStatus[str]) -> None:
        async def multiply(a: int, b: int) -> int:
            """Multiply two integers."""
            await go_on.wait()
            return a * b

        def seen(event: Event) -> None:
            self.app.seen(event)
            if isinstance(event, CallStarted) and event.turn == 0:
                task_status.started(event.rollout_id)

        greedy = Sampling(temperature=0)
        await self.runtime.rollout(QUESTION, tools=[multiply], sampling=greedy, on_event=seen)

    async def _run_group(self, prompt: Any, **options: Any) -> Any:
        sampling = Sampling(temperature=1.0)
        return await self.runtime.run_group(
            prompt, sampling=sampling, on_event=self.app.seen, **options
        )


@asynccontextmanager
async def serving(sglang_url: str, portal: BlockingPortal, **serve: Any) -> AsyncIterator[Service]:
    settings = Settings(
        model=str(SMALL),
        servers=[sglang_url],
        sandbox=PoolSettings(backend="process", workers=1),
        tool_timeout_s=60,
        serve=ServeSettings(port=0, control_token=TOKEN, **serve),
    )
    async with Runtime(settings) as runtime:
        app = App(runtime, settings)
        with bind(settings.serve) as bound:
            async with listening(app, bound) as url:
                yield Service(url, runtime, app, portal)


@pytest.fixture(scope="module")
def service(sglang_url: str) -> Iterator[Service]:
    with start_blocking_portal("asyncio") as portal:
        with portal.wrap_async_context_manager(serving(sglang_url, portal)) as one:
            yield one


@pytest.fixture(scope="module")
def group(service: Service) -> str:
    """The name of one that was scored, and chosen from."""
    return service.group("7")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as one:
        yield one


def test_the_first_view_has_its_numbers_and_they_live(service: Service, chromium: Browser) -> None:
    with looking(chromium, service.url) as (page, _):
        expect(page).to_have_title(re.compile("agentloop"))
        expect(page.get_by_text("tokens/s").first).to_be_visible()
        now = get(service, "frame")["now"]
        answer = httpx.post(
            f"{service.url}/v1/rollouts", json={"prompts": [QUESTION], "n": 3}, timeout=WAIT_S
        )
        assert len(answer.text.splitlines()) == 3
        expect(page.get_by_text(f"{now['rollouts_done'] + 3} done")).to_be_visible()


def test_a_question_is_asked_and_watched_to_its_answer(service: Service, chromium: Browser) -> None:
    with looking(chromium, f"{service.url}/#/ask") as (page, _):
        page.get_by_role("textbox").fill(QUESTION)
        page.keyboard.press("Control+Enter")
        page.wait_for_url(re.compile("#/rollout/"))
        expect(page.get_by_text("1776").last).to_be_visible()
        expect(page.get_by_text("answered").first).to_be_visible()
        expect(page.get_by_text("print(37*48)").first).to_be_visible()


def test_a_rollout_that_is_opened_while_it_streams_grows(
    service: Service, chromium: Browser
) -> None:
    with looking(chromium, service.url) as (page, _), service.held() as (key, release):
        with page.expect_response(re.compile(f"rollouts/{key}/stream")):
            page.goto(f"{service.url}/#/rollout/{key}")
        view = page.locator("#view")
        expect(view.get_by_text(QUESTION).first).to_be_visible()
        expect(view.get_by_text("boxed{1776}")).to_have_count(0)
        release()
        expect(view.get_by_text("boxed{1776}").last).to_be_visible()
        expect(page.get_by_text(re.compile(r"answered|budget")).first).to_be_visible()
        turn = get(service, f"rollouts/{key}")["turns"][0]
        assert "".join(turn["pieces"]) == service.runtime.chat.decode(turn["ids"])


def get(service: Service, what: str) -> Any:
    return httpx.get(f"{service.url}/api/{what}", timeout=WAIT_S).json()


def asked(service: Service, question: str) -> str:
    """The id of the rollout that it began."""
    asking = {"question": question}
    answer = httpx.post(f"{service.url}/api/ask", json=asking, timeout=WAIT_S)
    key: str = answer.json()["rollout"]
    return key


def test_a_group_says_who_was_kept_and_why_others_were_not(
    service: Service, chromium: Browser, group: str
) -> None:
    with looking(chromium, f"{service.url}/#/group/{group}") as (page, _):
        rows = page.locator("#view table").first.get_by_role("row")
        expect(rows).to_have_count(5)  # its head, and four rollouts
        told = get(service, f"groups/{group}")
        for one in told["rollouts"]:
            assert one["kept"] or one["dropped"]
        page.get_by_role(
            "link", name=re.compile(re.escape(told["rollouts"][0]["id"][-3:]))
        ).first.click()
        page.wait_for_url(re.compile("#/rollout/"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_every_view_can_be_read_by_everybody(
    service: Service, chromium: Browser, group: str, dark: bool, width: int
) -> None:
    rollout = get(service, f"groups/{group}")["rollouts"][0]["id"]
    with looking(chromium, service.url, dark=dark, width=width) as (page, _):
        for view in [*VIEWS, f"group/{group}", f"rollout/{rollout}"]:
            page.goto(f"{service.url}/#/{view}")
            expect(page.locator("#view > *").first).to_be_attached()
            expect(page.get_by_text("live").first).to_be_visible()  # it has its numbers
            assert violations(page) == [], view
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) <= 0, view
        background = "getComputedStyle(document.documentElement).backgroundColor"
        red = int(re.findall(r"\d+", page.evaluate(background))[0])
        assert (red < 128) == dark


def test_control_wants_the_token_and_does_what_it_says(service: Service, chromium: Browser) -> None:
    with looking(chromium, service.url) as (page, seen):
        seen.expected = ["403", "503"]
        ask = {"messages": [{"role": "user", "content": QUESTION}]}
        page.get_by_role("button", name=re.compile("pause", re.I)).click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("textbox").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_be_visible()  # it was refused
        dialog.get_by_role("textbox").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Go on")).to_be_visible()
        refused = httpx.post(f"{service.url}/v1/chat/completions", json=ask, timeout=WAIT_S)
        assert refused.status_code == 503
        assert "paused" in refused.json()["error"]["message"]
        page.get_by_role("button", name="Go on").click()
        expect(page.get_by_role("button", name=re.compile("pause", re.I))).to_be_visible()
        taken = httpx.post(f"{service.url}/v1/chat/completions", json=ask, timeout=WAIT_S)
        assert taken.is_success


def test_a_runs_folder_is_shown_and_made_one_file(
    service: Service, chromium: Browser, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run", f"model = {str(SMALL)!r}\n")
    name = service.group("9", folder)
    for step in range(1, 4):
        folder.add_metrics({"step": step, "reward": step / 4, "tool_errors_in_correct": 0.1})
    command = [sys.executable, "-m", "agentloop", "view", str(folder.path)]
    out = tmp_path / "run.html"
    done = subprocess.run([*command, "--export", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    views = ["", "rollouts", "groups", "curves", f"group/{name}", f"rollout/{name}.0"]
    with looking(chromium, out.as_uri()) as (page, _):
        for view in views:
            page.goto(f"{out.as_uri()}#/{view}")
            expect(page.locator("#view > *").first).to_be_attached()
            assert violations(page) == [], view
        expect(page.get_by_text("1776").first).to_be_visible()
    process = subprocess.Popen([*command, "serve.port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[4].rstrip("/;")
        with looking(chromium, url) as (page, _):
            for view in views:
                page.goto(f"{url}/#/{view}")
                expect(page.locator("#view > *").first).to_be_attached()
            expect(page.get_by_text("1776").first).to_be_visible()
    finally:
        process.terminate()
        process.wait(WAIT_S)
        if process.stdout is not None:
            process.stdout.close()


def test_what_a_model_writes_is_never_run(
    service: Service, chromium: Browser, tmp_path: Path
) -> None:
    evil = "<img src=x onerror=window.pwned=1></script><script>window.pwned=1</script>"
    with looking(chromium, service.url) as (page, _):
        key = asked(service, evil)
        page.goto(f"{service.url}/#/rollout/{key}")
        expect(page.get_by_text("onerror").first).to_be_visible()
        assert page.evaluate("window.pwned") is None
