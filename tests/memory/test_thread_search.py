"""Search in transcripts: which messages are found and by whom, and when the index is deleted."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure import retention
from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.records import ClientMetadata
from perdure.errors import ConfigurationError, PerdureError
from perdure.memory import asearch_threads, memories, recall, remember, search_threads
from perdure.memory.long_term.collection import Collection
from perdure.memory.thread_search import (
    TranscriptSearch,
    delete_transcript_index,
    find_query_word_spans,
)
from perdure.run_tables.thread_list import ThreadList
from perdure.settings import Rules
from perdure.storage.flow import fetch_rows
from perdure.stores import SQLiteStore
from perdure.stores.search import index_cache
from tests.backends import KEY, Place, places
from tests.contracts.puts import checkpoint_id_of, config_at, put
from tests.durability.processes import run_and_kill, run_in_processes
from tests.rounds import rounds
from tests.store_backends import WordEmbedder
from tests.talks import store_conversation

SECRET = "zorbaxing"


@pytest.fixture(params=["file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return places(tmp_path)[request.param]()


class OpenedDatabase:
    """A checkpointer and a store of one place."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.saver, self.store = place.saver(**options), place.store(index=None, **options)

    def search(self, text: str, **options: Any) -> list[str]:
        """Return the ids of the threads that are found."""
        return [hit.thread_id for hit in search_threads(self.saver, self.store, text, **options)]

    def read_rows(self, table: str = "transcript_items") -> list[Any]:
        """Return the rows of a transcript table."""
        return self.saver.database.read(lambda: fetch_rows(f"SELECT * FROM {table}"))

    def read_index_keys(self) -> list[str]:
        """Return the keys of the indexed messages, sorted. A key names a thread and a position."""
        sql = "SELECT key FROM transcript_items"
        return sorted(key for (key,) in self.saver.database.read(lambda: fetch_rows(sql)))

    def close(self) -> None:
        self.store.close()
        self.saver.close()


@pytest.fixture
def database(place: Place) -> Iterator[OpenedDatabase]:
    with closing(OpenedDatabase(place)) as database:
        yield database


def store_conversations(database: OpenedDatabase) -> None:
    """Store two conversations of Ann, one of Bob, and one without a user."""
    saver = database.saver
    store_conversation(
        saver, "trip", texts=["I pack a red tent", "The tents are dry"], user_id="ann"
    )
    store_conversation(
        saver, "home", texts=["My canoe is called Nutshell", "It leaks"], user_id="ann", topic="b"
    )
    store_conversation(saver, "work", texts=["Bob sells a canoe and a tent", "Good"], user_id="bob")
    store_conversation(saver, "old", texts=["A canoe of nobody", "Yes"])


# -- results


def test_search_returns_best_message_of_each_thread_with_marked_words(
    database: OpenedDatabase,
) -> None:
    """Each thread is found once. The hit has a title, a link and a time."""
    store_conversations(database)
    [hit] = search_threads(database.saver, database.store, "nutshells canoo", user="ann")

    assert (hit.thread_id, hit.title, hit.role) == ("home", "My canoe is called Nutshell", "user")
    assert hit.marked == "My **canoe** is called **Nutshell**"
    assert [hit.text[begin:end] for begin, end in hit.marks] == ["canoe", "Nutshell"]
    assert (hit.message_id, hit.position) == ("home-0", 0)
    assert hit.link == "/ui/thread?id=home&message=home-0"
    assert hit.at is not None
    assert abs(hit.at - datetime.now(UTC)) < timedelta(minutes=5)
    assert str(hit).startswith("home (My canoe is called Nutshell, ")
    assert database.search("tent") == ["trip", "work"]
    assert database.search("tent", limit=1) == ["trip"]
    assert database.search("zebra") == []


