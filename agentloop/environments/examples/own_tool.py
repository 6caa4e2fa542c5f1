"""An agent with a tool of its own: a typed Python function with a docstring."""

import anyio

import agentloop


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def main() -> None:
    async with agentloop.Runtime(progress=print) as runtime:
        trajectory = await runtime.rollout("What is 37 times 48?", tools=[multiply])
        print(trajectory.answer)


if __name__ == "__main__":
    anyio.run(main)
