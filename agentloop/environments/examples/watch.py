"""The events of a rollout as they happen: tokens, calls, results."""

import anyio

import agentloop
from agentloop.events import CallFinished, CallStarted, TokensSampled


async def main() -> None:
    async with agentloop.Runtime(progress=print) as runtime:
        async with runtime.stream("Compute 12*7, 8+5 and 90-3.") as rollout:
            async for event in rollout:
                match event:
                    case TokensSampled(text=text):
                        print(text, end="", flush=True)
                    case CallStarted(call=call):
                        print(f"\n[runs {call.name}: {call.arguments}]")
                    case CallFinished(result=result):
                        print(f"\n[{result.status}: {result.content}]")
        assert rollout.trajectory is not None
        print(f"\n{rollout.trajectory.stop_reason}")


if __name__ == "__main__":
    anyio.run(main)