def test_search_is_limited_to_threads_of_user_and_filter(database: OpenedDatabase) -> None:
    """The rules are those of lists of threads.

    Threads of other users are not indexed for the search.
    """
    store_conversations(database)
    assert database.search("canoe", user="ann") == ["home"]
    assert len(database.read_index_keys()) == 4
    assert database.search("canoe", user="bob") == ["work"]
    assert database.search("canoe", user="zoe") == []
    assert {*database.search("canoe")} == {"home", "work", "old"}
    assert database.search("canoe", filter={"topic": "b"}) == ["home"]
    assert database.search("canoe", user="bob", filter={"topic": "b"}) == []
    assert database.search("canoe", user="ann", filter={"owner": "bob"}) == []


def test_thread_is_found_only_by_its_newest_owner(database: OpenedDatabase) -> None:
    """The new owner may come from the newest checkpoint or from the metadata of a client."""
    store_conversations(database)
    assert database.search("canoe", user="ann") == ["home"]
    store_conversation(database.saver, "home", texts=["It is Zoe's now"], user_id="zoe")
    assert database.search("old", user="zoe") == database.search("canoe", user="ann") == []
    assert database.search("canoe", user="zoe") == ["home"]
    assert database.search("nobody", user="eve") == []
    client = ClientMetadata({"owner": "eve"})
    ThreadList(database.saver).update_thread("old", lambda thread: (client, "idle"))
    assert database.search("nobody", user="eve") == ["old"]
    assert len(database.search("nobody")) == 1


def test_new_messages_are_found_without_indexing_old_ones_again(database: OpenedDatabase) -> None:
    store_conversations(database)
    assert database.search("kayak") == []
    before = database.read_index_keys()
    store_conversation(database.saver, "kayaks", texts=["A kayak!"], user_id="ann")
    assert database.search("kayak") == ["kayaks"]
    assert {*before} < {*database.read_index_keys()}
    assert len(database.read_index_keys()) == len(before) + 1


def test_tool_results_excluded_and_empty_messages_are_not_searched(
    database: OpenedDatabase,
) -> None:
    """A message with `remember: False` is excluded."""
    off = HumanMessage("secret plum", id="off", response_metadata={"remember": False})
    said: list[AnyMessage] = [
        HumanMessage("which fig", id="q"),
        ToolMessage("plum of a tool", id="t", tool_call_id="c"),
        off,
        AIMessage("", id="e"),
        AIMessage("a green fig"),
    ]
    put(database.saver, {"messages": said})
    assert database.search("plum") == []
    [hit] = search_threads(database.saver, database.store, "green")
    assert hit.message_id is None
    assert hit.link == f"/ui/message?id=t&position={hit.position}"
    assert len(database.read_index_keys()) == 2


def test_long_messages_are_cut_and_chinese_words_are_found(database: OpenedDatabase) -> None:
    text = "word " * 30_000 + "needle " + "word " * 10
    put(database.saver, {"messages": [HumanMessage("straw " + text, id="a")]}, thread="long")
    put(database.saver, {"messages": [HumanMessage("我喜欢聊天记忆 <b>\0", id="b")]}, thread="zh")
    assert database.search("straw") == ["long"]
    assert database.search("needle") == []  # beyond 100,000 characters
    [hit] = search_threads(database.saver, database.store, "聊天")
    assert [hit.text[begin:end] for begin, end in hit.marks] == ["聊天"]


@pytest.mark.parametrize(
    ("text", "query", "marked"),
    [
        ("She runs; he ran, running.", "run", ["runs", "running"]),
        ("a mountain hut", "mountian", ["mountain"]),
        ("Café and CAFE", "cafe", ["Café", "CAFE"]),
        ("nothing here", "other", []),
        ("the who", "the who", ["the", "who"]),
        ("isn't it don't", "don't", ["don't"]),
        ("1,000 visitors", "1000", ["1,000"]),
        ("Das Haus ist alt, und wir sind froh", "Wo sind die Häuser?", ["Haus"]),
        ("Wir haben die Häuser nicht gekauft", "Haus", ["Häuser"]),
        ("私の犬はポチです", "犬の名前は?", ["犬"]),
    ],
)
def test_query_words_are_marked_in_text(text: str, query: str, marked: list[str]) -> None:
    assert [text[begin:end] for begin, end in find_query_word_spans(text, query)] == marked


