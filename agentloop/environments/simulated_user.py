"""A simulated user: a model that plays the person whom the agent talks to."""

from __future__ import annotations

from agentloop.environments.endpoint import Ask, Endpoint, asking
from agentloop.errors import InfrastructureFailed
from agentloop.trajectory import Message

__all__ = ["SimulatedUser"]

_DONE = "###DONE###"
_SYSTEM = """\
You play a person who talks to an assistant. You are not the assistant, and never do its work.

{persona}

Write only the person's next message, in the person's own words, and one matter at a time. Tell \
what the person knows when the assistant asks for it. When the person has reached the goal, or \
sees that it cannot be reached, reply with exactly {done}"""
_FIRST = "(The assistant waits. Write the first message.)"


class SimulatedUser:
    """A person that a model plays. Pass it as `reply` to `agent.run`, one for each conversation.

        user = agentloop.SimulatedUser(model, f"You want to {task.goal}. You are in a hurry.")
        await agent.run(await user.begin(), tools=[...], reply=user)

    Attributes:
        messages: the conversation as the model sees it: the agent's messages are the user's.
        num_turns: messages of the person so far.
        has_left: whether the person ended the conversation, rather than `max_turns`.
    """

    def __init__(self, model: Endpoint | Ask, persona: str, *, max_turns: int = 10) -> None:
        """
        Args:
            model: an endpoint; or a function of a conversation, such as the `chat` of another
                agent.
            persona: describes the person: who it is, what it knows and wants.
            max_turns: messages of the person, the first one included; then the conversation ends.
        """
        self.messages: list[Message] = [
            {"role": "system", "content": _SYSTEM.format(persona=persona, done=_DONE)}
        ]
        self.num_turns = 0
        self.has_left = False
        self._ask = asking(model)
        self._max_turns = max_turns

    async def begin(self) -> str:
        """Return the person's first message.

        Raises:
            InfrastructureFailed: as in `__call__`, or the person left at once.
        """
        if (first := await self(_FIRST)) is None:
            raise InfrastructureFailed("the simulated user left before saying anything")
        return first

    async def __call__(self, answer: str) -> str | None:
        """Return the person's reply to the agent, or None at the end of the conversation.

        Raises:
            InfrastructureFailed: the model could not be reached in time, or said nothing; the
                rollout gets no reward.
            LimitReached, RequestError, SettingsError: as `Endpoint.chat`.
        """
        if self.has_left or self.num_turns >= self._max_turns:
            return None
        self.messages.append({"role": "user", "content": answer})
        reply = (await self._ask(self.messages)).strip()
        self.messages.append({"role": "assistant", "content": reply})
        if not reply:
            raise InfrastructureFailed("the simulated user said nothing")
        self.has_left = _DONE in reply
        if self.has_left:
            return None
        self.num_turns += 1
        return reply
