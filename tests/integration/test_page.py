"""The page in a real browser, over real rollouts: what a visitor sees, does and cannot do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.abc
import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright.sync_api import Browser, expect

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import Task
from agentloop.events import CallStarted, Event, RolloutStarted
from agentloop.inference.sglang.sampling import Sampling
from agentloop.launch.progress import ProgressLine
from agentloop.models import SMALL
from agentloop.rollouts.player import AgentPlayer
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner
from agentloop.runtime import Runtime, Settings
from agentloop.sandbox import PoolSettings
from agentloop.serving.access import ServeSettings
from agentloop.serving.app import AgentService, listening
from agentloop.serving.listen import bind
from agentloop.training.credit.roc import RocSettings
from agentloop.training.rollouts import Rollouts
from agentloop.training.run.dashboard import RunDashboard
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.status import RunStatus
from agentloop.trajectory import StopReason, Trajectory, Turn, TurnEnd
from tests.agentloop.observe.test_archive import rollout
from tests.integration.page import browser, looking, violations

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
# Resolves when the page is a second old. Its policy forbids the eval of wait_for_function.
_A_SECOND_OLD = """() => new Promise(done => {
    const look = () => performance.now() > 1000 ? done() : requestAnimationFrame(look);
    look();
})"""

QUESTION = "What is 37 times 48?"
TOKEN = "let-me"
WAIT_S = 60.0
VIEWS = ["", "servers", "rollouts", "groups", "curves", "sandbox", "ask"]


@dataclass
class Service:
    url: str
    runtime: Runtime
    app: AgentService
    portal: BlockingPortal

    def group(self, name: str, folder: RunFolder | None = None) -> str:
        """Roll one out, score it and choose from it; its name on the page."""
        return self.portal.call(self._group, name, folder)

    async def _group(self, name: str, folder: RunFolder | None) -> str:
        task = Task("t1", QUESTION, "1776")
        async with Grader(RewardSettings(function="exact")) as grader:
            player = AgentPlayer(
                self.runtime,
                self.runtime.own_tools,
                sampling=Sampling(temperature=1.0),
                emit=self.app.on_event,
                with_text=True,
            )
            groups = GroupRunner(player, grader, emit=self.app.on_event)
            rollouts = Rollouts(groups, RocSettings(down_sample_to_n=2), seed=1)
            group = await rollouts.run(GroupRequest(task, name, 4, Budget(), 0, Purpose.TRAIN))
        if folder is not None:
            rows = [{"group": int(name), "version": 0, **row.to_dict()} for row in group.rows]
            folder.add_group(int(name), rows)
        return f"{name}-{task.id}"

    @contextmanager
    def hold_rollout(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the id of a rollout whose first call waits, and a function that lets it go on."""
        go_on = self.portal.call(anyio.Event)

        def release() -> None:
            self.portal.call(go_on.set)

        future, key = self.portal.start_task(self._run_held_rollout, go_on)
        try:
            yield key, release
        finally:
            release()
            future.result(WAIT_S)

    async def _run_held_rollout(
        self, go_on: anyio.Event, *, task_status: anyio.abc.TaskStatus[str]
    ) -> None:
        async def multiply(a: int, b: int) -> int:
            """Multiply two integers."""
            await go_on.wait()
            return a * b

        def on_event(event: Event) -> None:
            self.app.on_event(event)
            if isinstance(event, CallStarted) and event.turn == 0:
                task_status.started(event.rollout_id)

        greedy = Sampling(temperature=0)
        await self.runtime.rollout(QUESTION, tools=[multiply], sampling=greedy, on_event=on_event)


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
        app = AgentService(runtime, settings)
        with bind(settings.serve) as bound:
            async with listening(app, bound) as url:
                yield Service(url, runtime, app, portal)


@pytest.fixture(scope="module")
def service(sglang_url: str) -> Iterator[Service]:
    with start_blocking_portal("asyncio") as portal:
        with portal.wrap_async_context_manager(serving(sglang_url, portal)) as running_service:
            yield running_service


@pytest.fixture(scope="module")
def group(service: Service) -> str:
    """The name of one that was scored, and chosen from."""
    return service.group("7")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as chromium:
        yield chromium


