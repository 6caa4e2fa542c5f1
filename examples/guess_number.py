"""A game as an environment: agentloop train env=examples.guess_number:guess"""

import random

import agentloop


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
    return {"answer": rng.randint(1, 100), "top": 100}


@agentloop.environment(tasks=make_task)
async def guess(task: agentloop.Task, agent: agentloop.Agent) -> dict[str, float]:
    game = Game(int(task.answer), tries=task.top.bit_length())  # binary search needs no more
    await agent.run(f"Find my number, 1 to {task.top}.", tools=[game.guess])
    return {"found": game.found}
