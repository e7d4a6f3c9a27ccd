"""Store imported conversations, memories and store items in a database."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Final

from perdure.checkpointers.codec import Codec
from perdure.checkpointers.import_langgraph import open_import_source
from perdure.checkpointers.reports import ImportReport
from perdure.cli.app import CommandDatabase
from perdure.cli.importing.conversation import Conversation, Problem, SavedText
from perdure.cli.importing.report import ConversationsReport
from perdure.cli.importing.thread_matching import ThreadNames
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
)
from perdure.memory.long_term.extraction import read_label_values
from perdure.memory.long_term.recorded_templates import record_templates
from perdure.memory.long_term.records import StoreAdapter
from perdure.memory.namespace_templates import Template
from perdure.stores.base import Provenance

if TYPE_CHECKING:
    from perdure.cli.importing.archive import ArchiveLines
    from perdure.memory.long_term.collection import Collection
from perdure.cli.importing.thread_import import ThreadImport

# Parent namespace of all project documents. Each project has its own child namespace.
_PROJECT_NAMESPACE: Final = Template(("projects", "{user_id}"))


class ImportWriter:
    """Stores conversations as threads, extracts memories, and counts the threads and memories.

    Args:
        database: The database into which the conversations are imported.
        report: Receives the counts.
        with_memories: Whether memories are extracted.
        later: Whether a worker extracts the memories later.
        trusts_templates: Whether the namespace templates in archives are recorded.
    """

    def __init__(
        self,
        database: CommandDatabase,
        report: ConversationsReport,
        *,
        with_memories: bool,
        later: bool,
        trusts_templates: bool = False,
    ) -> None:
        self._database, self._report, self._with_memories = database, report, with_memories
        self._trusts_templates = trusts_templates
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
        """Store each conversation as a thread whose id begins with `thread_id_prefix`."""
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
        If the user trusts the archives, the method records the namespace templates of each archive
        before it imports the archive's items. If the import is interrupted, `perdure forget` can
        then find all items that were stored. A forged template could make a later `perdure forget`
        erase other people's items.
        """
        for archive in archives:
            templates = archive.find_templates_to_record()
            if self._trusts_templates:
                run_operation(record_templates(self._database.store, templates))
            elif templates:
                self._report.left_out["namespace template, see --trust-templates"] += len(templates)
            self._report.left_out += archive.left_out
            self._report.add_store_item_counts(
                self._database.store.import_lines(archive.iter_item_lines())
            )

    def store_memories_and_project_documents(self, texts: list[SavedText]) -> None:
        """Store an export's memories and project documents that are not part of any conversation.

        Imported memories are stored as facts about the user, unless the import is configured to
        store no memories. A document is stored as an item in the namespace `("projects", USER,
        PROJECT)`.
        """
        from perdure.memory.long_term.collection import Collection

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
        """Store an imported text as a memory, and update the counters in the import report.

        If a tombstone exists for the text, the text is not stored.

        A text has a tombstone if a memory with the same text was erased earlier.
        """
        from perdure.memory.long_term.gate import is_forgotten

        adapter, namespace = StoreAdapter(self._database.store), collection.namespace
        if run_operation(
            is_forgotten(adapter, namespace.fill(self._database.config), saved_text.text)
        ):
            self._report.forgotten += 1
            self._report.known_items += 1
            return
        outcome = collection.insert(
            saved_text.text,
            key=saved_text.key,
            provenance=Provenance(actor="import", trust="assistant"),
            config=self._database.config,
        )
        is_new = outcome.change == "added"
        self._report.add_memory_counts(
            self._database.user,
            added=int(is_new),
            quarantined=int(outcome.change == "quarantined"),
        )
        self._report.known_items += not is_new

    def _store_conversation(
        self, thread_id: str, conversation: Conversation, advance: Callable[[int], None]
    ) -> None:
        """Store a conversation as a thread, extract memories from it, and add it to the report.

        If a message cannot be encoded, skip the conversation and report a problem.
        """
        # If no memories are to be extracted from a thread, store the user "" in the thread's
        # metadata, so that background workers skip the thread. Archived threads are an exception,
        # because they keep the user that is already in their metadata.
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
                # Raise an error only if the database has neither thread tables nor store tables.
                except NotADatabase as exc:
                    missing_tables.append(exc)
                try:
                    self._report.add_store_item_counts(
                        self._database.store.import_from(db, max_value_bytes=limit)
                    )
                # Raise an error only if the database has neither thread tables nor store tables.
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
                    # If some threads could not be imported, raise the error only after the store
                    # items have been imported.
                    refusal = exc
            if source.store is not None:
                self._report.add_store_item_counts(
                    self._database.store.import_from(source.store, on_unsuitable="skip")
                )
        if refusal is not None:
            raise refusal

    def _extract_memories_of_thread(self, thread_id: str) -> None:
        """Extract memories from the thread's unread messages.

        The extracted memories belong to the user given by `user_id` in the metadata of the thread's
        head, or to the configured user if the metadata contains no `user_id`.
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
            report = self._extraction.extract(thread_id, {"configurable": {"user_id": user}})
        except (InvalidConfig, InvalidMessages, InvalidNamespace) as exc:
            # The thread has no channel `messages`, or the user or the thread id is invalid.
            self._report.skipped.append(Problem(f"no memories: {exc}", thread_id))
            return
        self._report.add_memory_counts(
            user,
            added=report.added,
            quarantined=report.quarantined,
            forgotten=report.forgotten,
        )
