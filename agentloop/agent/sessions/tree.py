"""The tree of a session's messages. Pure: it neither renders nor samples.

Each node is a message; a path from the root is a history. A message that the model has sampled
knows its place in a branch, from which its ids can be read.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import anyio

from agentloop.agent.sessions.history import (
    Reads,
    call_ids_of,
    given_keys_of,
    keys_of,
    question_in,
    reasoning_of,
)
from agentloop.plain_json import dumps
from agentloop.trajectory import Message, StopReason, Trajectory, Turn

Alike = Callable[[Message, Message], bool]
"""Returns whether the chat template writes a client's message like the one that was sampled."""

_MAX_COMPARED = 8  # sampled siblings that are compared by rendering them
_MAX_RECENT = 16  # histories that are recognised without comparing their messages


@dataclass(slots=True, eq=False)
class Branch:
    """A path of the tree as a trajectory, whose turns are extended at its tip.

    Attributes:
        record: the trajectory; its prompt holds all ids before the branch began.
        reason: the cause of a branch of its own; empty for the first one.
        parent: the id of the branch that it continues, if it does.
        question: the user's last message when it began.
        opening: key of what the conversation is for (`opening_key`).
        scope: where the request that extends it at the moment can be cancelled; only the request
            that has put it there may change the branch.
        pending_ids: the prompt of that request.
        num_kept: number of its turns before that request.
        last_kept: the last of these, which an environment may reward meanwhile; in its place, the
            record has a copy with the ids that the request has appended to it.
        end: how it ended before that request: the record's reason, answer and time.
        pending_question: the user's last message in that request.
        is_read: whether the client of that request reads the tokens as they come.
        num_left: number of requests whose turns were taken out of it, also as another branch of
            this name.
    """

    record: Trajectory
    reason: str = ""
    parent: str | None = None
    question: str = ""
    opening: str = ""
    scope: anyio.CancelScope | None = None
    pending_ids: Sequence[int] = ()
    num_kept: int = 0
    last_kept: Turn | None = None
    end: tuple[StopReason, str, float] | None = None
    pending_question: str = ""
    is_read: bool = False
    num_left: int = 0

    @property
    def is_busy(self) -> bool:
        """True if a request extends it at the moment."""
        return self.scope is not None

    @property
    def finished(self) -> Trajectory:
        """The trajectory without the turns of a request that is in flight."""
        if not self.is_busy:
            return self.record
        turns = self.record.turns[: self.num_kept]
        if self.last_kept is not None:
            turns[-1] = self.last_kept
        return replace(self.record, turns=turns)

    def begin(self, scope: anyio.CancelScope, *, is_read: bool = False, question: str = "") -> None:
        """Let a request extend the branch."""
        record = self.record
        self.scope, self.is_read, self.pending_question = scope, is_read, question
        self.num_kept = len(record.turns)
        self.end = record.stop_reason, record.answer, record.elapsed_s

    def append(self, turn: Turn, following: list[int]) -> None:
        """Add a turn of the request.

        Args:
            following: the ids between the branch before the request and its first turn.
        """
        turns = self.record.turns
        if turns and len(turns) == self.num_kept:
            self.last_kept = turns[-1]
            turns[-1] = replace(turns[-1], observation_ids=following)
        turns.append(turn)

    def commit(self) -> None:
        """Keep what the request has added; another one may follow."""
        if self.last_kept is not None:
            turns = self.record.turns
            self.last_kept.observation_ids = turns[self.num_kept - 1].observation_ids
            turns[self.num_kept - 1] = self.last_kept
        self.scope, self.last_kept, self.pending_ids = None, None, ()

    def take_back(self) -> None:
        """Remove what the newest request has added."""
        self.commit()
        record = self.record
        del record.turns[self.num_kept :]
        if record.turns:
            record.turns[-1].observation_ids = []
        if self.end is not None:
            record.stop_reason, record.answer, record.elapsed_s = self.end


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A message that the model has sampled.

    Attributes:
        num_turns: number of the branch's turns up to and including this message.
        message: the message as the client got it.
    """

    branch: Branch
    num_turns: int
    message: Message

    @property
    def is_tip(self) -> bool:
        """True if nothing follows it in its branch, so that the branch can be extended."""
        return len(self.branch.record.turns) == self.num_turns and not self.branch.is_busy

    @property
    def ids(self) -> list[int]:
        """All ids up to the end of the message."""
        record = self.branch.record
        ids = list(record.prompt_ids)
        for index, turn in enumerate(record.turns[: self.num_turns], 1):
            ids += turn.output_ids
            if index < self.num_turns:
                ids += turn.observation_ids
        return ids


@dataclass(slots=True, eq=False)
class Node:
    """A message of the tree, or its root."""

    key: bytes = b""
    turn: SampledTurn | None = None
    children: list[Node] = field(default_factory=list)

    def is_given(self, key: bytes) -> bool:
        """Return whether this is a message of the client with this key."""
        return self.turn is None and self.key == key

    def child(self, key: bytes, given_key: bytes, message: Message, alike: Alike) -> Node | None:
        """Return the child that is this message, the newest if several are.

        Args:
            key: the message's key as one that was sampled.
            given_key: the message's key as one that the client has written.
        """
        candidates = [
            child
            for child in reversed(self.children)
            if child.is_given(given_key) or (child.turn and not _is_edited(child.turn, message))
        ]
        if len(candidates) == len(self.children) == 1:  # nearly always
            (only,) = candidates
            if only.turn is None or only.key == key:
                return only
        if ids := call_ids_of(message):  # siblings may differ in nothing but the ids of their calls
            candidates.sort(
                key=lambda child: child.turn is None or call_ids_of(child.turn.message) != ids
            )
        for child in candidates:
            if child.turn is None or child.key == key:
                return child
        if message.get("role") != "assistant":
            return None
        for child in candidates[:_MAX_COMPARED]:
            if child.turn is not None and alike(child.turn.message, message):
                return child
        return None


@dataclass(frozen=True, slots=True)
class Match:
    """The known part of a history.

    Attributes:
        nodes: the nodes of its known messages; the first is the root.
        keys: the keys of all its messages, as a client has written them.
        num_sampled: number of messages up to and including the last one that was sampled, or 0.
        num_calls: number of calls in these.
        question: the text of the user's last message.
        digest: hash of the history's bytes and its context.
        last: hash of its last message.
        num_removed: number of messages that had been removed from the tree.
    """

    nodes: list[Node]
    keys: list[bytes]
    num_sampled: int = 0
    num_calls: int = 0
    question: str = ""
    digest: bytes = b""
    last: bytes = b""
    num_removed: int = 0

    @property
    def num_known(self) -> int:
        """Number of messages that are in the tree."""
        return len(self.nodes) - 1

    @property
    def turn(self) -> SampledTurn | None:
        """The last known message that was sampled."""
        return self.nodes[self.num_sampled].turn


class MessageTree:
    """All histories of a session."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._recent: OrderedDict[bytes, Match] = OrderedDict()  # histories, by context and digest
        self._num_removed = 0

    def __iter__(self) -> Iterator[Node]:
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending += node.children

    def match(
        self, context: bytes, messages: Sequence[Message], alike: Alike, reads: Reads
    ) -> Match:
        """Return the longest known path of a history.

        A history whose beginning is, to the byte, one that has been asked recently costs no more
        than what is new in it.

        Args:
            context: the key of the tools and of what else the prompt depends on.
            reads: returns whether the chat template reads a field of messages.
        """
        hashed = hashlib.blake2b(context, digest_size=32)
        before, hashed = self._recent_before(hashed, messages)
        if before is None:
            root = self._roots.get(context)
            before = Match([Node() if root is None else root], [])
        begin = len(before.keys)
        keys = keys_of(messages, reads, begin)
        given_keys = given_keys_of(messages, keys, begin)
        nodes, num_sampled = [*before.nodes], before.num_sampled
        for key, given_key, message in zip(keys, given_keys, messages[begin:], strict=True):
            if (node := nodes[-1].child(key, given_key, message, alike)) is None:
                break
            nodes.append(node)
            if node.turn is not None:
                num_sampled = len(nodes) - 1
        num_new = sum(
            len(message.get("tool_calls") or ())
            for message in messages[before.num_sampled : num_sampled]
        )
        return Match(
            nodes,
            [*before.keys, *given_keys],
            num_sampled,
            before.num_calls + num_new,
            question_in(messages[begin:]) or before.question,
            _extend_hash(hashed, messages[begin:]).digest(),
            _extend_hash(_no_hash(), messages[-1:]).digest(),
            self._num_removed,
        )

    def _recent_before(
        self, hashed: hashlib.blake2b, messages: Sequence[Message]
    ) -> tuple[Match | None, hashlib.blake2b]:
        """Return the longest recent history with which these messages begin, and its hash."""
        for recent in sorted(
            self._recent.values(), key=lambda recent: len(recent.keys), reverse=True
        ):
            length = len(recent.keys)
            last = messages[length - 1 : length]
            if last and _extend_hash(_no_hash(), last).digest() == recent.last:
                extended = _extend_hash(hashed, messages[:length])
                if extended.digest() == recent.digest:
                    return recent, extended
        return None, hashed

    def add(self, context: bytes, match: Match, turn: SampledTurn) -> None:
        """Add a history's unknown messages, and the turn that was sampled after them."""
        root = self._roots.setdefault(context, match.nodes[0])
        is_whole = match.num_removed == self._num_removed
        nodes = [root, *match.nodes[1:]] if is_whole else [root]
        for matched in match.nodes[len(nodes) :]:
            if matched not in nodes[-1].children:
                break
            nodes.append(matched)
        # A parallel request may have added the same messages meanwhile.
        for key in match.keys[len(nodes) - 1 :]:
            node = next((child for child in nodes[-1].children if child.is_given(key)), None)
            nodes.append(node or self._add_child(nodes[-1], Node(key)))
        self._add_child(nodes[-1], Node(keys_of([turn.message])[0], turn))
        if is_whole:
            self._recent[match.digest] = replace(match, nodes=nodes)
            self._recent.move_to_end(match.digest)
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)

    def _add_child(self, parent: Node, node: Node) -> Node:
        """Add a child."""
        if any(child.turn is not None for child in parent.children):
            # What a client sends again may now be this one: the newest that it can be.
            self._recent.clear()
        parent.children.append(node)
        return node

    def remove(self, branch: Branch, num_turns: int) -> None:
        """Remove a message that was sampled, and has nothing after it in its branch."""
        for node in self:
            for child in node.children:
                if child.turn and (child.turn.branch, child.turn.num_turns) == (branch, num_turns):
                    node.children.remove(child)
                    self._num_removed += 1
                    self._recent.clear()
                    return


def _is_edited(turn: SampledTurn, message: Message) -> bool:
    """Return whether a client has changed the reasoning of a message, rather than left it out."""
    reasoning = reasoning_of(message)
    return reasoning is not None and reasoning != (reasoning_of(turn.message) or "")


def _extend_hash(hashed: hashlib.blake2b, messages: Sequence[Message]) -> hashlib.blake2b:
    """Return a copy of a hash, of which further messages are a part."""
    copy = hashed.copy()
    if messages:
        try:
            data = dumps(list(messages))[1:-1] + b","  # objects, each with a comma after it
        except ValueError:  # too deep, or a number that is too long
            data = secrets.token_bytes()
        copy.update(data)
    return copy


def _no_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)


def copy_turn(turn: Turn) -> Turn:
    """Return a copy of a turn, which its stream, if it still runs, does not extend."""
    return replace(
        turn,
        output_ids=[*turn.output_ids],
        logprobs=[*turn.logprobs],
        top_logprobs=[*turn.top_logprobs],
        versions=turn.versions_until(len(turn.output_ids)),
        observation_ids=[*turn.observation_ids],
        kept=turn.kept and turn.kept.copy(),
    )
