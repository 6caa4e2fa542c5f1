"""Tools of an MCP server: agentloop train warehouse"""

import random
import re

import agentloop
from agentloop.environments.examples.teachers import Clerk
from agentloop.environments.examples.warehouse_server import place_of


def make_task(rng: random.Random) -> dict[str, object]:
    place = parcel = rng.randint(100, 999)
    while place >= 100:
        place = place_of(place)
    return {"prompt": f"Find parcel {parcel}.", "answer": str(place)}


@agentloop.environment(tasks=make_task, teacher=Clerk)
async def find(task: agentloop.Task, agent: agentloop.Agent) -> float:
    found = await agent.run(task.prompt, tools=["mcp:warehouse"])
    return re.findall(r"\d+", found.answer)[-1:] == [task.answer]
