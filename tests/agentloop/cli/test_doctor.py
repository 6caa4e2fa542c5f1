"""`agentloop doctor`: what it finds in a model's folder, and its exit status."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from agentloop.cli import doctor
from agentloop.cli.doctor import diagnose, main
from agentloop.errors import ModelError
from agentloop.models import SMALL
from tests.agentloop.agent.real_models import TEMPLATES, chat_of, fast_tokenizer

pytestmark = pytest.mark.timeout(120)  # transformers is slow to import


def test_model_is_read_and_its_call_is_found_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(SMALL)]) == 0
    out = capsys.readouterr().out
    assert "format               hermes" in out
    assert "end of a turn        <|im_end|>" in out
    assert "The call is found again as it was written." in out
    assert '<tool_call>\n    {"name": "python_code"' in out
    assert main([str(SMALL), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_call_that_is_lost_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(SMALL), "chat.format=qwen3-coder"]) == 1
    assert "PROBLEM: the call is read as" in capsys.readouterr().out


def test_model_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "model: there is no folder" in capsys.readouterr().err
    assert main([str(SMALL), "chat.format=no-such"]) == 2
    assert "chat.format: 'no-such' is not one of auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "format", "end"),
    [
        ("Qwen-Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder", "<|im_end|>"),
        ("openai-gpt-oss-120b", "harmony", "<|return|>"),
        ("meta-llama-Llama-3.2-3B-Instruct", "llama-json", "<|eot_id|>"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral-v11", "</s>"),
    ],
)
@pytest.mark.full
def test_folder_with_a_real_template_is_read(
    name: str, format: str, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast_tokenizer(name).save_pretrained(tmp_path)
    assert main([str(tmp_path), "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert (diagnosis["format"], diagnosis["end_of_turn"]) == (format, end)
    assert "1776" in diagnosis["observation"]


def test_template_without_a_known_form_of_calls_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = copy.copy(fast_tokenizer("NousResearch-Hermes-4-14B"))
    hf.chat_template = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    hf.save_pretrained(tmp_path)
    assert main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "no known form of tool calls: set chat.format to one of deepseek-v3, " in err


# It writes strings without quotes, and so no valid call.
BROKEN = "baseten-Llama-3.2-3B-Instruct-pythonic"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.full
def test_template_that_writes_no_valid_call_has_a_problem(name: str) -> None:
    assert bool(diagnose(chat_of(name)).problems) == (name == BROKEN)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([[("python_code", doctor._ARGUMENTS)]], "the same call"),
        ([[]], "[]"),
        (ModelError("SGLang's parser failed"), "SGLang's parser failed"),
    ],
)
def test_sglangs_own_parser_is_asked(
    calls: object, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(parser: str, turns: list[list[str]], tools: object) -> object:
        assert parser == "qwen25"
        assert '"python_code"' in "".join(turns[0])
        if isinstance(calls, Exception):
            raise calls
        return calls

    monkeypatch.setattr(doctor, "calls_found_by_sglang", ask)
    assert diagnose(chat_of("Qwen-Qwen3-0.6B"), ask_sglang=True).by_sglang == expected
