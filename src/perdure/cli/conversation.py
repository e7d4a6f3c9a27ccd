"""Conversations that are imported: messages as a tree, and how they become threads.

A thread gets a checkpoint at the end of each of its first turns and at fewer and fewer of the
later ones: each checkpoint lists all that was said before it, so the work grows with the messages
and not with their square. Where they fall depends on the tree alone, so an import that was cut off
and goes on makes the same ones.
"""

from __future__ import annotations

import json
import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from perdure.cli.threads import TITLED
from perdure.errors import UnknownThread

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage
    from langgraph.checkpoint.base import Checkpoint, CheckpointTuple

    from perdure.checkpointers import SQLiteCheckpointer

NODE: Final = "imported"  # metadata by which a checkpoint is found again: the id of its message
_LONGEST_ID: Final = 500  # bytes; no export has longer ones, and a key of a memory has room for it
_GROWTH: Final = 32  # a checkpoint for each 32nd part of what there is


class Odd(ValueError):
    """A part of a file that is not as expected: it is left out, counted and named."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What was not as expected: where, and why."""

    reason: str
    conversation: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One message, and the one that it followed."""

    id: str
    parent: str | None
    message: BaseMessage


@dataclass(slots=True)
class Conversation:
    """A conversation as a tree of messages.

    Attributes:
        id: What its thread is called.
        nodes: Its messages, parents before children, the main branch last.
        leaf: The message where the main branch ends.
        about: What is known of it, see `ABOUT`; times in seconds since 1970 (UTC).
        left_out: How many messages of each kind that tells a reader nothing were left out.
        problems: What was not as expected.
    """

    id: str
    nodes: list[Node] = field(default_factory=list)
    leaf: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    def at(self, messages: list[BaseMessage]) -> float:
        """When the newest of its messages was said that has a time, else it; infinity: unknown."""
        for message in reversed(messages):
            at = seconds(message.response_metadata.get("create_time"))
            if at is not None:
                return at
        return float(self.about.get("update_time", self.about.get("create_time", math.inf)))

    def problem(self, reason: str, message: str | None = None) -> None:
        """Note what is not as expected."""
        self.problems.append(Problem(reason, self.id, message))

    def fill(
        self,
        parents: dict[str, str | None],
        said: Mapping[str, list[BaseMessage]],
        shown: str | None,
    ) -> None:
        """Put its messages in order: what each part of the tree follows and says, and its end."""
        for key, parent in parents.items():
            if parent is not None and parent not in parents:
                parents[key] = None
                if key in said:
                    self.problem("parent missing, read as a beginning", key)
        main = self._climb(parents, shown, {})
        order: dict[str, None] = {}
        for key in parents:
            if key not in main:
                order.update(self._climb(parents, key, order))
        order.update(main)
        last: dict[str, str | None] = {}  # message of each part, or of what it follows
        for key in order:
            above = last.get(parents[key] or "")
            for message in said.get(key, ()):
                self.nodes.append(Node(str(message.id), above, message))
                above = str(message.id)
            last[key] = above
        self.leaf = last.get(shown or "")

    def _climb(
        self, parents: dict[str, str | None], key: str | None, known: Mapping[str, None]
    ) -> dict[str, None]:
        """A part of a tree and its ancestors up to a known one, the oldest first."""
        path: dict[str, None] = {}
        while key is not None and key not in known:
            path[key] = None
            above = parents[key]
            if above in path:
                self.problem("its own ancestor, read as a beginning", key)
                parents[key] = above = None
            key = above
        return dict.fromkeys(reversed(path))


def described(
    name: object, found: Mapping[str, Any], names: Mapping[str, str], *made_of: object
) -> Conversation:
    """A conversation without its messages, of its JSON.

    `names` tells what is called how there, by what it is called in `ABOUT`. An id that is none is
    made up, of a hash.
    """
    about: dict[str, Any] = {}
    for ours, theirs in names.items():
        value = found.get(theirs)
        time = ours.endswith("_time")
        known = (
            seconds(value) if time else whole(text_of(value)) if text_of(value).strip() else None
        )
        if known is not None:
            about[ours] = known
    given = text_of(name) or made_up_id("conversation", *made_of)
    if len(given.encode("utf-8", "replace")) > _LONGEST_ID:
        given = made_up_id("conversation", given)
    return Conversation(whole(given), about=about)


def spoken(role: str, text: str, key: str, *, tool: bool = False, **known: Any) -> BaseMessage:
    """A message of the user, assistant or system, with its id and what is known of it.

    What a program said (`tool`) becomes no memory.
    """
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    from perdure.memory.thread_messages import REMEMBER

    kinds: dict[str, type[BaseMessage]] = {"user": HumanMessage, "assistant": AIMessage}
    said = {name: value for name, value in known.items() if value not in (None, "")}
    said |= {REMEMBER: False} if tool else {}
    return kinds.get(role, SystemMessage)(
        content=whole(text), id=whole(key), response_metadata=said
    )


# -- values of JSON that may be anything


def text_of(value: Any) -> str:
    """The value if it is text, else none."""
    return value if isinstance(value, str) else ""


def dict_of(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def whole(text: str) -> str:
    """Text without halves of characters, which no file can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def seconds(value: Any) -> float | None:
    """A moment given in seconds since 1970 or in ISO 8601; None: it is neither."""
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            return None
        value = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and 0 <= value < 1e11 else None