def test_asearch_threads_finds_same_thread(database: OpenedDatabase) -> None:
    store_conversations(database)
    hits = asyncio.run(asearch_threads(database.saver, database.store, "nutshell", user="ann"))
    assert [hit.thread_id for hit in hits] == ["home"]


def test_search_without_waiting_reports_unread_threads(database: OpenedDatabase) -> None:
    """The newest threads are indexed first.

    The indexing continues, and its progress counts all threads.
    """
    for number in range(80):
        store_conversation(database.saver, f"t{number}", texts=[f"canoe {number}"])
    steps: list[tuple[int, int]] = []
    first = search_threads(database.saver, database.store, "canoe", wait_s=0)
    hits = search_threads(
        database.saver,
        database.store,
        "canoe",
        limit=100,
        progress=lambda *step: steps.append(step),
    )
    assert 0 < first.unread <= 80
    assert (len(hits), hits.unread) == (80, 0)
    assert all(0 <= done <= total for done, total in steps)
    assert len(database.read_index_keys()) == 80


def test_read_only_database_is_searched_as_far_as_indexed(place: Place) -> None:
    with closing(OpenedDatabase(place)) as database:
        store_conversations(database)
        database.search("canoe", user="ann")
    with closing(OpenedDatabase(place, read_only=True)) as database:
        hits = search_threads(database.saver, database.store, "canoe")
    assert ([hit.thread_id for hit in hits], hits.unread) == (["home"], 2)


def test_invalid_arguments_and_other_databases_are_refused(
    database: OpenedDatabase, tmp_path: Path
) -> None:
    store_conversations(database)
    invalid_calls: list[tuple[str, Callable[[], Any]]] = [
        ("text is ' '", lambda: database.search(" ")),
        ("limit is 0", lambda: database.search("a", limit=0)),
        ("wait_s is -1", lambda: database.search("a", wait_s=-1)),
        ("'user' is 7", lambda: database.search("a", user=7)),
        ("filter is", lambda: database.search("a", filter="b")),
        ("a name in filter is 1", lambda: database.search("a", filter={1: "b"})),
    ]
    for message, call in invalid_calls:
        with pytest.raises(ConfigurationError, match=message):
            call()
    with (
        SQLiteStore.open(tmp_path / "other.db") as other,
        pytest.raises(ConfigurationError, match="both must be in the same database on disk"),
    ):
        search_threads(database.saver, other, "canoe")
    assert database.read_rows() == []
    with SQLiteCheckpointer.open(":memory:") as saver, SQLiteStore.open(":memory:") as store:
        with pytest.raises(ConfigurationError, match="the same database on disk"):
            search_threads(saver, store, "canoe")
        with pytest.raises(ConfigurationError, match="saver is"):
            search_threads(None, store, "canoe")  # type: ignore[arg-type]


