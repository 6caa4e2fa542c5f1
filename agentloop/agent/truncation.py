"""Cuts long tool responses from the middle, by characters and by tokens. Pure."""

from __future__ import annotations

from agentloop.agent.chat_format import ChatFormat


def without_middle(content: str, limit: int | None) -> str:
    """Return `content`; if it has more than `limit` characters, its two ends and a note.

    The note is that of verl, which rStar2-Agent's release builds on; it is not counted.
    """
    if limit is None or len(content) <= limit:
        return content
    half = limit // 2
    return f"{content[:half]}...(truncated)...{content[-half:]}"


def truncate(chat: ChatFormat, content: str, limit: int) -> str | list[int]:
    """Return `content`; if it has more than `limit` tokens, the ids of its head, a note, its tail.

    The ids of the note are not counted against `limit`.
    """
    num_head = (limit + 1) // 2
    num_tail = limit - num_head
    longest = 32 * limit
    if len(content) > longest:
        # Encoding megabytes would block the event loop; no text averages 32 characters a token.
        head = chat.encode(content[: longest // 2])[:num_head]
        tail = chat.encode(content[-longest // 2 :])[-num_tail:]
        left_out = f"the middle of {len(content)} characters left out"
    else:
        ids = chat.encode(content)
        if len(ids) <= limit:
            return content
        head, tail = ids[:num_head], ids[-num_tail:]
        left_out = f"{len(ids) - limit} tokens left out"
    return head + chat.encode(f"\n[... {left_out} ...]\n") + tail
