"""Two agents: agentloop train env=examples.solver_and_checker:solve_and_check"""

import random
import re

import agentloop


def make_task(rng: random.Random) -> dict[str, object]:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return {"prompt": f"What is {a} times {b}?", "answer": str(a * b)}


@agentloop.environment(tasks=make_task, weights={"caught": 0.5})
async def solve_and_check(task: agentloop.Task, agent: agentloop.Agent) -> dict[str, float]:
    checker = agent.other("checker")
    solution = await agent.chat(task.prompt)
    verdict = await checker.chat(f"{task.prompt}\nIs this right? {solution}\nSay yes or no.")
    is_right = task.answer in re.findall(r"\d+", solution)
    says_right = verdict.strip().lower().startswith("yes")
    checker.reward = float(says_right == is_right)
    return {"right": is_right, "caught": is_right and says_right}