def test_damaged_thread_is_logged_once_and_does_not_block_others(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(OpenedDatabase(place)) as database:
        store_conversations(database)
        sql = "UPDATE items SET body = ? WHERE row_key = (SELECT min(row_key) FROM items)"
        database.saver.database.write(lambda: fetch_rows(sql, b"damaged"))
    with closing(OpenedDatabase(place)) as database:
        assert {*database.search("canoe")} == {"home", "work", "old"}
        assert "'trip' is not searched" in caplog.text
        caplog.clear()
        assert "work" in database.search("canoe")
        assert caplog.text == ""


# -- separation from memories


def test_transcript_index_is_invisible_to_store_and_memories(database: OpenedDatabase) -> None:
    """A store's search, list, export, counts and forget, and recall, do not touch the index."""
    store_conversations(database)
    me: Any = {"configurable": {"user_id": "ann"}}
    remember("Ann lives in Ghent", store=database.store, config=me)
    assert database.search("canoe") != []
    store, kept = database.store, len(database.read_index_keys())

    assert store.search((), query="canoe tent") == []
    texts = [item.value.get("text") for item in store.search((), limit=1000)]
    assert [text for text in texts if text] == ["Ann lives in Ghent"]
    for prefix in ((), ("said",), ("said_",), ("perdure",)):
        assert store.search(prefix, query="canoe") == []
    assert all(namespace[0] in ("memories", "perdure") for namespace in store.list_namespaces())
    assert not any("canoe" in str(line) for line in store.export())
    assert store.stats().items == len(store.search((), limit=1000))
    assert recall("canoe", store=store, config=me).memories == []
    assert recall("canoe", store=store, config=me, namespace=[("said",), ("perdure2",)]).lines == ()
    assert [memory.text for memory in memories(store=store, config=me)] == ["Ann lives in Ghent"]
    assert store.embed_pending() == 0
    Collection(store).forget_all(config=me)
    store.forget(())
    assert len(database.read_index_keys()) == kept
    assert database.search("nutshell") == ["home"]


def test_transcripts_are_not_sent_to_embedder(place: Place) -> None:
    """The rule also holds for a later `reembed`."""
    words = WordEmbedder()
    index = {"embed": words, "dims": words.dims}
    with place.saver() as saver, place.store(index=index) as store:
        store_conversation(saver, "t", texts=["a horse"])
        assert len(search_threads(saver, store, "horses")) == 1
        assert store.reembed() == 0
        assert store.stats().pending == 0
    assert not any("horse" in text for texts in words.calls for text in texts)


def test_index_is_not_copied_but_rebuilt_after_import(place: Place, tmp_path: Path) -> None:
    from perdure.cli.copied_store_tables import StoreTables
    from perdure.cli.copied_thread_tables import ThreadTables

    tables = {table.name for end in (ThreadTables, StoreTables) for table in end.component_tables}
    assert not any(name.startswith("transcript_") for name in tables)
    with (
        closing(OpenedDatabase(place)) as database,
        closing(OpenedDatabase(Place(tmp_path / "to.db"))) as other,
    ):
        store_conversations(database)
        assert len(database.search("canoe")) == 3
        other.saver.import_from(database.saver)
        other.store.import_from(database.store)
        assert other.read_rows() == []
        assert len(other.search("canoe")) == 3


def test_index_is_encrypted_like_threads_by_langgraph_serializer(tmp_path: Path) -> None:
    """The store beside the checkpointer has no key."""
    serde = EncryptedSerializer.from_pycryptodome_aes(
        serde=JsonPlusSerializer(allowed_msgpack_modules=None), key=KEY[:16]
    )
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path, serde=serde) as saver, SQLiteStore.open(path) as store:
        store_conversation(saver, "t", texts=[f"the {SECRET} horse"] * 40, user_id="ann-of-ghent")
        assert len(search_threads(saver, store, "horse", user="ann-of-ghent")) == 1
    assert not any(text in read_all_files(tmp_path) for text in (b"zorbax", b"t-0"))


# -- deletion with the thread and the message


def read_all_index_rows(database: OpenedDatabase) -> list[Any]:
    """Return all rows of all transcript tables, except counters."""
    names = "progress items versions search_data search_indexes pending_embeddings namespaces"
    tables = [f"transcript_{name}" for name in names.split()]
    return [row for table in tables for row in database.read_rows(table)]


REMOVALS: dict[str, Callable[[OpenedDatabase], object]] = {
    "delete_thread": lambda database: database.saver.delete_thread("t"),
    "prune": lambda database: database.saver.prune(["t"], strategy="delete"),
    "erase": lambda database: database.saver.erase("t"),
    "delete_idle": lambda database: database.saver.delete_idle(
        datetime.now(UTC) + timedelta(days=1)
    ),
    "retention": lambda database: retention.apply(
        Rules(idle_days=0), database.saver, database.store
    ),
    "forget": lambda database: database.store.forget(checkpointer=database.saver, threads=["t"]),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS.keys())
