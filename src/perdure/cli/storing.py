"""Putting conversations into threads: which messages are new, and upon which checkpoint they go.

A thread gets a checkpoint at each of its first messages and at fewer and fewer of the later ones,
so that the work grows with the messages and not with their square: each checkpoint lists all that
was said before it. Where they fall depends on the tree alone, so an import that was cut off and
goes on makes the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6

from perdure.errors import UnknownThread

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from perdure.checkpointers import CheckpointInfo, SQLiteCheckpointer
    from perdure.cli.transcripts import Conversation, Node

NODE: Final = "imported"  # metadata by which a checkpoint is found again: the id of its message
TITLED: Final = "titled"  # metadata by which a checkpoint with a title is found
_GROWTH: Final = 32  # a checkpoint for each 32nd part of what there is


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


def store(
    saver: SQLiteCheckpointer,
    thread_id: str,
    conversation: Conversation,
    advance: Callable[[int], None] = lambda count: None,
) -> int:
    """Store what is new of a conversation.

    Args:
        saver: Where to.
        thread_id: The thread.
        conversation: The conversation, with all that may be stored already.
        advance: Called with how many of its messages have been dealt with, now and then.

    Returns:
        How many messages are new.
    """
    return _Storing(saver, thread_id, conversation, advance).run()


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
        self._saver = saver
        self._thread_id = thread_id
        self._conversation = conversation
        self._advance = advance
        self._known = _known(saver, thread_id, conversation)
        self._last: _Base | None = None  # put just now, so that it need not be read
        self._about = {**conversation.about, NODE: ""}
        if "title" in conversation.about:
            self._about[TITLED] = True

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
        new: Checkpoint = {
            **checkpoint,
            "id": str(uuid6(clock_seq=step)),
            "ts": datetime.now(UTC).isoformat(),
            "channel_values": {"messages": messages[:kept] + [node.message for node in batch]},
            "channel_versions": {**checkpoint["channel_versions"], "messages": version},
        }
        ends_with = batch[-1].id if batch else str(parent)
        metadata: Any = {"source": "update", "step": step, "parents": {}}
        metadata |= {**self._about, NODE: ends_with}
        config = _config(self._thread_id, above)
        self._saver.put(config, new, metadata, {"messages": version})
        self._last = _Base(new["id"], above, step, new)
        known.at[ends_with] = new["id"]
        known.inside |= {node.id: new["id"] for node in batch[:-1]}

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
        if head is not None and (new or head != known.current):
            self._saver.rewind(self._thread_id, head)


def _known(saver: SQLiteCheckpointer, thread_id: str, conversation: Conversation) -> _Known:
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
    """The messages after which there is a checkpoint: where it forks, ends, or has grown enough."""
    followers = Counter(node.parent for node in conversation.nodes)
    depths: dict[str | None, int] = {None: 0}
    for node in conversation.nodes:
        depths[node.id] = depths.get(node.parent, 0) + 1
    deepest, depth = max(depths.values()), 0
    grown = set()
    while depth < deepest:
        depth += max(1, depth // _GROWTH)
        grown.add(depth)
    return {
        node.id
        for node in conversation.nodes
        if followers[node.id] != 1 or depths[node.id] in grown or node.id == conversation.leaf
    }


def _place(messages: list[Any], last: str | None) -> int:
    """How many messages there are up to one."""
    for place in range(len(messages), 0, -1):
        if messages[place - 1].id == last:
            return place
    return len(messages)


def _config(thread_id: str, checkpoint_id: str | None) -> RunnableConfig:
    at = {"checkpoint_id": checkpoint_id} if checkpoint_id else {}
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": "", **at}}