def test_first_view_has_its_numbers_and_they_live(service: Service, chromium: Browser) -> None:
    with looking(chromium, service.url) as (page, _):
        expect(page).to_have_title(re.compile("agentloop"))
        expect(page.get_by_text("tokens/s").first).to_be_visible()
        state = get(service, "frame")["now"]
        answer = httpx.post(
            f"{service.url}/v1/rollouts", json={"prompts": [QUESTION], "n": 3}, timeout=WAIT_S
        )
        assert len(answer.text.splitlines()) == 3
        expect(page.get_by_text(f"{state['rollouts_done'] + 3} done")).to_be_visible()


@pytest.mark.gate
def test_question_is_asked_and_watched_to_its_answer(service: Service, chromium: Browser) -> None:
    with looking(chromium, f"{service.url}/#/ask") as (page, _):
        page.get_by_role("textbox").fill(QUESTION)
        page.keyboard.press("Control+Enter")
        page.wait_for_url(re.compile("#/rollout/"))
        expect(page.get_by_text("1776").last).to_be_visible()
        expect(page.get_by_text("answered").first).to_be_visible()
        expect(page.get_by_text("print(37*48)").first).to_be_visible()


def test_rollout_that_is_opened_while_it_streams_grows(service: Service, chromium: Browser) -> None:
    with looking(chromium, service.url) as (page, _), service.hold_rollout() as (key, release):
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


def get(service: Service, path: str) -> Any:
    return httpx.get(f"{service.url}/api/{path}", timeout=WAIT_S).json()


def ask(service: Service, question: str) -> str:
    """Ask a question, and return the id of its rollout."""
    asking = {"question": question}
    answer = httpx.post(f"{service.url}/api/ask", json=asking, timeout=WAIT_S)
    key: str = answer.json()["rollout"]
    return key


def test_group_says_who_was_kept_and_why_others_were_not(
    service: Service, chromium: Browser, group: str
) -> None:
    with looking(chromium, f"{service.url}/#/group/{group}") as (page, _):
        rows = page.locator("#view table").first.get_by_role("row")
        expect(rows).to_have_count(5)  # its head, and four rollouts
        group_data = get(service, f"groups/{group}")
        for rollout_data in group_data["rollouts"]:
            assert rollout_data["kept"] or rollout_data["dropped"]
        page.get_by_role(
            "link", name=re.compile(re.escape(group_data["rollouts"][0]["id"][-3:]))
        ).first.click()
        page.wait_for_url(re.compile("#/rollout/"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 820, 390])
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
    with looking(chromium, service.url) as (page, problems):
        problems.expected = ["403", "503"]
        ask = {"messages": [{"role": "user", "content": QUESTION}]}
        page.get_by_role("button", name=re.compile("pause", re.I)).click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("textbox").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_be_visible()  # it was refused
        dialog.get_by_role("textbox").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        mark = page.locator("header").get_by_text("paused", exact=True)
        for view in VIEWS:
            page.goto(f"{service.url}/#/{view}")
            expect(mark).to_be_visible()
        expect(page.get_by_text("questions are refused")).to_be_visible()  # at the last, Ask
        page.goto(service.url)
        refused = httpx.post(f"{service.url}/v1/chat/completions", json=ask, timeout=WAIT_S)
        assert refused.status_code == 503
        assert "paused" in refused.json()["error"]["message"]
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("button", name=re.compile("pause", re.I))).to_be_visible()
        expect(mark).not_to_be_visible()
        taken = httpx.post(f"{service.url}/v1/chat/completions", json=ask, timeout=WAIT_S)
        assert taken.is_success


@asynccontextmanager
async def watched_run(folder: Path) -> AsyncIterator[tuple[str, RunDashboard]]:
    """A training run's page, with one rollout that goes on."""
    lines: list[str] = []
    progress = SimpleNamespace(line="", say=lines.append, status=RunStatus("stage", 3, 10, "Waits"))
    dashboard = RunDashboard(RunFolder(folder, ""), cast(ProgressLine, progress))
    async with dashboard.serve_page(ServeSettings(port=0)):
        dashboard.emit(RolloutStarted(Trajectory("1.0", [1, 2, 3]), "1"))
        yield lines[0].split()[2], dashboard


