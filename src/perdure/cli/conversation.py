"""Conversations that are imported: messages as a tree, and how they become threads.

A thread gets a checkpoint at the end of each of its first turns and at fewer and fewer of the
later ones: each checkpoint lists all that was said before it, so the work grows with the messages
and not with their square. Where they fall depends on the tree alone, so an import that was cut off
and goes on makes the same ones.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from perdure.cli.threads import TITLED

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import Checkpoint

    from perdure.checkpointers import CheckpointInfo, SQLiteCheckpointer

NODE: Final = "imported"  # metadata by which a checkpoint is found again: the id of its message
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

    @property
    def at(self) -> float | None:
        """When it was said, in seconds since 1970."""
        return self.message.response_metadata.get("create_time")


@dataclass(slots=True)
class Conversation:
    """A conversation as a tree of messages: parents before children, the main branch last.

    Attributes:
        id: What its thread is called.
        nodes: Its messages.
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

    @property
    def at(self) -> float | None:
        """When it was last active, as far as is known."""
        known = [node.at for node in self.nodes if node.at is not None]
        return max(known, default=self.about.get("update_time", self.about.get("create_time")))

    def problem(self, reason: str, message: str | None = None) -> None:
        """Note what is not as expected."""
        self.problems.append(Problem(reason, self.id, message))

    def fill(
        self,
        parents: dict[str, str | None],
        said: Mapping[str, list[BaseMessage]],
        shown: str | None,
    ) -> None:
        """Put its messages in order.

        Args:
            parents: What each part of the tree follows; a part may say nothing.
            said: The messages of each part that says something, one after the other.
            shown: The part where the main branch ends.
        """
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
    """A conversation without its messages.

    Args:
        name: Its id; what is none is made up.
        found: Its JSON.
        names: What is called how there, by what it is called in `ABOUT`.
        made_of: What a made-up id is a hash of.
    """
    about: dict[str, Any] = {}
    for ours, theirs in names.items():
        value = found.get(theirs)
        if ours.endswith("_time"):
            value = seconds(value)
        elif not isinstance(value, str) or not value.strip():
            value = None
        if value is not None:
            about[ours] = whole(value) if isinstance(value, str) else value
    given = name if isinstance(name, str) and name else made_up_id("conversation", *made_of)
    return Conversation(whole(given), about=about)


def spoken(role: str, text: str, key: str, *, tool: bool = False, **known: Any) -> BaseMessage:
    """A message.

    Args:
        role: `"user"`, `"assistant"` or `"system"`.
        text: What it says.
        key: Its id.
        tool: Whether a program said it: no memory is made of it.
        known: Of its `response_metadata`, what is not None.
    """
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

    kinds: dict[str, type[BaseMessage]] = {
        "user": HumanMessage,
        "assistant": AIMessage,
        "system": SystemMessage,
    }
    said = {name: value for name, value in known.items() if value is not None}
    if tool:
        from perdure.memory.thread_messages import REMEMBER

        said[REMEMBER] = False
    return kinds[role](content=whole(text), id=key, response_metadata=said)


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
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and 0 <= value < 1e11 else None


def short(text: str, limit: int = 200) -> str:
    """Text on one line, cut if it is long."""
    flat = " ".join(text.split())
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
    conversation: Conversation,
    advance: Callable[[int], None] = lambda count: None,
) -> int:
    """Store what is new of a conversation; calls `advance` with how many messages are done.

    Returns:
        How many messages are new.
    """
    return _Storing(saver, thread_id, conversation, advance).run()


@dataclass(slots=True)
class _Known:
    """What is there already of a conversation.

    Attributes:
        at: The checkpoint that ends with a message, by message.
        inside: The checkpoint that a message came with, when others came after it in the same.
        said: Messages whose checkpoint is gone.
        current: The checkpoint from which the thread goes on.
        head: The one from which it should, if the import has no other.
        talked_on: Whether someone went on from what was imported.
        unfinished: Whether a former import ended before it had moved the head.
        pruned: Whether the beginning is gone.
    """

    at: dict[str, str] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    current: str | None = None
    head: str | None = None
    talked_on: bool = False
    unfinished: bool = False
    pruned: bool = False

    def lacks(self, node: Node) -> bool:
        """Whether a message is new, and what it follows is there to put it upon."""
        if node.id in self.at or node.id in self.inside or node.id in self.said:
            return False
        if node.parent is None:
            return not self.pruned
        return node.parent in self.at or node.parent in self.inside


