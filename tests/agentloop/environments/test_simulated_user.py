"""Simulated users: whose words are whose, and how a conversation ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentloop.environments.simulated_user import SimulatedUser
from agentloop.errors import InfrastructureFailed
from agentloop.trajectory import Message


class Script:
    """A model that says these lines; remembers what it was asked."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.asked: list[list[Message]] = []

    async def __call__(self, messages: Sequence[Message]) -> str:
        self.asked.append(list(messages))
        return self.lines.pop(0)


async def test_simulated_user_reads_the_agents_words_as_user_messages() -> None:
    script = Script("I need a seat. ", "By the window.", "###DONE###")
    user = SimulatedUser(script, "You want a {seat}.")
    assert await user.begin() == "I need a seat."
    assert await user("Which one?") == "By the window."
    assert await user("Done.") is None
    assert user.has_left
    assert await user("Anything else?") is None
    assert [first["role"] for first in script.asked[-1]] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert "You want a {seat}." in script.asked[0][0]["content"]
    assert [first["content"] for first in script.asked[-1][2:]] == [
        "I need a seat.", "Which one?", "By the window.", "Done.",
    ]  # fmt: skip
    assert user.num_turns == 2


async def test_conversation_ends_after_so_many_messages_of_the_user() -> None:
    script = Script("one", "two", "three")
    user = SimulatedUser(script, "You chat.", max_turns=2)
    assert [await user("a"), await user("b"), await user("c")] == ["one", "two", None]
    assert not user.has_left
    assert script.lines == ["three"]


async def test_person_may_leave_with_a_last_word() -> None:
    user = SimulatedUser(Script("Thanks. ###DONE###"), "You chat.")
    assert await user("Here you are.") is None
    assert user.has_left


async def test_person_who_says_nothing_is_the_infrastructures_fault() -> None:
    with pytest.raises(InfrastructureFailed, match="said nothing"):
        await SimulatedUser(Script(" \n"), "You chat.")("Hello.")
    with pytest.raises(InfrastructureFailed, match="left before saying anything"):
        await SimulatedUser(Script("###DONE###"), "You chat.").begin()
