"""The forms in which the families of models write calls and thoughts: `chat.format`.

To add one, write a file such as hermes.py, and put its family into `FAMILIES`.
"""

from __future__ import annotations

from agentloop.agent.formats.deepseek import DEEPSEEK_DSML, DEEPSEEK_V3, DEEPSEEK_V31
from agentloop.agent.formats.family import CallStream, Family
from agentloop.agent.formats.glm import GLM
from agentloop.agent.formats.harmony import HARMONY
from agentloop.agent.formats.hermes import HERMES
from agentloop.agent.formats.kimi_k2 import KIMI_K2
from agentloop.agent.formats.llama import LLAMA_JSON, LLAMA_PYTHONIC
from agentloop.agent.formats.minimax_m2 import MINIMAX_M2
from agentloop.agent.formats.mistral import MISTRAL, MISTRAL_V11
from agentloop.agent.formats.nemotron import NEMOTRON
from agentloop.agent.formats.qwen3_coder import QWEN3_CODER
from agentloop.errors import ModelError

__all__ = ["FAMILIES", "HERMES", "CallStream", "Family", "detect", "get_family"]

# A template may have the signs of several: those with more specific ones come first.
FAMILIES: tuple[Family, ...] = (
    HARMONY,
    KIMI_K2,
    MINIMAX_M2,
    *DEEPSEEK_DSML,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM,
    NEMOTRON,
    QWEN3_CODER,
    MISTRAL_V11,
    MISTRAL,
    LLAMA_PYTHONIC,
    LLAMA_JSON,
    HERMES,
)


def detect(template: str) -> Family:
    """Return the family of a chat template.

    Raises:
        ModelError: None fits.
    """
    for family in FAMILIES:
        if family.fits(template):
            return family
    raise ModelError(
        "the chat template shows no known form of tool calls: set chat.format to one of "
        f"{_names()}, or chat.template to a template that shows one"
    )


def get_family(name: str) -> Family:
    """Return the family with this name.

    Raises:
        ModelError: There is none.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ModelError(f"chat.format: {name!r} is not one of auto, {_names()}")


def _names() -> str:
    return ", ".join(sorted(family.name for family in FAMILIES))