def short(text: Any, limit: int = 200) -> str:
    """Text on one line, cut if it is long."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def fenced(code: str, language: str = "") -> str:
    """Code with its lines, as Markdown."""
    mark = "```"
    while mark in code:
        mark += "`"
    return f"{mark}{language}\n{code.strip(chr(10))}\n{mark}"


def made_up_id(*parts: object) -> str:
    """An id for what has none: the same for the same parts."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "perdure:" + json.dumps(parts, default=str)))


# -- storing


def store(
    saver: SQLiteCheckpointer,
    thread_id: str,
    talk: Conversation,
    advance: Callable[[int], None] = lambda count: None,
) -> int:
    """Store what is new of a conversation; returns how many messages are new.

    `advance` is called with how many are done.
    """
    return _Storing(saver, thread_id, talk).run(advance)


class _Storing:
    """One conversation on its way into one thread.

    `_held` has the checkpoint that ends with a message, else the oldest one that holds it; None if
    what came before that one was removed, so that no branch can begin within it.
    """

    def __init__(self, saver: SQLiteCheckpointer, thread_id: str, talk: Conversation) -> None:
        self._saver, self._talk = saver, talk
        self._thread = {"thread_id": thread_id, "checkpoint_ns": ""}
        try:
            self._found = saver.checkpoints(thread_id, checkpoint_ns="")
        except UnknownThread:
            self._found = []
        self._nodes = {node.id: node for node in talk.nodes}
        self._held: dict[str, str | None] = {}
        ids = {None, *(info.checkpoint_id for info in self._found)}
        for info in reversed(self._found):
            if NODE in info.metadata:
                cut = info.checkpoint_id if info.parent_id in ids else None
                self._hold(info.metadata[NODE], info.checkpoint_id, cut)
        self._last: CheckpointTuple | None = None  # put just now, so that it need not be read

    def run(self, advance: Callable[[int], None]) -> int:
        begins = not self._found or any(info.parent_id is None for info in self._found)
        ends = _ends(self._talk)
        new = 0
        for done, node in enumerate(self._talk.nodes):
            batch, above = self._missing(node) if node.id in ends else ([], None)
            if batch and (begins if above is None else self._held[above]):
                self._put(above, batch)
                new += len(batch)
                advance(done)
        self._move_head(bool(new))
        return new

    def _missing(self, node: Node) -> tuple[list[BaseMessage], str | None]:
        """The messages up to a node that are not there yet, and the one that they follow."""
        batch: list[BaseMessage] = []
        at: str | None = node.id
        while at is not None and at not in self._held:
            batch.append(self._nodes[at].message)
            at = self._nodes[at].parent
        return batch[::-1], at

    def _hold(self, end: str, checkpoint_id: str, cut: str | None) -> None:
        self._held[end] = checkpoint_id
        at = self._nodes.get(end)
        while at is not None and at.parent is not None and at.parent not in self._held:
            self._held[at.parent] = cut
            at = self._nodes[at.parent]

    def _put(self, parent: str | None, batch: list[BaseMessage]) -> None:
        """Put a checkpoint that ends with a batch, or without one with what is there already."""
        from langgraph.checkpoint.base import CheckpointTuple, empty_checkpoint
        from langgraph.checkpoint.base.id import uuid6

        base = None if parent is None else self._read(str(self._held[parent]))
        checkpoint = base.checkpoint if base else empty_checkpoint()
        messages = checkpoint["channel_values"].get("messages", [])
        places = (n for n in range(len(messages), 0, -1) if messages[n - 1].id == parent)
        kept = next(places, len(messages))
        cut = kept < len(messages)  # what came together with later ones, which stay behind
        if not batch and not cut:
            return
        above = None if base is None else base.parent_config if cut else base.config
        above = above or {"configurable": self._thread}
        step = base.metadata.get("step", 0) + (not cut) if base else 0
        version = self._saver.get_next_version(checkpoint["channel_versions"].get("messages"), None)
        said = messages[:kept] + batch
        at = self._talk.at(said)
        moment = datetime.now(UTC) if at == math.inf else datetime.fromtimestamp(at, UTC)
        new: Checkpoint = {
            **checkpoint,
            "id": str(uuid6(clock_seq=step)),
            "ts": moment.isoformat(),
            "channel_values": {"messages": said},
            "channel_versions": {**checkpoint["channel_versions"], "messages": version},
        }
        end = str(said[-1].id)
        metadata: Any = {"source": "update", "step": step, "parents": {}, **self._talk.about}
        metadata |= {NODE: end, **({TITLED: True} if "title" in self._talk.about else {})}
        config = self._saver.put(above, new, metadata, {"messages": version})
        self._last = CheckpointTuple(config, new, metadata, above)
        self._hold(end, new["id"], new["id"])

    def _read(self, checkpoint_id: str) -> CheckpointTuple:
        if self._last is not None and self._last.checkpoint["id"] == checkpoint_id:
            return self._last
        at = {**self._thread, "checkpoint_id": checkpoint_id}
        found = self._saver.get_tuple({"configurable": at})
        assert found is not None
        return found

    def _move_head(self, new: bool) -> None:
        """Let the thread go on from where the conversation was left, unless it went on since.

        Each put moves the head, and only when all is there does it go where it belongs. So a head
        that is the newest of all, was imported and is of this conversation (else the export is an
        older one) may be where an import was killed.
        """
        leaf, head = self._talk.leaf, next((info for info in self._found if info.is_head), None)
        went_on = next((info for info in self._found if NODE not in info.metadata), None)
        ended = head.metadata.get(NODE) if head is not None and head is self._found[0] else None
        goal = went_on if went_on is not None and ended is not None else head
        at = goal.checkpoint_id if goal is not None else None
        news = new or (ended in self._nodes and ended != leaf)
        if went_on is None and news and leaf is not None and self._held.get(leaf):
            self._put(leaf, [])
            at = self._held[leaf]
        stands = self._last.checkpoint["id"] if self._last else head and head.checkpoint_id
        if at is not None and at != stands:
            self._saver.rewind(self._thread["thread_id"], at)


def _ends(talk: Conversation) -> set[str]:
    """The messages after which there is a checkpoint.

    It is where the tree forks or ends, and where a turn ends if there is enough since the last.
    """
    followers: dict[str | None, list[str]] = defaultdict(list)
    for node in talk.nodes:
        followers[node.parent].append(node.message.type)
    depths: dict[str | None, tuple[int, int]] = {None: (0, 0)}  # of all, and since a checkpoint
    ends = set()
    for node in talk.nodes:
        depth, since = (count + 1 for count in depths[node.parent])
        then = followers[node.id]
        grown = since >= depth // _GROWTH and then == ["human"]
        if grown or len(then) != 1 or node.id == talk.leaf:
            ends.add(node.id)
            since = 0
        depths[node.id] = depth, since
    return ends
