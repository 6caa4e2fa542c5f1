"""Run one generation from given token ids: without a chat template, tools or turns.

    ids ──engine──> chunks ──> pieces: tokens, and the text that is final with them

Stop sequences are found in the text as it arrives, whatever it is: nothing in it is markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from agentloop.agent.channels import StopFinder
from agentloop.agent.rollout import Engine
from agentloop.agent.text_stream import TextStream, TokenCodec
from agentloop.inference.sglang.frames import Chunk, PromptLogprobs, TopLogprobs
from agentloop.inference.turns import Generation
from agentloop.trajectory import TurnEnd


@dataclass(frozen=True, slots=True)
class GeneratedPiece:
    """New tokens, and text that became final with them; it may belong to earlier tokens.

    Attributes:
        offsets: Where the text of each token begins, in characters from the generation's start.
        prompt: Log-probabilities of the prompt, if requested; in the first piece.
        end: The cause of the generation's end; set in its last piece.
    """

    text: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    prompt: PromptLogprobs | None = None
    end: TurnEnd | None = None


class RawGeneration:
    """Runs a generation and reports it piece by piece.

    The token that ends it is reported like any other, but is not part of the text.
    """

    def __init__(
        self,
        engine: Engine,
        codec: TokenCodec,
        generation: Generation,
        *,
        vocab_size: int,
        stop: Sequence[str] = (),
        on_piece: Callable[[GeneratedPiece], None],
    ) -> None:
        """
        Args:
            vocab_size: Ids outside of it are refused.
            stop: Stop sequences; the generation ends when one is complete.
            on_piece: Called as tokens arrive, in the event loop's callback; it must not block.
        """
        self._engine = engine
        self._generation = generation
        self._vocab_size = vocab_size
        self._on_piece = on_piece
        self._text = TextStream(codec)
        self._finder = StopFinder(stop)
        self._num_chars = 0
        self._cut = anyio.CancelScope()

    async def run(self) -> None:
        """Run the generation until its last piece was reported.

        Raises:
            RequestError: The request is invalid.
            ServerUnavailable: It could not be served.
        """
        generation = self._generation
        with self._cut:
            try:
                await self._engine.generate(
                    generation,
                    vocab_size=self._vocab_size,
                    on_chunk=self._take,
                    on_placed=lambda server, decision: None,
                    on_moved=lambda server, reason: None,
                )
            finally:
                # Lengths of prompts that somebody else wrote say nothing about those of rollouts.
                self._engine.forget(generation.key, is_complete=False)

    def _take(self, chunk: Chunk) -> None:
        if self._cut.cancel_called or not (chunk.ids or chunk.end):
            return
        final, offsets = "", []
        for token in chunk.ids:
            offsets.append(self._num_chars)
            if token not in self._generation.stop_ids:
                final += self._until_stop(self._text.feed([token]))
            if self._finder.matched is not None:
                break
        end = chunk.end
        if end is not None and self._finder.matched is None:
            final += self._until_stop(self._text.flush()) + self._finder.flush()
        if self._finder.matched is not None:
            end = TurnEnd.STOP
            self._cut.cancel()
        num = len(offsets)
        self._on_piece(
            GeneratedPiece(
                final,
                chunk.ids[:num],
                chunk.logprobs[:num],
                list(chunk.top_logprobs[:num]),
                offsets,
                chunk.cached_tokens,
                chunk.prompt,
                end,
            )
        )

    def cut_off(self) -> None:
        """Report the last piece of a generation that was cancelled: the text that was held back."""
        final = self._until_stop(self._text.flush()) + self._finder.flush()
        self._on_piece(GeneratedPiece(final, end=TurnEnd.LENGTH))

    def _until_stop(self, text: str) -> str:
        self._num_chars += len(text)
        return self._finder.feed(text)
