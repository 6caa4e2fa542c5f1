"""Two agents: agentloop train solver-and-checker"""

import random
import re

import agentloop
from agentloop.environments.examples.teachers import Careless


def make_task(rng: random.Random) -> dict[str, object]:
    numbers = rng.sample(range(10), 4)
    return {"prompt": f"Which is the largest of {numbers}?", "answer": str(max(numbers))}


@agentloop.environment(tasks=make_task, weights={"judged": 0}, teacher=Careless)
async def solve_and_check(task: agentloop.Task, agent: agentloop.Agent) -> dict[str, float]:
    checker = agent.other("checker")
    solution = await agent.chat(task.prompt)
    verdict = await checker.chat(f"{task.prompt}\nIs this right? {solution}\nSay yes or no.")
    is_right = re.findall(r"\d+", solution) == [task.answer]
    checker.reward = float(verdict.strip().lower() == ("yes" if is_right else "no"))
    return {"right": is_right, "judged": checker.reward}
