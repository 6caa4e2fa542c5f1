"""Encode rendered text as token ids, such that data never becomes a control token.

Ids are those of the tokenizer for the whole text, because tokenizers merge characters across the
border between markup and data: in `.\\n</tool_response>`, the period may be data, and `.\\n` one
token. Only where data spells a control token is the text split inside that spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from agentloop.agent.placeholders import Placeholders
from agentloop.plain_json import valid_text


class TokenEncoder:
    """A tokenizer that distinguishes markup from data.

    Attributes:
        tokenizer: The tokenizer.
        vocab_size: The highest id plus one. A vocabulary may have gaps.
        control_re: Matches the spelling of any control token.
        longest_token: Number of characters of the longest token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values())
        self.longest_token = max(map(len, vocab))
        # Added tokens are control tokens, except runs of whitespace, which some tokenizers add.
        controls = {
            id: token.content
            for id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content.strip()
        }
        self._control_ids = frozenset(controls)
        self.control_re = _any_of(controls.values())
        self._first_re = _any_of({text[0] for text in controls.values()})
        # With some tokenizers, text at the very beginning is encoded differently.
        self._before = next(iter(controls.values()), "")
        if self._before and self._encode(f"{self._before}a")[1:] == self._encode("a"):
            self._before = ""

    def token_id(self, text: str) -> int | None:
        """Return the id of `text` if it is a single token of the vocabulary, else None."""
        token: int | None = self.tokenizer.token_to_id(text)
        return token

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including control tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def encode(self, text: str) -> list[int]:
        """Encode data: no part of it becomes a control token, even if it spells one."""
        pieces, start = [], 0
        # Split each look-alike after its first character, so that neither part is one.
        while match := self.control_re.search(text, start):
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        pieces.append(text[start:])
        ids = [token for piece in pieces for token in self._encode(piece)]
        if not self._control_ids.isdisjoint(ids):  # a normalizer produced one
            ids = [token for char in text for token in self._encode(char)]
            ids = [token for token in ids if token not in self._control_ids]
        return ids

    def disarm(self, text: str, mark: Placeholders, *, keep: Iterable[str] = ()) -> str:
        """Replace characters with which a control token could begin by placeholders.

        However a template transforms the text, no control token can be spelled by what is left.
        `keep` are control tokens that stay markup.
        """
        if not (kept := [token for token in keep if token in text]):
            return self._first_re.sub(lambda match: mark(match.group()), text)
        kept_re = re.compile(f"({_any_of(kept).pattern})|{self._first_re.pattern}")
        return kept_re.sub(lambda match: match[1] or mark(match.group()), text)

    def disarm_value(self, value: object, mark: Placeholders) -> Any:
        """Disarm all strings in `value`, at any depth."""
        if isinstance(value, str):
            return self.disarm(value, mark)
        if isinstance(value, Mapping):
            return {
                self.disarm_value(key, mark): self.disarm_value(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.disarm_value(item, mark) for item in value]
        return value

    def encode_marked(self, text: str, mark: Placeholders) -> list[int]:
        """Encode rendered text: control tokens in it are markup, and placeholders stand for data.

        A placeholder may also stand for ids.
        """
        pieces = mark.split(text)
        if len(pieces) == 1:
            return self._encode(text)
        ids: list[int] = []
        data = ""  # text between two control tokens, of markup and of data

        def end_data() -> None:
            nonlocal data
            ids.extend(self._encode_between(data) if ids else self.encode(data))
            data = ""

        for index, piece in enumerate(pieces):
            content = mark.contents[int(piece)] if index % 2 else None
            if isinstance(content, str):
                data += content
            elif content is not None:
                end_data()
                ids.extend(content)
            else:
                start = 0
                for match in self.control_re.finditer(piece):
                    data += piece[start : match.start()]
                    end_data()
                    ids += self._encode(match.group())
                    start = match.end()
                data += piece[start:]
        end_data()
        return ids

    def _encode_between(self, text: str) -> list[int]:
        """Encode data that follows other tokens."""
        if not self._before or self.control_re.search(text):
            return self.encode(text)
        return self._encode(self._before + text)[1:]

    def _encode(self, text: str) -> list[int]:
        encodable = valid_text(text)  # a lone surrogate cannot be tokenised
        ids: list[int] = self.tokenizer.encode(encodable, add_special_tokens=False).ids
        return ids


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that matches any of `tokens`, or nothing if there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
