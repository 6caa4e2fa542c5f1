"""A teacher's log-probabilities: which are asked for, retries, and its tokenizer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from agentloop.errors import ServerRefused, ServerUnavailable, SettingsError
from agentloop.models import SMALL
from agentloop.token_records import KeptIds
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.teacher_client import open_teacher
from agentloop.trajectory import Trajectory, Turn
from tests.support import serving

TOKENIZER = Tokenizer.from_file(str(SMALL / "tokenizer.json"))
MADE = Trajectory("t", [3, 4], [Turn([5, 6], [-1.0] * 2, observation_ids=[7]), Turn([8], [-1.0])])


@dataclass
class FakeTeacher:
    """Answers as SGLang does; the log-probability of an id is minus a tenth of it."""

    statuses: deque[int] = field(default_factory=deque)  # of the next answers to /generate
    offset: int = 0  # added to each id that it encodes
    asked: list[dict[str, Any]] = field(default_factory=list)
    answer: Any = None  # to /generate, in place of the right one
    silent: bool = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        async with serving(app) as url:
            yield url

    async def _tokenize(self, request: web.Request) -> web.Response:
        requests = await request.json()
        assert not requests["add_special_tokens"]
        encoded = TOKENIZER.encode_batch(requests["prompt"], add_special_tokens=False)
        tokens = [[id + self.offset for id in first.ids] for first in encoded]
        return web.json_response({"tokens": tokens, "count": [*map(len, tokens)]})

    async def _generate(self, request: web.Request) -> web.Response:
        requests = await request.json()
        self.asked.append(requests)
        if self.silent:
            await anyio.sleep_forever()
        status = self.statuses.popleft() if self.statuses else 200
        if status != 200:
            return web.json_response({"error": {"message": "no"}}, status=status)
        reported = [
            [-id / 10, id, None] for id in requests["input_ids"][requests["logprob_start_len"] :]
        ]
        reported[0][0] = None
        meta: dict[str, Any] = {"input_token_logprobs": reported}
        if compared := requests.get("token_ids_logprob"):
            table = [[-id / 10, id, None] for id in compared]
            meta["input_token_ids_logprobs"] = [None] + [table] * (len(reported) - 1)
        return web.json_response(self.answer or {"meta_info": meta})


@asynccontextmanager
async def taught(fake: FakeTeacher, timeout_s: float = 60) -> AsyncIterator[Any]:
    async with fake.serving() as url:
        args = {"teacher": url, "timeout_s": timeout_s}
        async with open_teacher(CreditSettings(name="distill", args=args), TOKENIZER) as teacher:
            yield teacher


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.training.teacher_client._FIRST_PAUSE_S", 0.001)


async def test_sampled_tokens_of_all_turns_are_judged_by_one_request() -> None:
    fake = FakeTeacher()
    async with taught(fake) as teacher:
        assert await teacher(MADE) == pytest.approx([-0.5, -0.6, -0.8])
        assert await teacher(Trajectory("empty", [3])) == []
    (requests,) = fake.asked
    assert requests["input_ids"] == MADE.ids
    assert requests["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize("max_compared", [1, 5, 1 << 14])
async def test_teacher_is_compared_over_the_kept_ids(
    max_compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.training.teacher_client._MAX_COMPARED", max_compared)
    first = Turn([5, 6], [-1.0, 0.0], observation_ids=[7], kept=KeptIds([[5, 9], [6]]))
    last = Turn([8], [-1.0], kept=KeptIds([[2, 8, 4]]))
    fake = FakeTeacher()
    async with taught(fake) as teacher:
        logprobs = await teacher(Trajectory("t", [3, 4], [first, last]))
    total = math.exp(-0.2) + math.exp(-0.8) + math.exp(-0.4)
    expected = [-math.log(1 + math.exp(-0.4)), 0.0, -0.8 - math.log(total)]
    assert logprobs == pytest.approx(expected)
    assert len(fake.asked) == {1: 4, 5: 3, 1 << 14: 1}[max_compared]


async def test_no_teacher_is_opened_where_none_is_needed() -> None:
    async with open_teacher(CreditSettings(), TOKENIZER) as teacher:
        assert teacher is None


async def test_server_error_is_retried() -> None:
    fake = FakeTeacher(statuses=deque([500, 503, 200]))
    async with taught(fake) as teacher:
        assert len(await teacher(MADE)) == 3
    assert len(fake.asked) == 3


async def test_refusal_is_not_retried() -> None:
    fake = FakeTeacher(statuses=deque([400]))
    async with taught(fake) as teacher:
        with pytest.raises(ServerRefused, match="400: no"):
            await teacher(MADE)
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    "fake", [FakeTeacher(statuses=deque([500] * 999)), FakeTeacher(silent=True)]
)
async def test_retries_end_at_the_deadline(fake: FakeTeacher) -> None:
    async with taught(fake, timeout_s=1) as teacher:
        with pytest.raises(ServerUnavailable, match="did not answer within 1 s"):
            await teacher(MADE)


@pytest.mark.parametrize(
    "reported",
    [
        None,
        [[None, 4, None], [-1.0, 5, None]],
        [[None, 4, None], *([None, n, None] for n in (5, 6, 7, 8))],
    ],
)
async def test_log_probabilities_of_other_ids_are_refused(reported: Any) -> None:
    fake = FakeTeacher(answer={"meta_info": {"input_token_logprobs": reported}})
    async with taught(fake) as teacher:
        with pytest.raises(ServerRefused, match="no log-probabilities of the given ids"):
            await teacher(MADE)


async def test_another_tokenizer_is_refused_before_anything_is_asked() -> None:
    fake = FakeTeacher(offset=1)
    with pytest.raises(SettingsError, match=r"credit.args.teacher: the tokenizer of http.* is not"):
        async with taught(fake):
            pass
    assert fake.asked == []


async def test_ids_outside_the_vocabulary_never_reach_the_server() -> None:
    """They would end it."""
    fake = FakeTeacher()
    async with taught(fake) as teacher:
        with pytest.raises(ServerRefused, match="id 99999 is not in the tokenizer's vocabulary"):
            await teacher(Trajectory("t", [3], [Turn([99999], [-1.0])]))
    assert fake.asked == []
