"""Responses that a later request may continue by their ids (`previous_response_id`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from agentloop.agent.openai_messages import num_chars
from agentloop.errors import RequestError
from agentloop.plain_json import JsonObject
from agentloop.trajectory import Message

_MAX_RESPONSES = 4096
_MAX_CHARS = 64 << 20  # each conversation is counted whole, although they share messages


class ResponseStore:
    """The conversations of the newest responses, by their ids, bounded in number and size."""

    def __init__(self) -> None:
        self._conversations: OrderedDict[str, Sequence[Message]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._items: dict[str, dict[str, object]] = {}
        self._item_ids: dict[str, list[str]] = {}  # by response
        self._num_chars = 0

    def add(
        self, id: str, conversation: Sequence[Message], output: Sequence[JsonObject] = ()
    ) -> None:
        """Remember the conversation that a response ends, and the items of the response."""
        self._conversations[id] = conversation
        items = {str(item["id"]): item for item in output}
        self._items |= items
        self._item_ids[id] = [*items]
        self._sizes[id] = num_chars((conversation, output))
        self._num_chars += self._sizes[id]
        while len(self._sizes) > _MAX_RESPONSES or (
            self._num_chars > _MAX_CHARS and len(self._sizes) > 1
        ):
            oldest, _ = self._conversations.popitem(last=False)
            self._num_chars -= self._sizes.pop(oldest)
            for item in self._item_ids.pop(oldest):
                self._items.pop(item, None)

    def item(self, id: object) -> JsonObject | None:
        """Return an item of a response by its id, or None if it is not remembered."""
        return self._items.get(id) if isinstance(id, str) else None

    def __getitem__(self, id: str) -> Sequence[Message]:
        """Return the conversation that a response ended.

        Raises:
            RequestError: It is not remembered.
        """
        if id not in self._conversations:
            raise RequestError(
                f"previous_response_id: {id!r} is not known here: it was not stored, or is one of "
                "another session, or too old; send the whole conversation as input"
            )
        return self._conversations[id]
