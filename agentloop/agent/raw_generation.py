"""Run one generation from given token ids: without a chat template, tools or turns.

Stop sequences are found in the text as it arrives, whatever it is: nothing in it is markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from agentloop.agent.channels import StopFinder
from agentloop.agent.rollout import Engine
from agentloop.agent.text_stream import TextStream, TokenCodec
from agentloop.errors import ServerUnavailable
from agentloop.inference.sglang.frames import Chunk, PromptLogprobs, TopLogprobs
from agentloop.inference.turns import Generation
from agentloop.trajectory import TurnEnd


@dataclass(slots=True)
class RawGeneration:
    """A generation, and what it has sampled so far.

    Attributes:
        vocab_size: Ids outside of it are refused.
        stop: Stop sequences; the generation ends when one is complete.
        text: The text without the token that ended it; complete once `end` is set.
        ids: The sampled ids, with that token.
        prompt: Log-probabilities of the prompt, if requested.
    """

    engine: Engine
    codec: TokenCodec
    generation: Generation
    vocab_size: int
    stop: Sequence[str] = ()
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    prompt: PromptLogprobs | None = None
    end: TurnEnd | None = None

    async def run(self, timeout_s: float) -> None:
        """Run the generation until it ends; after `timeout_s` seconds, it is cut off.

        Raises:
            RequestError: The request is invalid.
            ServerUnavailable: It could not be served, or not within the time.
        """
        generation, text, finder = self.generation, TextStream(self.codec), StopFinder(self.stop)
        found_stop = anyio.CancelScope()

        def take(chunk: Chunk) -> None:
            if self.end is not None or not (chunk.ids or chunk.end):
                return
            num = 0
            for token in chunk.ids:
                num += 1
                if token not in generation.stop_ids:
                    self.text += finder.feed(text.feed([token]))
                if finder.matched is not None:
                    break
            self.ids += chunk.ids[:num]
            self.logprobs += chunk.logprobs[:num]
            self.top_logprobs += chunk.top_logprobs[:num]
            self.prompt = self.prompt or chunk.prompt
            self.cached_tokens = chunk.cached_tokens
            if finder.matched is not None:
                self.end = TurnEnd.STOP
                found_stop.cancel()
            else:
                self.end = chunk.end

        with anyio.move_on_after(timeout_s), found_stop:
            try:
                await self.engine.generate(
                    generation,
                    vocab_size=self.vocab_size,
                    on_chunk=take,
                    on_placed=lambda server, decision: None,
                    on_moved=lambda server, reason: None,
                )
            finally:
                # Lengths of prompts that somebody else wrote say nothing about those of rollouts.
                self.engine.forget(generation.key, is_complete=False)
        if self.end is None and not self.ids:  # it only waited for a server
            raise ServerUnavailable(f"no token was sampled within {timeout_s:g} s")
        if finder.matched is None:
            self.text += finder.feed(text.flush())
            self.text += finder.flush() if finder.matched is None else ""
        self.end = self.end or TurnEnd.LENGTH
