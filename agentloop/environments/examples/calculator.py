"""A program of the OpenAI Agents SDK: agentloop train calculator"""

from agents import AgentsException
from openai import AsyncOpenAI

import agentloop
from agentloop.environments.examples.calculator_agent import answer

CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="that of the rollout", max_retries=0)


@agentloop.environment
async def calculate(task: agentloop.Task, agent: agentloop.Agent) -> agentloop.Trajectory | float:
    try:
        client = CLIENT.with_options(base_url=agent.url, api_key=agent.key)
        await answer(str(task.prompt), client)
    except AgentsException:  # the model called a tool that there is not, or has no turns left
        return 0.0
    return agent.trajectories[-1]  # its answer is checked