def test_index_of_thread_is_deleted_with_thread(
    remove: Callable[[OpenedDatabase], object],
    database: OpenedDatabase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_cache, "_should_save_index_again", lambda unsaved, items: unsaved > 0)
    store_conversation(database.saver, "t", texts=[f"the {SECRET} horse"], user_id="ann")
    assert database.search("horse", user="ann") == ["t"]
    assert len(database.read_rows("transcript_items")) == 1
    remove(database)
    assert read_all_index_rows(database) == []
    assert database.search("horse", user="ann") == []


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
@pytest.mark.parametrize("whole_thread", [True, False], ids=["thread", "message"])
def test_no_byte_of_erased_message_is_left_in_files(
    key: bytes | None, whole_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process erases the thread or the message after the compact index was written.

    Neither the text, its stem, the user, nor an encrypted row is left. Other messages are found.
    """
    monkeypatch.setattr(index_cache, "_should_save_index_again", lambda unsaved, items: unsaved > 0)
    place = Place(tmp_path / "x.db")
    with closing(OpenedDatabase(place, key=key)) as database:
        said = [f"the {SECRET} horse", "the other horse"]
        store_conversation(database.saver, "t", texts=said, user_id="ann-of-ghent")
        assert database.search("horse", user="ann-of-ghent") == ["t"]
        database.saver.database.write(
            lambda: fetch_rows("SELECT 1")
        )  # after the index, which was posted
        assert len(database.read_rows("transcript_search_indexes")) == 1
        rows = [
            part
            for row in read_all_index_rows(database)
            for part in row
            if isinstance(part, bytes | str)
        ]
        secret_parts = [part if isinstance(part, bytes) else part.encode() for part in rows]
        secret_parts = [part for part in secret_parts if len(part) > 40 and b"other" not in part]
        secret_parts += [] if key else [SECRET.encode(), b"zorbax"]
        before = [part for part in secret_parts if part in read_all_files(tmp_path)]
        other = SQLiteCheckpointer.open(place.path, key=key)
        report = other.erase("t", None if whole_thread else ["t-0"])
        other.close()
        after = [part for part in secret_parts if part in read_all_files(tmp_path)]
        thread_ids = database.search("horse", user="ann-of-ghent")
        secret_thread_ids = database.search(SECRET, user="ann-of-ghent")

    assert report.scrubbed
    assert len(before) >= 2
    assert after == []
    assert thread_ids == ([] if whole_thread else ["t"])
    assert secret_thread_ids == []


def read_all_files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


def test_encrypted_database_has_no_plain_words_users_or_message_ids(tmp_path: Path) -> None:
    place = Place(tmp_path / "x.db")
    with closing(OpenedDatabase(place, key=KEY)) as database:
        store_conversation(
            database.saver, "t", texts=[f"the {SECRET} horse"] * 40, user_id="ann-of-ghent"
        )
        assert database.search("horse", user="ann-of-ghent") == ["t"]
    assert not any(
        text in read_all_files(tmp_path) for text in (b"zorbax", b"ann-of-ghent", b"t-0")
    )


def test_index_of_messages_is_deleted_when_retention_removes_them(database: OpenedDatabase) -> None:
    """The remaining messages are indexed again."""
    config = put(database.saver, {"messages": [HumanMessage(f"the {SECRET} horse", id="a")]})
    put(database.saver, {"messages": [HumanMessage("another horse", id="b")]}, config)
    assert database.search("zorbax") == ["t"]
    database.saver.retain(Retention(last=0))
    assert database.search("zorbax") == ["t"]
    database.saver.retain(Retention(last=0, history=False))
    assert len(database.read_index_keys()) == 0
    assert database.search("zorbax") == []
    assert database.search("another") == ["t"]


def test_delete_transcript_index_removes_all_rows_and_index_is_rebuilt(
    database: OpenedDatabase,
) -> None:
    store_conversations(database)
    assert len(database.search("canoe")) == 3
    delete_transcript_index(database.saver)
    assert read_all_index_rows(database) == []
    assert len(database.search("canoe")) == 3
    assert database.read_index_keys() == list_expected_keys(database)


def test_new_thread_with_same_id_has_new_index(database: OpenedDatabase) -> None:
    store_conversation(database.saver, "t", texts=[f"the {SECRET} horse"])
    assert database.search("horse") == ["t"]
    database.saver.delete_thread("t")
    store_conversation(database.saver, "t", texts=["a cow"])
    assert database.search("horse") == []
    assert database.search("cow") == ["t"]


def test_thread_deleted_while_it_is_indexed_is_not_kept(
    database: OpenedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is deleted between the read of the thread and the write of the index."""
    store_conversation(database.saver, "t", texts=[f"the {SECRET} horse"])
    store_conversation(database.saver, "u", texts=["the horse stays"])
    write = TranscriptSearch._index_messages_of_steps

    def delete_thread_then_write(search: TranscriptSearch, steps: Any) -> None:
        database.saver.delete_thread("t")
        write(search, steps)

    monkeypatch.setattr(TranscriptSearch, "_index_messages_of_steps", delete_thread_then_write)
    assert database.search("horse") == ["u"]
    assert len(database.read_index_keys()) == 1


def test_thread_that_continues_while_it_is_indexed_counts_as_unread(
    database: OpenedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later search finds the new messages."""
    store_conversation(database.saver, "t", texts=["the horse"])
    said, write = ["the horse"], TranscriptSearch._index_messages_of_steps

    def add_message_then_write(search: TranscriptSearch, steps: Any) -> None:
        said.append(f"the canoe {len(said)}")
        store_conversation(database.saver, "t", texts=said)
        write(search, steps)

    with monkeypatch.context() as patch:
        patch.setattr(TranscriptSearch, "_index_messages_of_steps", add_message_then_write)
        hits = search_threads(database.saver, database.store, "horse")
    assert ([hit.thread_id for hit in hits], hits.unread) == (["t"], 1)
    assert search_threads(database.saver, database.store, "canoe").unread == 0


def test_finished_and_failed_index_jobs_are_not_kept_in_memory(
    database: OpenedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would otherwise keep a job for each user who ever searched."""

    def fail(search: TranscriptSearch, steps: Any) -> None:
        raise OSError("the disk is full")

    store_conversation(database.saver, "t", texts=["the horse"], user_id="eve")
    with monkeypatch.context() as patch:
        patch.setattr(TranscriptSearch, "_index_messages_of_steps", fail)
        with pytest.raises(OSError, match="the disk is full"):
            database.search("horse", user="eve")
    for user in ("ann", "bob"):
        store_conversation(database.saver, f"of {user}", texts=["the horse"], user_id=user)
        assert database.search("horse", user=user) == [f"of {user}"]
    assert database.search("horse", user="eve") == ["t"]
    assert TranscriptSearch.for_checkpointer(database.saver, database.store)._jobs == {}


def test_erased_thread_is_not_found_by_other_connections(place: Place) -> None:
    with closing(OpenedDatabase(place)) as database, closing(OpenedDatabase(place)) as other:
        store_conversation(database.saver, "t", texts=[f"the {SECRET} horse"])
        store_conversation(database.saver, "u", texts=["a horse"])
        assert {*database.search("horse")} == {*other.search("horse")} == {"t", "u"}
        other.saver.erase("t")
        assert database.search("horse") == other.search("horse") == ["u"]
        assert database.search("zorbax") == []


# -- each message is indexed exactly once


def list_expected_keys(database: OpenedDatabase) -> list[str]:
    """Return the keys of all messages that should be indexed, from the current threads."""
    sql = "SELECT thread_key, thread_id FROM threads"
    return sorted(
        f"{thread:x}.{item.position:08x}"
        for thread, thread_id in database.saver.database.read(lambda: fetch_rows(sql))
        for item in database.saver.history(thread_id)
        if item.value.text and item.value.type in ("human", "ai")
    )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["say", "say", "edit", "remove", "fork", "search", "erase", "delete"]),
        st.integers(0, 5),
    ),
    max_size=14,
)