@pytest.mark.parametrize("fails", [False, True])
def test_run_that_has_ended_looks_like_one(chromium: Browser, tmp_path: Path, fails: bool) -> None:
    with start_blocking_portal("asyncio") as portal, ExitStack() as stack:
        run = portal.wrap_async_context_manager(watched_run(tmp_path / "run"))
        url, _ = run.__enter__()
        page, _ = stack.enter_context(looking(chromium, url))
        expect(page.locator("#connection-text")).to_have_text("live")
        expect(page.get_by_role("button", name="Drain")).to_be_visible()
        error = RuntimeError("no disk left") if fails else None
        assert not run.__exit__(type(error) if error else None, error, None)
        notice = "The run has failed: no disk left" if fails else "The run has finished"
        expect(page.locator("#notice")).to_contain_text(notice)
        expect(page.locator("#notice")).to_contain_text("agentloop runs view")
        expect(page.locator("#connection-text")).to_have_text("failed" if fails else "finished")
        expect(page.get_by_role("button", name="Drain")).not_to_be_visible()
        page.evaluate("location.hash = '#/rollouts'")
        expect(page.get_by_text("1 in flight")).to_be_visible()
        elapsed = page.evaluate("window.agentloop.app.time()")
        page.evaluate(_A_SECOND_OLD)
        assert page.evaluate("window.agentloop.app.time()") == elapsed  # nothing grows any more
        assert "lost" not in page.locator("body").inner_text()


