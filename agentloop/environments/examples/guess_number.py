"""A game as an environment: agentloop train guess-number"""

import random

import agentloop
from agentloop.environments.examples.teachers import Guesser


class Game:
    def __init__(self, number: int, tries: int) -> None:
        self.number, self.tries, self.found = number, tries, False

    def guess(self, number: int) -> str:
        """Guess the number."""
        if not self.tries:
            return "no tries left"
        self.tries -= 1
        self.found |= number == self.number
        return "right" if self.found else "higher" if number < self.number else "lower"


def make_task(rng: random.Random) -> dict[str, int]:
    return {"top": (top := rng.randint(17, 32)), "answer": rng.randint(1, top - 1)}


@agentloop.environment(tasks=make_task, teacher=Guesser)
async def guess(task: agentloop.Task, agent: agentloop.Agent) -> dict[str, float]:
    game = Game(int(task.answer), tries=(task.top - 1).bit_length())  # as for binary search
    await agent.run(f"Find my number, between 0 and {task.top}.", tools=[game.guess])
    return {"found": game.found}