@given(steps=STEPS)
def test_after_random_changes_each_message_is_indexed_once(steps: list[tuple[str, int]]) -> None:
    """The changes are turns, edits, removals, forks, erasures and deletions.

    Searches happen in between.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(OpenedDatabase(Place(Path(folder) / "x.db"), synchronous="normal")) as database,
    ):
        configs, said = [config_at()], list[AnyMessage]()
        states: list[list[AnyMessage]] = [[]]
        for number, (step, which) in enumerate(steps):
            if step == "search":
                database.search("horse")
            elif step == "delete":
                database.saver.delete_thread("t")
                configs, said, states = [config_at()], [], [[]]
            elif step == "erase":
                database.saver.erase("t", [f"m{which}"])
                said = [message for message in said if message.id != f"m{which}"]
                states = [
                    [message for message in state if message.id != f"m{which}"] for state in states
                ]
            else:
                if step == "fork":
                    place = which % len(configs)
                    configs, said = configs[: place + 1], [*states[place]]
                    states = states[: place + 1]
                index = which % len(said) if said else 0
                if step == "edit" and said:
                    said = [*said]
                    said[index] = HumanMessage(f"horse {number}", id=said[index].id)
                elif step == "remove" and said:
                    said = [*said[:index], *said[index + 1 :]]
                else:
                    said = [*said, HumanMessage(f"horse {number}", id=f"m{number % 6}")]
                states.append(said)
                configs.append(put(database.saver, {"messages": said}, configs[-1]))
        database.search("horse")

        assert database.read_index_keys() == list_expected_keys(database)


def _search_in_process(place: Place, pipe: Connection, number: int) -> None:
    with closing(OpenedDatabase(place)) as database:
        pipe.send("ready")
        pipe.recv()
        for _ in range(3):
            assert len(database.search("horse", limit=1000)) == 150
        pipe.send("done")


@pytest.mark.repeats
def test_concurrent_processes_index_each_message_once(place: Place) -> None:
    with closing(OpenedDatabase(place)) as database:
        for number in range(150):
            store_conversation(database.saver, f"t{number}", texts=["horse", f"cow {number}"])
    run_in_processes(3, _search_in_process, place)
    with closing(OpenedDatabase(place)) as database:
        assert database.read_index_keys() == list_expected_keys(database)
        assert len(database.search("horse", limit=1000)) == 150


def _search_until_killed(place: Place, pipe: Connection) -> None:
    database = OpenedDatabase(place)
    pipe.send("ready")
    while True:
        database.search("horse", limit=1)
        store_conversation(database.saver, f"more{time.time_ns()}", texts=["horse"])
        pipe.send("searched")


@pytest.mark.repeats
def test_killed_search_loses_and_duplicates_no_messages(place: Place) -> None:
    chance = random.Random(3)
    with closing(OpenedDatabase(place)) as database:
        for number in range(200):
            store_conversation(database.saver, f"t{number}", texts=["horse", f"cow {number}"])
    for _ in range(rounds(12)):
        run_and_kill(_search_until_killed, (place,), chance, early_share=0.6, max_acks=4)
    with closing(OpenedDatabase(place)) as database:
        found = database.search("horse", limit=10_000)
        assert database.read_index_keys() == list_expected_keys(database)
        assert {f"t{number}" for number in range(200)} <= {*found}


def test_search_does_not_change_head_of_thread(database: OpenedDatabase) -> None:
    config = put(database.saver, {"messages": [HumanMessage("horse", id="a")]})
    assert database.search("horse") == ["t"]
    later = put(database.saver, {"messages": [HumanMessage("horse", id="a")]}, config)
    head = database.saver.get_tuple(config_at())
    assert head is not None
    assert checkpoint_id_of(head.config) == checkpoint_id_of(later)


@pytest.mark.postgres
def test_each_tenant_has_its_own_transcript_index(tmp_path: Path) -> None:
    from tests import postgres_server

    dsn = postgres_server.dsn_of_role("an_owner")
    place = Place(tmp_path / "x.db", dsn)
    with (
        closing(OpenedDatabase(place, tenant="acme")) as acme,
        closing(OpenedDatabase(place, tenant="b")) as other,
    ):
        store_conversation(acme.saver, "t", texts=["a horse of acme"], user_id="ann")
        store_conversation(other.saver, "t", texts=["a horse of b"], user_id="ann")
        for database, name in ((acme, "acme"), (other, "b")):
            [hit] = search_threads(database.saver, database.store, "horse", user="ann")
            assert hit.text == f"a horse of {name}"
        acme.saver.erase("t")
        assert acme.search("horse") == []
        assert other.search("horse") == ["t"]
    with pytest.raises(PerdureError):
        OpenedDatabase(place)
