"""Store imported conversations as threads, and extract memories from them.

While a thread is short, a checkpoint is stored after every turn. As the thread grows, checkpoints
become less frequent, because storing them takes a large part of the import's time. If a checkpoint
were stored after every turn, importing a thread with 4,800 messages would take eight times as long.
The choice of messages that get a checkpoint depends only on the message tree. When an interrupted
import is repeated, it therefore chooses the same messages as before and stores only the missing
checkpoints.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.codec import Codec
from perdure.checkpointers.import_langgraph import open_import_source
from perdure.checkpointers.put import TIMES_KEY, TITLE_CANDIDATES
from perdure.checkpointers.reports import ImportReport
from perdure.checkpointers.titles import TITLED
from perdure.checkpointers.values import Continuation
from perdure.cli.app import CommandDatabase
from perdure.cli.conversation import Conversation, Problem, SavedText, get_creation_time
from perdure.cli.import_names import NODE, ThreadNames
from perdure.cli.import_report import ConversationsReport
from perdure.cli.output import progress_bar, show_status
from perdure.cli.sources import Source
from perdure.effects import run_operation
from perdure.errors import (
    ConfigurationError,
    ImportFailed,
    InvalidConfig,
    InvalidMessages,
    InvalidNamespace,
    NotADatabase,
    SerializationError,
    UnknownThread,
)
from perdure.memory.extraction import read_label_values
from perdure.memory.recorded_templates import record_templates
from perdure.memory.records import StoreAdapter
from perdure.memory.run_config import Template
from perdure.memory.thread_messages import SEARCHED
from perdure.stores.base import Provenance

if TYPE_CHECKING:
    from perdure.cli.import_archive import ArchiveLines
    from perdure.memory.collection import Collection

# Parent namespace of all project documents. Each project has its own child namespace.
_PROJECT_NAMESPACE: Final = Template(("projects", "{user_id}"))
# Limits how often an import stores checkpoints. With the value 32, a checkpoint is stored after a
# turn only if at least 1/32 of all messages so far were added since the last checkpoint.
_CHECKPOINTS_PER_LENGTH: Final = 32


class ImportWriter:
    """Stores conversations as threads, extracts memories, and counts the threads and memories.

    Args:
        database: The database into which the conversations are imported.
        report: Receives the counts.
        with_memories: Whether memories are extracted.
        later: Whether a worker extracts the memories later.
    """

    def __init__(
        self,
        database: CommandDatabase,
        report: ConversationsReport,
        *,
        with_memories: bool,
        later: bool,
    ) -> None:
        self._database, self._report, self._with_memories = database, report, with_memories
        self._later = with_memories and later
        report.user = database.user
        self._codec = Codec(database.saver.serde, database.saver.types)
        self._extraction = (
            database.build_memory_extraction() if with_memories and not later else None
        )
        report.memories = None if self._extraction is None else 0

    def store_conversations_as_threads(
        self, thread_id_prefix: str, conversations: list[Conversation]
    ) -> None:
        """Store each conversation as a thread whose id begins with the given prefix."""
        total, stored_count = sum(len(conversation.nodes) for conversation in conversations), 0
        names = ThreadNames(self._database.saver, thread_id_prefix, self._database.user)
        with progress_bar("importing", "message") as update_bar:
            for conversation in conversations:

                def update_progress(count: int, earlier_count: int = stored_count) -> None:
                    update_bar((earlier_count + count) / total, earlier_count + count)

                self._report.skipped += conversation.problems
                if conversation.nodes:
                    conversation = names.assign_thread_id(conversation)
                    self._store_conversation(
                        thread_id_prefix + conversation.id, conversation, update_progress
                    )
                    stored_count += len(conversation.nodes)
                    update_progress(0, stored_count)
                else:
                    self._report.left_out += conversation.left_out
                    self._report.unread += conversation.source_count > 0
                    self._report.empty += not conversation.source_count

    def import_store_items_of_archives(self, archives: Iterable[ArchiveLines]) -> None:
        """Import the store items in archives, including all versions of the items.

        Each archive is the output of `perdure export --user`, which exports the data of one person.
        """
        for archive in archives:
            self._report.add_store_item_counts(
                self._database.store.import_lines(archive.iter_item_lines())
            )

    def store_memories_and_project_documents(self, texts: list[SavedText]) -> None:
        """Store the memories and documents of an export that do not belong to any conversation.

        Imported memories are stored as facts about the user, unless the import is configured to
        store no memories. A document is stored as an item in the namespace `("projects", USER,
        PROJECT)`.
        """
        from perdure.memory.collection import Collection

        user = self._database.user
        if any(saved.project is not None for saved in texts):
            run_operation(record_templates(self._database.store, [_PROJECT_NAMESPACE]))
        collection = Collection(self._database.store, ("memories", "{user_id}"))
        for saved in texts:
            if saved.project is not None:
                place = ("projects", user, saved.project)
                value = {**saved.metadata, "text": saved.text}
                stored_item = self._database.store.get(place, saved.key, refresh_ttl=False)
                is_known = stored_item is not None and stored_item.value == value
                if not is_known:
                    self._database.store.put(place, saved.key, value)
                self._report.items += not is_known
                self._report.known_items += is_known
            elif self._report.memories is None:
                self._report.left_out["memory of the export"] += 1
            else:
                self._store_imported_text_as_memory(collection, saved)

    def _store_imported_text_as_memory(self, collection: Collection, saved_text: SavedText) -> None:
        """Store a text as a memory unless a tombstone exists for it, and count the outcome."""
        from perdure.memory.gate import is_forgotten

        adapter, namespace = StoreAdapter(self._database.store), collection.namespace
        if run_operation(
            is_forgotten(adapter, namespace.fill(self._database.config), saved_text.text)
        ):
            self._report.forgotten += 1
            self._report.known_items += 1
            return
        provenance = Provenance(actor="import", trust="assistant")
        outcome = collection.insert(
            saved_text.text, key=saved_text.key, provenance=provenance, config=self._database.config
        )
        is_new = outcome.change == "added"
        self._report.memories = (self._report.memories or 0) + is_new
        self._report.by_user += Counter({self._database.user: int(is_new)})
        self._report.quarantined += outcome.change == "quarantined"
        self._report.known_items += not is_new

    def _store_conversation(
        self, thread_id: str, conversation: Conversation, advance: Callable[[int], None]
    ) -> None:
        """Store a conversation as a thread, extract memories from it, and count it.

        If a message cannot be encoded, skip the conversation and report a problem.
        """
        # The metadata of an archived thread already contains the thread's user, which must not be
        # overwritten. For any other thread, store the user "" if no memories are to be extracted,
        # so that background workers extract none either.
        if not conversation.is_archived:
            user = conversation.metadata.get("user_id", self._database.user)
            conversation.metadata["user_id"] = user if self._with_memories else ""
        try:
            # Encode all messages before writing, so that an encoding error cannot leave the thread
            # partly stored.
            for node in conversation.nodes.values():
                self._codec.encode(node.message, lambda: "a message")
            thread_import = ThreadImport(self._database.saver, thread_id, conversation)
            new = thread_import.store_new_messages(advance)
        except SerializationError as exc:  # A field of a message cannot be stored.
            self._report.skipped.append(Problem(f"cannot be stored: {exc}", conversation.id))
            return
        # Extract no memories from an archived thread, because the archive already contains its
        # memories.
        if conversation.is_archived:
            if user := conversation.metadata.get("user_id") or conversation.metadata.get("owner"):
                self._report.users[user] += 1
        else:
            self._extract_memories_of_thread(thread_id)
        self._report.conversations += 1
        self._report.messages += new
        self._report.updated += thread_import.updated
        self._report.outdated += thread_import.outdated
        self._report.unchanged += not (new or thread_import.updated)
        self._report.left_out += conversation.left_out

    def import_database(self, source: Source, new_thread_ids_by_old: dict[str, str]) -> None:
        """Import threads and items from a LangGraph or perdure database.

        Args:
            source: The imported database. A database of perdure is merged with the open database.
            new_thread_ids_by_old: New thread ids by old thread id, for a database of perdure.

        Raises:
            NotADatabase: The database has neither the tables of a saver nor those of a store.
            ConfigurationError: New thread ids are given for a database that langgraph wrote.
            ImportFailed: Some threads of a perdure database were refused.
        """
        if source.is_perdure_database:
            self._import_threads_and_items(source, new_thread_ids_by_old)
            return
        db = source.path
        if new_thread_ids_by_old:
            raise ConfigurationError(
                f"--as can only be used with perdure databases, but {db!r} was written by "
                "langgraph; remove --as"
            )
        saver, limit = self._database.saver, source.max_value_bytes
        with closing(open_import_source(db, Codec(saver.serde, saver.types), limit)) as tables:
            thread_report, threads, missing_tables = (
                ImportReport(),
                list[str](),
                list[NotADatabase](),
            )
            with show_status(f"importing {tables.path}"):
                try:
                    thread_report = saver.import_from(db, max_value_bytes=limit)
                    threads = [*tables.iter_thread_ids()]
                # A database without thread tables may still contain store tables.
                except NotADatabase as exc:
                    missing_tables.append(exc)
                try:
                    items = self._database.store.import_from(db, max_value_bytes=limit)
                    self._report.add_store_item_counts(items)
                # A database without store tables may still contain thread tables.
                except NotADatabase as exc:
                    missing_tables.append(exc)
                if len(missing_tables) == 2:
                    raise NotADatabase("; ".join(map(str, missing_tables)))
        self._report.add_thread_counts(thread_report)
        with progress_bar("making memories", "thread") as update_bar:
            for number, thread_id in enumerate(threads, 1):
                self._extract_memories_of_thread(thread_id)
                update_bar(number / thread_report.threads, number)

    def _import_threads_and_items(
        self, source: Source, new_thread_ids_by_old: dict[str, str]
    ) -> None:
        """Import the threads and the store items of a perdure database.

        Raises:
            ImportFailed: Some threads were refused. The store items have been imported.
        """
        refusal = None
        with show_status(f"importing {source.path}"):
            if source.saver is not None:
                try:
                    self._report.add_thread_counts(
                        self._database.saver.import_from(source.saver, names=new_thread_ids_by_old)
                    )
                except ImportFailed as exc:
                    # If some threads were refused, raise the error only after the store items have
                    # been imported.
                    refusal = exc
            if source.store is not None:
                items = self._database.store.import_from(source.store, on_unsuitable="skip")
                self._report.add_store_item_counts(items)
        if refusal is not None:
            raise refusal

    def _extract_memories_of_thread(self, thread_id: str) -> None:
        """Extract memories from the thread's unread messages.

        The memories belong to the user given by `user_id` in the metadata of the thread's head, or
        to the configured user if the metadata contains no `user_id`.
        """
        if not self._with_memories:
            return
        head = self._database.saver.head(thread_id)
        named_user = (
            read_label_values(head.metadata, ["user_id"]).get("user_id")
            if head is not None
            else None
        )
        user = named_user or ("" if self._later else self._database.user)
        self._report.users[user] += 1
        if self._extraction is None:
            return
        try:
            config: RunnableConfig = {"configurable": {"user_id": user}}
            report = self._extraction.extract(thread_id, config)
        except (InvalidConfig, InvalidMessages, InvalidNamespace) as exc:
            # A thread written by another program may lack the channel `messages`, or its user or id
            # may not be a valid namespace label.
            self._report.skipped.append(Problem(f"no memories: {exc}", thread_id))
            return
        self._report.memories = (self._report.memories or 0) + report.added
        self._report.by_user += Counter({user: report.added})
        self._report.quarantined += report.quarantined
        self._report.forgotten += report.forgotten


class _NewCheckpoint(NamedTuple):
    """A checkpoint stored by this import.

    The checkpoint is cached, so that it need not be read from the database again.

    Attributes:
        end: The id of the last message of the checkpoint.
        length: The number of messages in the checkpoint.
        stored: The checkpoint without its messages.
    """

    end: str
    length: int
    stored: CheckpointTuple


class ThreadImport:
    """Stores one conversation in one thread.

    `_checkpoint_of_message` maps the id of each stored message to the id of the checkpoint that
    ends with the message. If there is no such checkpoint, the message is mapped to the oldest
    checkpoint that contains it. If the parent of that oldest checkpoint was removed, the message is
    mapped to None, because no branch can start at the message.

    Attributes:
        updated: The number of messages that this import completed.
        outdated: The number of incomplete messages that could not be completed, because the thread
            has changed since the earlier import.
    """

    def __init__(self, saver: Checkpointer, thread_id: str, conversation: Conversation) -> None:
        self._saver, self._conversation = saver, conversation
        self._thread = {"thread_id": thread_id, "checkpoint_ns": ""}
        try:
            self._checkpoints = saver.checkpoints(thread_id, checkpoint_ns="")
        except UnknownThread:
            self._checkpoints = []
        self._checkpoint_of_message: dict[str, str | None] = {}
        ids = {None, *(info.checkpoint_id for info in self._checkpoints)}
        for info in reversed(self._checkpoints):
            if NODE in info.metadata:
                ancestors_checkpoint_id = info.checkpoint_id if info.parent_id in ids else None
                self._record_checkpoint_of_message_and_ancestors(
                    info.metadata[NODE], info.checkpoint_id, ancestors_checkpoint_id
                )
        self._new_checkpoints: dict[str, _NewCheckpoint] = {}
        self.updated = self.outdated = 0
        self._stored_texts: dict[str, set[tuple[str, bool]]] | None = None
        # The id of the most recently stored checkpoint.
        self._last_stored_id: str | None = None

    def store_new_messages(self, advance: Callable[[int], None] = lambda count: None) -> int:
        """Store the messages that the thread does not contain yet.

        Args:
            advance: Called with the number of messages that have been processed.

        Returns:
            The number of new messages.
        """
        # A new first message can be stored only if the thread is empty or still contains its first
        # checkpoint.
        can_start_at_root = not self._checkpoints or any(
            info.parent_id is None for info in self._checkpoints
        )
        checkpoint_ends, new = _choose_message_ids_to_checkpoint_after(self._conversation), 0
        for position, key in enumerate(self._conversation.nodes):
            if key not in checkpoint_ends:
                continue
            keys, parent = self._find_unstored_message_ids_and_parent_id(key)
            new_keys = [
                name
                for name in keys
                if not self._load_previously_stored_texts_with_is_document(name)
            ]
            if new_keys and (
                can_start_at_root if parent is None else self._checkpoint_of_message[parent]
            ):
                self._put_checkpoint(parent, keys)
                new += len(new_keys)
                advance(position)
        self._move_head_to_end_of_main_branch(bool(new))
        if self._checkpoints:
            self._replace_partly_imported_messages()
        return new

    def _replace_partly_imported_messages(self) -> None:
        """Complete the messages that an earlier version of perdure skipped or stored partially.

        The messages are completed in a new checkpoint after the head, so no branch is created. A
        partially stored message is completed only if the thread's state still contains it, and a
        skipped message is added only if the state still contains its parent.
        """
        incomplete_texts = {
            key: text
            for key, text in self._conversation.former_texts.items()
            if key in self._checkpoint_of_message
            and _get_text_and_is_document(self._conversation.nodes[key].message)
            not in self._load_previously_stored_texts_with_is_document(key)
        }
        head = self._saver.get_tuple({"configurable": self._thread}) if incomplete_texts else None
        if head is None:
            return
        messages = list(head.checkpoint["channel_values"].get("messages", []))
        for key, text in incomplete_texts.items():
            node = self._conversation.nodes[key]
            ids = [getattr(message, "id", None) for message in messages]
            if text and key in ids and messages[ids.index(key)].text == text:
                messages[ids.index(key)] = node.message
                self.updated += 1
            elif (
                not text
                and node.parent in ids
                and not self._load_previously_stored_texts_with_is_document(key)
            ):
                messages.insert(ids.index(node.parent) + 1, node.message)
                self.updated += 1
            else:
                self.outdated += 1
        if self.updated:
            self._put_child_checkpoint_with_messages(head, messages)

    def _put_child_checkpoint_with_messages(
        self, head: CheckpointTuple, messages: list[BaseMessage]
    ) -> None:
        """Store a checkpoint with the given messages as a child of the head."""
        step = head.metadata.get("step", 0) + 1
        version = self._saver.get_next_version(
            head.checkpoint["channel_versions"].get("messages"), None
        )
        new: Checkpoint = {
            **head.checkpoint,
            "id": str(uuid6(clock_seq=step)),
            "channel_values": {**head.checkpoint["channel_values"], "messages": messages},
            "channel_versions": {**head.checkpoint["channel_versions"], "messages": version},
        }
        metadata: Any = {**head.metadata, "source": "update", "step": step}
        metadata.pop(TIMES_KEY, None)
        self._saver.put(head.config, new, metadata, {"messages": version})

    def _load_previously_stored_texts_with_is_document(
        self, message_id: str
    ) -> set[tuple[str, bool]]:
        """Return the texts that a message had in the thread's history before this import.

        Each text is paired with a flag that is True if the message was a document; see
        `_get_text_and_is_document`. The returned set is empty if the thread did not contain the
        message. The texts are read from the thread's history rather than from checkpoints, because
        there may be no checkpoint that ends with the last message of an earlier export.
        """
        if self._stored_texts is None:
            self._stored_texts = defaultdict(set)
            thread_id = self._thread["thread_id"]
            for item in (
                self._saver.history(thread_id, missing_ok=True) if self._checkpoints else ()
            ):
                if isinstance(item.value, BaseMessage):
                    self._stored_texts[str(item.value.id)].add(
                        _get_text_and_is_document(item.value)
                    )
        return self._stored_texts.get(message_id, set())

    def _find_unstored_message_ids_and_parent_id(
        self, last_message_id: str
    ) -> tuple[list[str], str | None]:
        """Return the ids of the unstored messages on the path from the root to a message.

        Returns:
            The ids of the unstored messages, oldest first, and the id of the stored message that
            the oldest unstored message follows. If no message on the path is stored, the id of the
            stored message is None.
        """
        keys: list[str] = []
        ancestor: str | None = last_message_id
        while ancestor is not None and ancestor not in self._checkpoint_of_message:
            keys.append(ancestor)
            ancestor = self._conversation.nodes[ancestor].parent
        return keys[::-1], ancestor

    def _record_checkpoint_of_message_and_ancestors(
        self, message_id: str, checkpoint_id: str, ancestors_checkpoint_id: str | None
    ) -> None:
        """Record which checkpoint ends with the given message.

        Also map the message's ancestors to `ancestors_checkpoint_id`, stopping at the first
        ancestor that is already mapped to a checkpoint.
        """
        self._checkpoint_of_message[message_id] = checkpoint_id
        node = self._conversation.nodes.get(message_id)
        while (
            node is not None
            and node.parent is not None
            and node.parent not in self._checkpoint_of_message
        ):
            self._checkpoint_of_message[node.parent] = ancestors_checkpoint_id
            node = self._conversation.nodes[node.parent]

    def _put_checkpoint(self, parent_message_id: str | None, message_ids: list[str]) -> None:
        """Store a checkpoint in which new messages follow the given parent message.

        The checkpoint contains the messages up to the parent message, followed by the new messages.
        If there are no new messages, the checkpoint is stored only if no existing checkpoint ends
        with the parent message.

        Args:
            parent_message_id: The id of the stored message that the new messages follow, or None.
            message_ids: The ids of the new messages.
        """
        batch = [self._conversation.nodes[key] for key in message_ids]
        base, messages, is_cut = None, list[BaseMessage](), False
        new_checkpoint = (
            None
            if parent_message_id is None
            else self._new_checkpoints.get(str(self._checkpoint_of_message[parent_message_id]))
        )
        # A checkpoint that this import has stored can be continued without being read from the
        # database. However, a thread with fewer than `TITLE_CANDIDATES` messages may not have a
        # title yet. Because `put` cannot derive the title from a `Continuation`, pass all messages
        # of such a thread to `put`.
        continued = (
            new_checkpoint
            if new_checkpoint
            and new_checkpoint.end == parent_message_id
            and new_checkpoint.length >= TITLE_CANDIDATES
            else None
        )
        if continued is not None:
            base, kept_count = continued.stored, continued.length
        else:
            base = (
                None
                if parent_message_id is None
                else self._read_checkpoint(str(self._checkpoint_of_message[parent_message_id]))
            )
            messages = base.checkpoint["channel_values"].get("messages", []) if base else []
            last = (
                None
                if parent_message_id is None
                else self._conversation.nodes[parent_message_id].message.id
            )
            positions = (n for n in range(len(messages), 0, -1) if messages[n - 1].id == last)
            kept_count = next(positions, len(messages))
            # The parent message's checkpoint may contain later messages, which do not belong to the
            # imported branch.
            is_cut = kept_count < len(messages)
        if not batch and not is_cut:
            return
        checkpoint = base.checkpoint if base else empty_checkpoint()
        parent_config = None if base is None else base.parent_config if is_cut else base.config
        parent_config = parent_config or {"configurable": self._thread}
        step = base.metadata.get("step", 0) + (not is_cut) if base else 0
        version = self._saver.get_next_version(checkpoint["channel_versions"].get("messages"), None)
        added = [node.message for node in batch]
        channel = messages[:kept_count] + added if continued is None else Continuation(added)
        end = message_ids[-1] if message_ids else str(parent_message_id)
        created_at = self._conversation.find_message_creation_time(end)
        moment = (
            datetime.now(UTC) if created_at == math.inf else datetime.fromtimestamp(created_at, UTC)
        )
        new: Checkpoint = {
            **checkpoint,
            "id": str(uuid6(clock_seq=step)),
            "ts": moment.isoformat(),
            "channel_values": {"messages": channel},
            "channel_versions": {**checkpoint["channel_versions"], "messages": version},
        }
        metadata: Any = {
            "source": "update",
            "step": step,
            "parents": {},
            **self._conversation.metadata,
        }
        metadata |= {
            NODE: end,
            **({TITLED: True} if "title" in self._conversation.metadata else {}),
        }
        times = [None if get_creation_time(node.message) else node.created_at for node in batch]
        metadata |= {TIMES_KEY: times} if any(times) else {}
        config = self._saver.put(parent_config, new, metadata, {"messages": version})
        self._last_stored_id, new["channel_values"] = new["id"], {}
        stored = CheckpointTuple(config, new, metadata, parent_config)
        self._new_checkpoints[new["id"]] = _NewCheckpoint(end, kept_count + len(batch), stored)
        self._record_checkpoint_of_message_and_ancestors(end, new["id"], new["id"])

    def _read_checkpoint(self, checkpoint_id: str) -> CheckpointTuple:
        """Read a checkpoint of the thread from the database."""
        configurable = {**self._thread, "checkpoint_id": checkpoint_id}
        stored = self._saver.get_tuple({"configurable": configurable})
        assert stored is not None
        return stored

    def _move_head_to_end_of_main_branch(self, has_new_messages: bool) -> None:
        """Move the head to the end of the main branch, unless a run has continued the thread.

        Storing a checkpoint makes it the head, so the head is moved only after all checkpoints have
        been stored. The head may need to be moved even if this import stored nothing, because an
        earlier import may have been killed before it could move the head. An earlier import is
        assumed to have been killed if the head is the latest checkpoint, was written by an import,
        and ends with a message of this conversation that is not the last message of the main
        branch.

        If a run has continued the thread, the head is reset to what it was before this import.
        However, if the previous head is the latest checkpoint and was written by an import, the
        newest checkpoint that was not written by an import becomes the head instead.
        """
        leaf, head = (
            self._conversation.leaf,
            next((info for info in self._checkpoints if info.is_head), None),
        )
        newest_not_imported = next(
            (info for info in self._checkpoints if NODE not in info.metadata), None
        )
        end_of_head = (
            head.metadata.get(NODE) if head is not None and head is self._checkpoints[0] else None
        )
        target = (
            newest_not_imported
            if newest_not_imported is not None and end_of_head is not None
            else head
        )
        target_id = target.checkpoint_id if target is not None else None
        is_head_outdated = has_new_messages or (
            end_of_head in self._conversation.nodes and end_of_head != leaf
        )
        if (
            newest_not_imported is None
            and is_head_outdated
            and leaf is not None
            and self._checkpoint_of_message.get(leaf)
        ):
            self._put_checkpoint(leaf, [])
            target_id = self._checkpoint_of_message[leaf]
        current_id = self._last_stored_id or (head and head.checkpoint_id)
        if target_id is not None and target_id != current_id:
            self._saver.rewind(self._thread["thread_id"], target_id)


def _get_text_and_is_document(message: BaseMessage) -> tuple[str, bool]:
    """Return a message's text and a flag that is True if the message is a document.

    Messages that contain documents can be found by search, but no memories are extracted from
    them.
    """
    return message.text, message.response_metadata.get(SEARCHED) is True


def _choose_message_ids_to_checkpoint_after(conversation: Conversation) -> set[str]:
    """Return the ids of the messages after which to store a checkpoint.

    A checkpoint is stored after each message that is a leaf or a branching point of the message
    tree. A checkpoint is also stored at the end of a turn if the thread has grown enough since the
    last checkpoint.
    """
    followers: dict[str | None, list[str]] = defaultdict(list)
    for node in conversation.nodes.values():
        followers[node.parent].append(node.message.type)
    # `depths` maps each message id to two counts: the number of messages on the path from the root
    # to this message, and the number of messages on that path since the last checkpoint.
    depths: dict[str | None, tuple[int, int]] = {None: (0, 0)}
    ends = set()
    for key, node in conversation.nodes.items():
        depth, since = (count + 1 for count in depths[node.parent])
        follower_types = followers[key]
        is_due = since >= depth // _CHECKPOINTS_PER_LENGTH and follower_types == ["human"]
        if is_due or len(follower_types) != 1 or key == conversation.leaf:
            ends.add(key)
            since = 0
        depths[key] = depth, since
    return ends