@contextmanager
def viewing(run: Path) -> Iterator[str]:
    """Run `agentloop runs view`; yield its address."""
    command = [sys.executable, "-m", "agentloop", "runs", "view", str(run), "serve.port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        (url,) = re.findall(r"http://[\w.:]+", process.stdout.readline())
        yield url
    finally:
        process.terminate()
        process.wait(WAIT_S)
        if process.stdout is not None:
            process.stdout.close()


def test_runs_folder_is_shown_and_made_one_file(
    service: Service, chromium: Browser, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run", f"model = {str(SMALL)!r}\n")
    name = service.group("9", folder)
    for step in range(1, 4):
        row = {"step": step, "reward": step / 4, "tool_errors_in_correct": 0.1}
        row |= {"part/found": 0.5, "held_out/recorded/tries": 4.0, "num_groups": 8}
        row |= {"step_s": 45.0, "num_sampled_tokens": 1000, "groups_with_signal": 0}
        folder.add_metrics(row | {"pass_at_k": 0.9})
    folder.add_metrics({"step": 4, "reward": 0.875, "tool_errors_in_correct": None})
    RunFolder(folder.path / "sft").add_metrics(
        {"step": 1, "learner/loss": 2.5, "learner/lr": 0.001}
    )
    command = [sys.executable, "-m", "agentloop", "runs", "view", str(folder.path)]
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
        page.goto(f"{out.as_uri()}#/group/{name}")
        expect(page.locator(".tr-prompt .tr-text")).to_have_text(QUESTION)
        # All of it is of the last step, which has no tool errors in correct rollouts.
        page.goto(f"{out.as_uri()}#/")
        learning = page.locator(".learning[data-kind=bad]")
        expect(learning).to_contain_text(
            "0 of 8 groups have a signal: the rewards within each group"
        )
        expect(page.locator(".bottleneck")).not_to_be_visible()  # no advice on speed
        last_step = page.get_by_role("region", name="Last step")
        expect(last_step.locator(".values > div")).to_have_text(
            ["reward0.875", "tool errors in correct rollouts–", "step time–"]
        )
        page.goto(f"{out.as_uri()}#/curves")
        expect(page.locator("#view h2").first).to_have_text("Groups with a signal")
        shown = page.get_by_role("region", name="Reward", exact=True).locator("b")
        expect(shown.first).to_have_text("0.875")
        errors = page.get_by_role("region", name="Tool errors in correct rollouts").locator("b")
        expect(errors.first).to_have_text("10%")  # the last that is known
        parts = page.get_by_role("region", name="Parts of the reward")
        expect(parts.get_by_text("found", exact=True)).to_be_visible()
        recorded = page.get_by_role("region", name="Recorded")
        expect(recorded.get_by_text("tries, held out")).to_be_visible()
        expect(page.get_by_role("heading", name="@k")).to_have_text("pass@k")  # there is no avg@k
        place = page.locator(".cv-at")
        expect(place).to_have_text("4 (last)")
        page.get_by_label("Scale").select_option("logarithmic")
        page.get_by_label("By", exact=True).select_option("sampled tokens")
        expect(place).to_have_text("3,000 (last)")
        expect(shown.first).to_have_text("0.875")
        page.get_by_label("By", exact=True).select_option("time in steps")
        expect(place).to_have_text("2:15 (last)")
        page.locator("#cv-step").fill("0")
        expect(place).to_have_text("45 s")
        expect(shown.first).to_have_text("0.25")
        assert violations(page) == []
        page.get_by_label("Phase").select_option("supervised fine-tuning")
        loss = page.get_by_role("region", name="Loss").locator("b")
        expect(loss).to_have_text("2.5")
        expect(shown.first).not_to_be_visible()
        assert violations(page) == []
    with viewing(folder.path) as url, looking(chromium, url) as (page, _):
        for view in views:
            page.goto(f"{url}/#/{view}")
            expect(page.locator("#view > *").first).to_be_attached()
        expect(page.get_by_text("1776").first).to_be_visible()


def test_finished_run_says_how_it_went_and_what_differs(chromium: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one", f"model = {str(SMALL)!r}\nseed = 1\n[loop]\nsteps = 2\n")
    second = RunFolder(tmp_path / "two", f"model = {str(SMALL)!r}\nseed = 2\n[loop]\nsteps = 2\n")
    row = {"group": 1, "version": 0, "question": "why?"}
    rows = [rollout("1-a.0"), {**rollout("1-a.1", reward=0.0), "answer": "41"}]
    more = {"parts": {"found": 0.25}, "truth": "42"}
    folder.add_group(1, [{**row, **single, **more} for single in rows])
    second.add_group(3, [{**row, "group": 3, **rollout("3-a.0"), **more, "answer": "40"}])
    for run in (folder, second):
        run.add_metrics({"step": 0, "held_out/reward": 0.5, "held_out/num_rollouts": 100})
        run.add_metrics({"step": 2, "held_out/reward": 0.75, "held_out/num_rollouts": 100})
    command = {"command": "agentloop train x.toml", "version": "1.2", "commit": "abc", "unix_s": 1}
    folder.append("commands.jsonl", command)
    folder.append("commands.jsonl", {"ended_unix_s": 62})
    with viewing(folder.path) as url, looking(chromium, url) as (page, _):
        about_run = page.get_by_role("region", name="This run")
        for text in (
            "0.500 at step 0 → 0.750 at step 2", "0.657 to 0.825, 100 rollouts", "1:01",
            "agentloop train x.toml", "1.2; working directory at commit abc",
        ):  # fmt: skip
            expect(about_run).to_contain_text(text)
        lengths = page.get_by_role("img", name=re.compile("^Lengths of 2 rollouts"))
        expect(lengths).to_be_visible()
        wrong = page.get_by_role("region", name="Wrong answers").get_by_role("row").last
        expect(wrong).to_contain_text("why?4142")  # the answer, and what was expected
        assert violations(page) == []
        wrong.get_by_role("link").click()
        expect(page.locator(".tr-id")).to_have_text("1-a.1")
        page.get_by_label("Beside").select_option("1-a.0")
        expect(page.locator(".tr-id")).to_have_text(["1-a.1", "1-a.0"])
        assert violations(page) == []
        page.goto(f"{url}/#/group/1-a")
        rows_shown = page.get_by_role("region", name="Rollouts of the group").get_by_role("row")
        expect(rows_shown.first).to_contain_text("foundAdvantage")  # a column for each part
        expect(rows_shown.last).to_contain_text("0.25")
        page.get_by_label("Beside run").select_option("two")
        of_other = page.get_by_role("region", name="Rollouts of the other run")
        expect(of_other.get_by_role("row").last).to_contain_text("40")
        assert violations(page) == []
        of_other.get_by_role("link").click()
        expect(page.locator(".tr-id")).to_have_text(["1-a.0", "two//3-a.0"])
        expect(page.get_by_label("Beside").locator("option:checked")).to_contain_text("two .0")
        assert violations(page) == []
        page.goto(f"{url}/#/rollouts")
        expect(page.locator(".ro-body .ro-row").nth(1)).to_contain_text("42")  # expected beside 41
        page.goto(f"{url}/#/curves?with=two")
        differences = page.get_by_role("region", name="Settings that differ").get_by_role("row")
        expect(differences).to_have_text(
            [
                "Settingonetwo",
                "commandagentloop train x.toml–",
                "version1.2–",
                "commitabc–",
                "seed12",
            ]
        )
        assert violations(page) == []


def test_missing_rollout_has_no_buttons(service: Service, chromium: Browser) -> None:
    with looking(chromium, f"{service.url}/#/rollout/nosuch") as (page, problems):
        problems.expected = ["404"]
        expect(page.get_by_text("cannot be shown")).to_be_visible()
        expect(page.get_by_role("button", name="Copy as JSON")).not_to_be_visible()
        expect(page.get_by_label("Color tokens by")).not_to_be_visible()
        for kind in ("rollout", "group"):  # without an id
            page.goto(f"{service.url}/#/{kind}")
            expect(page.get_by_role("heading", level=1)).to_have_text(f"{kind.capitalize()}s")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog").locator("kbd").first).to_have_text(
            f"1 – {page.locator('#nav a').count()}"
        )


def test_question_while_nobody_answers_says_so_until_somebody_does(
    service: Service, chromium: Browser
) -> None:
    with looking(chromium, service.url) as (page, problems):
        problems.expected = ["ERR_"]
        page.route("**/api/**", lambda route: route.abort())
        page.goto(f"{service.url}/?again#/ask")
        page.get_by_role("textbox").fill(QUESTION)
        page.get_by_role("button", name="Ask", exact=True).click()
        notice = page.locator("#view").get_by_text("the server is not responding")
        expect(notice).to_be_visible()
        page.unroute("**/api/**")
        expect(notice).not_to_be_visible()


def test_turn_says_what_can_be_said_of_it(chromium: Browser, tmp_path: Path) -> None:
    """A call that never ran, tokens that came in one burst, an answer of an endpoint of others."""
    folder = RunFolder(tmp_path / "run", f"model = {str(SMALL)!r}\n")
    row = {"group": 1, "version": 0, **rollout("1-a.0")}
    turn = row["trajectory"]["turns"][0]
    turn["results"][0]["status"] = "malformed"
    turn["generated_s"] = turn["first_token_s"] + 0.0001
    folder.add_group(1, [row])
    text = "<think>Hm.</think>\nit is 42"
    turn_with_text = Turn(text=text, end=TurnEnd.STOP, generated_s=1.0, ended_s=1.0)
    trajectory = Trajectory("2-b.0", [], [turn_with_text], StopReason.ANSWERED, None, 100.0, 1.0)
    fields = {"trajectory": trajectory.to_dict(), "figures": {"num_tokens": 59}}
    folder.add_group(2, [{"group": 2, "version": None, **rollout("2-b.0"), **fields}])
    out = tmp_path / "run.html"
    command = [
        sys.executable,
        "-m",
        "agentloop",
        "runs",
        "view",
        str(folder.path),
        "--export",
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with looking(chromium, f"{out.as_uri()}#/rollout/1-a.0") as (page, _):
        first = page.locator(".tr-turn").first
        expect(first).to_contain_text("did not run")
        expect(first).not_to_contain_text("queued")
        expect(first).not_to_contain_text("tokens/s")
        assert first.locator(".v-fill.tool").count() == 0
        page.goto(f"{out.as_uri()}#/rollout/2-b.0")
        expect(page.get_by_text("59 sampled")).to_be_visible()
        expect(page.locator(".tr-seg.reasoning")).to_contain_text("Hm.")
        expect(page.locator(".tr-turn")).to_contain_text("it is 42")


@pytest.mark.gate
def test_text_of_a_model_is_never_run_as_html(
    service: Service, chromium: Browser, tmp_path: Path
) -> None:
    evil = "<img src=x onerror=window.pwned=1></script><script>window.pwned=1</script>"
    with looking(chromium, service.url) as (page, _):
        key = ask(service, evil)
        page.goto(f"{service.url}/#/rollout/{key}")
        expect(page.get_by_text("onerror").first).to_be_visible()
        assert page.evaluate("window.pwned") is None
