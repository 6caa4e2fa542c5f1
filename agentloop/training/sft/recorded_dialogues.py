"""Recorded rollouts as dialogues to imitate, with the ids that were sampled."""

from __future__ import annotations

from collections.abc import Mapping

import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.errors import DataError
from agentloop.trajectory import Trajectory, Turn, TurnEnd


class _RecordedTurn(pydantic.BaseModel):
    output_ids: list[pydantic.NonNegativeInt] = pydantic.Field(min_length=1)
    observation_ids: list[pydantic.NonNegativeInt]
    text: str


class _RecordedDialogue(pydantic.BaseModel):
    prompt_ids: list[pydantic.NonNegativeInt]
    turns: list[_RecordedTurn] = pydantic.Field(min_length=1)


def is_recorded(row: Mapping[str, object]) -> bool:
    """Return whether a line of dialogues has ids in place of messages."""
    return "prompt_ids" in row


def recorded_rollout(row: Mapping[str, object], where: str) -> Trajectory:
    """Return the rollout of a line that `agentloop data dialogues` has written.

    Raises:
        DataError: a field is missing or invalid.
    """
    try:
        dialogue = _RecordedDialogue.model_validate(row, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise DataError(f"{where}: field {field!r}: {first['msg']}") from error
    turns = [
        Turn(
            turn.output_ids,
            logprobs=[0.0] * len(turn.output_ids),
            end=TurnEnd.STOP,
            observation_ids=turn.observation_ids,
            text=turn.text,
        )
        for turn in dialogue.turns
    ]
    return Trajectory(where, dialogue.prompt_ids, turns)


def check_tokenizer(chat: ChatFormat, rollout: Trajectory) -> None:
    """Check that a rollout was sampled with the tokenizer of `chat`.

    Raises:
        DataError: it was not.
    """
    is_known = max(rollout.ids) < chat.vocab_size
    if not is_known or all(chat.decode(turn.output_ids) != turn.text for turn in rollout.turns):
        raise DataError(
            f"{rollout.id}: these are not ids of this model's tokenizer: fine-tune a model that "
            "has the tokenizer of the one that sampled them"
        )
