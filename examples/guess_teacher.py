"""Dialogues of a player of examples/guess_number.py who guesses at random within what is left.

python -m examples.guess_teacher 6000 > guess.jsonl
"""

import json
import random
import sys
from collections.abc import Sequence

import anyio

import agentloop
from examples.guess_number import guess, make_task

REASON = "<reason></reason>\n"  # as the small model's chat template begins each turn


class Player:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __call__(self, messages: Sequence[agentloop.Message]) -> agentloop.Message | str:
        low, high = 1, 100
        for said, heard in zip(messages[1::2], messages[2::2], strict=False):
            number = said["tool_calls"][0]["function"]["arguments"]["number"]
            if heard["content"] == "right":
                return f"{REASON}It is {number}."
            if heard["content"] == "no tries left":
                return f"{REASON}I give up."
            if heard["content"] == "higher":
                low = max(low, number + 1)
            else:
                high = min(high, number - 1)
        if self.rng.random() < 0.1:  # forgets what it has heard
            low, high = 1, 100
        return agentloop.call("guess", REASON, number=self.rng.randint(low, high))


async def main(count: int) -> None:
    rng = random.Random(0)
    for _ in range(count):
        budget = agentloop.Budget(max_turns=16)
        played = await agentloop.play(guess, make_task(rng), Player(rng), budget=budget)
        for dialogue in played.dialogues:
            print(json.dumps(dialogue))


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
