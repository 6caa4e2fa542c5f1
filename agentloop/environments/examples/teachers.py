"""Players of the other examples' environments, for a model to imitate before it acts by itself."""

import random
import re
from collections.abc import Sequence

import agentloop


class Guesser:
    """Halves what is left or counts up in a game, and sometimes forgets what it has heard."""

    def __init__(self, task: agentloop.Task, rng: random.Random) -> None:
        self.rng, self.top = rng, task.top
        self.above, self.below = 0, task.top
        self.halves = rng.random() < 0.5

    def __call__(self, messages: Sequence[agentloop.Message]) -> agentloop.Message:
        if len(messages) > 1:
            number = messages[-2]["tool_calls"][0]["function"]["arguments"]["number"]
            match messages[-1]["content"]:
                case "right":
                    return say("Found.", f"It is {number}.")
                case "higher":
                    self.above = number
                case "lower":
                    self.below = number
                case _:
                    return say("No more tries.", "I give up.")
        if self.rng.random() < 0.1 or self.below - self.above < 2:
            self.above, self.below = 0, self.top
        number = (self.above + self.below) // 2 if self.halves else self.above + 1
        return think(f"{self.above} to {self.below}", agentloop.call("guess", number=number))


class Careless:
    """Solves and checks, and often looks at any of the numbers."""

    def __init__(self, task: agentloop.Task, rng: random.Random) -> None:
        self.task, self.rng = task, rng

    def __call__(self, messages: Sequence[agentloop.Message]) -> agentloop.Message:
        question = str(messages[-1]["content"])
        said = found = self.task.answer
        if self.rng.random() < 0.6:
            said = found = self.rng.choice(re.findall(r"\d+", str(self.task.prompt)))
        if "Is this right?" in question:
            said = "yes" if f"right? {found}\n" in question else "no"
        return say(f"I see {found}.", said)


class Clerk:
    """Sometimes looks up another number than it should, and sometimes names any shelf."""

    def __init__(self, task: agentloop.Task, rng: random.Random) -> None:
        self.rng = rng

    def __call__(self, messages: Sequence[agentloop.Message]) -> agentloop.Message:
        kind, number = messages[-1]["content"].rstrip(".").split()[-2:]
        if kind == "shelf":
            return say("There it is.", f"Shelf {number}.")
        if self.rng.random() < 0.2:
            return say("I guess.", f"Shelf {self.rng.randint(10, 99)}.")
        looked_up = self.rng.randint(100, 999) if self.rng.random() < 0.15 else int(number)
        return think("I look it up.", agentloop.call("locate", number=looked_up))


def say(reason: str, text: str) -> agentloop.Message:
    return think(reason, {"role": "assistant", "content": text})


def think(reason: str, message: agentloop.Message) -> agentloop.Message:
    return {**message, "reasoning_content": reason}
