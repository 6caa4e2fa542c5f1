"""A rollout in the form of rStar2-Agent, token by token, from the folder of a base model."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.named_tools import resolved_tools
from agentloop.agent.rollout import Rollout
from agentloop.config import load_settings
from agentloop.environments.environment import load
from agentloop.environments.tasks.sources import Task
from agentloop.sandbox import CallError, CallResult, CallStatus, Pool
from agentloop.training.plan.settings import TrainSettings
from agentloop.trajectory import Message
from tests.agentloop.test_recipes import END_OF_TEXT, FOLDER, like_qwen3_base
from tests.fakes import FakePool
from tests.support import END, ScriptedEngine, call_text, chunks, written

# transformers is slow to import.
pytestmark = pytest.mark.timeout(120)

PRINTED = "0123456789" * 40
TRACEBACK = "Traceback (most recent call last):\nZeroDivisionError: division by zero\n"
TOOLS = {"paper": "execute_python_code_with_standard_io", "release": "python_code_with_standard_io"}
RECIPES = {"paper": "paper-stage1", "release": "release-8gpu"}

SYSTEM = {
    "paper": "A conversation between User and Assistant. The user asks a question, and the "
    "Assistant solves it. The Assistant first thinks about the reasoning process in the mind and "
    "then provides the user with the answer. The reasoning process and answer are enclosed within "
    "<reason> </reason> and <answer> </answer> tags, respectively, i.e., <reason> reasoning "
    "process here </reason><answer> answer here </answer>.",
    "release": "A conversation between User and Assistant. The User asks a question, and the "
    "Assistant solves it. The Assistant first thinks about the reasoning process in the mind and "
    "then provides the User with the answer. The reasoning process is enclosed within <reason> "
    "</reason> and answer is enclosed within <answer> </answer> tags, respectively, i.e., <reason> "
    "reasoning process here </reason> <answer> answer here </answer>.",
}
SCHEMA = (
    '{"type": "function", "function": {"name": "%s", "description": "Execute Python code with '
    "standard input and capture standard output. This function takes a Python code string and an "
    "input string, provides the input string through standard input (stdin) to the code, and "
    "captures and returns any output produced through standard output (stdout). If the executed "
    'code raises an exception, the error message will be captured and returned instead.", '
    '"parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "A '
    "string containing Python code to be executed. The code can read from standard input using "
    'the input() function."}, "input": {"type": "string", "description": "A string that will be '
    'provided as standard input to the code when it calls input()."}}, "required": ["code", '
    '"input"]}%s}}'
)
RETURN = (
    ', "return": {"type": "string", "description": "str: The output produced by the executed code '
    "through standard output. If an error occurs during execution, the error message will be "
    'returned."}'
)
SCHEMAS = {"paper": SCHEMA % (TOOLS["paper"], RETURN), "release": SCHEMA % (TOOLS["release"], "")}
PROMPT = """\
<|im_start|>system
{system}

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schema}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call><|im_end|>
<|im_start|>user
You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And \
your final answer will be extracted automatically by the \\boxed{{}} tag.
This is the problem:
What is 6 times 7?<|im_end|>
<|im_start|>assistant
<reason>"""
OBSERVATION = """
<|im_start|>user
<tool_response>
{content}
</tool_response><|im_end|>
<|im_start|>assistant
<reason>"""
CUT = "...(truncated)..."
RESPONSES = {
    "paper": [
        PRINTED[:128] + CUT + PRINTED[-128:],
        f"tool call failed\nreason: \nerror message: {TRACEBACK.strip()}",
        "Failed to decode tool call: Expecting property name enclosed in double quotes: "
        "line 2 column 2 (char 2)",
    ],
    "release": [
        f"Tool call success\nstdout: {PRINTED}"[:128]
        + CUT
        + f"{PRINTED}\n\nexecution time: 0.50s"[-128:],
        "Tool call failure\nreason: \nstderr: ZeroDivisionError at line 1: division by zero\n"
        "  1 / 0\n\nexecution time: 0.25s",
        "Failed to decode tool call: Expecting property name enclosed in double quotes: "
        "line 2 column 2 (char 2)",
    ],
}


PRINTS = CallResult(0, CallStatus.OK, stdout=f"{PRINTED}\n", run_s=0.5)
RAISES = CallResult(
    1,
    CallStatus.ERROR,
    stderr=TRACEBACK,
    error=CallError("ZeroDivisionError", "division by zero", 1, TRACEBACK),
    run_s=0.25,
)


class Asked:
    """Stands in for the agent of an environment; keeps what it is asked."""

    async def run(self, question: str, *, tools: list[str], system: str) -> None:
        self.tools = tools
        self.messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]


@pytest.mark.parametrize("form", ["paper", "release"])
async def test_rollout_from_a_base_models_folder(form: str, tmp_path: Path) -> None:
    recipe = load_settings(TrainSettings, [FOLDER / f"{RECIPES[form]}.toml"])
    chat = ChatFormat.load(like_qwen3_base(tmp_path), recipe.chat)
    assert [chat.decode([token]) for token in chat.stop_ids] == [END, END_OF_TEXT]
    environment = load(recipe.env)
    assert environment is not None
    recording = Asked()
    await environment(Task("t", "What is 6 times 7?", "42"), recording)
    tools = resolved_tools(
        recording.tools,
        pool=cast(Pool, FakePool(PRINTS, RAISES)),
        servers={},
        functions={},
        timeout_s=4,
        tool_format=recipe.tool_format,
    )
    assert [tool.name for tool in tools] == [TOOLS[form]]

    calls = [call_text(TOOLS[form], {"code": code, "input": ""}) for code in ("print()", "1 / 0")]
    broken = "<tool_call>\n{broken\n</tool_call>"
    # The second call of the first turn is ignored.
    texts = [f"Hm.\n{calls[0]}{calls[1]}", f"Once more.\n{calls[1]}", broken, "</reason>Done."]
    engine = ScriptedEngine(*(list(chunks(written(chat, text + END))) for text in texts))
    rollout = Rollout(
        engine,
        chat,
        recording.messages,
        tools,
        budget=recipe.budget,
        tool_format=recipe.tool_format,
    )
    trajectory = await rollout.run()

    prompt = PROMPT.format(system=SYSTEM[form], schema=SCHEMAS[form])
    assert chat.decode(trajectory.prompt_ids) == prompt
    expected = [OBSERVATION.format(content=content) for content in RESPONSES[form]]
    observations = [chat.decode(turn.observation_ids) for turn in trajectory.turns]
    assert observations == [*expected, ""]
    assert [turn.text for turn in trajectory.turns] == [text + END for text in texts]