@dataclass(slots=True)
class _Base:
    """A checkpoint to go on from, and its parent."""

    id: str
    parent: str | None
    step: int
    checkpoint: Checkpoint


class _Storing:
    """One conversation on its way into one thread."""

    def __init__(
        self,
        saver: SQLiteCheckpointer,
        thread_id: str,
        conversation: Conversation,
        advance: Callable[[int], None],
    ) -> None:
        self._saver, self._thread_id = saver, thread_id
        self._conversation, self._advance = conversation, advance
        self._known = _known(saver, thread_id, conversation)
        self._last: _Base | None = None  # put just now, so that it need not be read
        self._about = conversation.about | ({TITLED: True} if "title" in conversation.about else {})

    def run(self) -> int:
        ends = _ends(self._conversation)
        batch: list[Node] = []
        new = 0
        for done, node in enumerate(self._conversation.nodes):
            if batch and node.parent != batch[-1].id:
                self._put(batch[0].parent, batch)
                batch = []
            if batch or self._known.lacks(node):
                batch.append(node)
                new += 1
            if batch and node.id in ends:
                self._put(batch[0].parent, batch)
                batch = []
                self._advance(done)
        if batch:
            self._put(batch[0].parent, batch)
        self._move_head(bool(new))
        return new

    def _put(self, parent: str | None, batch: list[Node]) -> None:
        """Put a checkpoint that ends with a batch of messages, each of which follows the other."""
        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.base.id import uuid6

        known = self._known
        base = None if parent is None else self._base(known.at.get(parent) or known.inside[parent])
        checkpoint = base.checkpoint if base else empty_checkpoint()
        messages = checkpoint["channel_values"].get("messages", [])
        # a message in the midst of others that came with it: what came after it is left behind
        kept = len(messages) if parent in known.at else _place(messages, parent)
        cut = base is not None and kept < len(messages)
        step = base.step + (not cut) if base else 0
        above = None if base is None else base.parent if cut else base.id
        version = self._saver.get_next_version(checkpoint["channel_versions"].get("messages"), None)
        said = messages[:kept] + [node.message for node in batch]
        new: Checkpoint = {
            **checkpoint,
            "id": str(uuid6(clock_seq=step)),
            "ts": self._ts(said),
            "channel_values": {"messages": said},
            "channel_versions": {**checkpoint["channel_versions"], "messages": version},
        }
        ends_with = batch[-1].id if batch else str(parent)
        metadata: Any = {"source": "update", "step": step, "parents": {}}
        metadata |= {**self._about, NODE: ends_with}
        self._saver.put(_config(self._thread_id, above), new, metadata, {"messages": version})
        self._last = _Base(new["id"], above, step, new)
        known.at[ends_with] = new["id"]
        known.inside |= {node.id: new["id"] for node in batch[:-1]}

    def _ts(self, messages: list[BaseMessage]) -> str:
        """When the newest message was said; if nobody knows, when the conversation was held."""
        times = (seconds(each.response_metadata.get("create_time")) for each in reversed(messages))
        about = self._conversation.about
        held = about.get("update_time", about.get("create_time"))
        at = next((time for time in times if time is not None), held)
        moment = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
        return moment.isoformat()

    def _base(self, checkpoint_id: str) -> _Base:
        if self._last is not None and self._last.id == checkpoint_id:
            return self._last
        found = self._saver.get_tuple(_config(self._thread_id, checkpoint_id))
        assert found is not None
        above = (found.parent_config or {"configurable": {}})["configurable"].get("checkpoint_id")
        return _Base(checkpoint_id, above, found.metadata.get("step", 0), found.checkpoint)

    def _move_head(self, new: bool) -> None:
        """Let the thread go on from where the conversation was left, unless it went on since."""
        known, leaf = self._known, self._conversation.leaf
        head = known.head
        if leaf is not None and not known.talked_on and (new or known.unfinished):
            if leaf in known.inside and leaf not in known.at:
                self._put(leaf, [])
            head = known.at.get(leaf, head)
        last = self._last.id if self._last is not None else known.current
        if head is not None and head != last:
            self._saver.rewind(self._thread_id, head)


def _known(saver: SQLiteCheckpointer, thread_id: str, conversation: Conversation) -> _Known:
    from perdure.errors import UnknownThread

    try:
        found = saver.checkpoints(thread_id, checkpoint_ns="")
    except UnknownThread:
        return _Known()
    known = _Known(
        at={i.metadata[NODE]: i.checkpoint_id for i in reversed(found) if NODE in i.metadata},
        inside=_inside(found, conversation),
        pruned=all(info.parent_id is not None for info in found),
    )
    _note_head(known, found, conversation)
    ids = {info.checkpoint_id for info in found}
    if any(info.parent_id is not None and info.parent_id not in ids for info in found):
        for tip in ids - {info.parent_id for info in found}:
            said = saver.history(thread_id, checkpoint_id=tip)
            known.said |= {item.value.id for item in said}
    return known


def _inside(found: list[CheckpointInfo], conversation: Conversation) -> dict[str, str]:
    """The messages that share a checkpoint with a later one, which has its own."""
    names = {info.checkpoint_id: info.metadata.get(NODE) for info in found}
    parents = {node.id: node.parent for node in conversation.nodes}
    inside: dict[str, str] = {}
    for info in found:
        if info.parent_id is not None and names.get(info.parent_id) is None:
            continue  # what came with it cannot be told from what was there before
        before = names[info.parent_id] if info.parent_id is not None else None
        between = []
        key = parents.get(str(names[info.checkpoint_id]))
        while key is not None and key != before:
            between.append(key)
            key = parents.get(key)
        if key == before:
            inside |= dict.fromkeys(between, info.checkpoint_id)
    return inside


def _note_head(known: _Known, found: list[CheckpointInfo], conversation: Conversation) -> None:
    """Tell a head that an import left behind when it was killed from one that was chosen.

    Each put moves the head, and only when all is there does it go where it belongs. So a head that
    is the newest of all, has been imported and is of this conversation is where an import stopped.
    """
    head = next((info for info in found if info.is_head), None)
    if head is None:
        return
    talk = next((info for info in found if NODE not in info.metadata), None)
    midway = head is found[0] and NODE in head.metadata
    known.current = head.checkpoint_id
    known.talked_on = talk is not None
    ended = head.metadata.get(NODE)
    known.unfinished = (
        midway
        and talk is None
        and ended != conversation.leaf
        and any(node.id == ended for node in conversation.nodes)  # else the export is an older one
    )
    known.head = talk.checkpoint_id if midway and talk else head.checkpoint_id


def _ends(conversation: Conversation) -> set[str]:
    """The messages after which there is a checkpoint.

    It is where the tree forks or ends, and where a turn ends if there is enough since the last.
    """
    followers: dict[str | None, list[Node]] = {}
    for node in conversation.nodes:
        followers.setdefault(node.parent, []).append(node)
    depths: dict[str | None, tuple[int, int]] = {None: (0, 0)}  # of all, and since a checkpoint
    ends = set()
    for node in conversation.nodes:
        depth, since = (count + 1 for count in depths.get(node.parent, (0, 0)))
        then = followers.get(node.id, [])
        grown = since >= depth // _GROWTH and len(then) == 1 and then[0].message.type == "human"
        if len(then) != 1 or node.id == conversation.leaf or grown:
            ends.add(node.id)
            since = 0
        depths[node.id] = depth, since
    return ends


def _place(messages: list[Any], last: str | None) -> int:
    """How many messages there are up to one."""
    for place in range(len(messages), 0, -1):
        if messages[place - 1].id == last:
            return place
    return len(messages)


def _config(thread_id: str, checkpoint_id: str | None) -> RunnableConfig:
    at = {"checkpoint_id": checkpoint_id} if checkpoint_id else {}
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": "", **at}}
