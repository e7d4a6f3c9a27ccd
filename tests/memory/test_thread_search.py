"""Search of what was said: what is found and by whom, what is kept of it, and when that goes."""

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
from perdure.checkpointers.thread_list import ThreadList
from perdure.errors import ConfigurationError, PerdureError
from perdure.memory import asearch_threads, memories, recall, remember, search_threads
from perdure.memory.collection import Collection
from perdure.memory.thread_search import (
    TranscriptSearch,
    delete_transcript_index,
    find_query_word_spans,
)
from perdure.settings import Rules
from perdure.storage.flow import fetch_rows
from perdure.stores import SQLiteStore, indexes
from tests.backends import KEY, Place, places
from tests.contracts.puts import checkpoint_id_of, config_at, put
from tests.durability.processes import run_and_kill, run_in_processes
from tests.rounds import rounds
from tests.store_backends import Words
from tests.talks import talk

SECRET = "zorbaxing"


@pytest.fixture(params=["file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return places(tmp_path)[request.param]()


class Opened:
    """A checkpointer and a store of one place."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.saver, self.store = place.saver(**options), place.store(index=None, **options)

    def search(self, text: str, **options: Any) -> list[str]:
        """The ids of the threads that are found."""
        return [hit.thread_id for hit in search_threads(self.saver, self.store, text, **options)]

    def kept(self, table: str = "transcript_items") -> list[Any]:
        """The rows of a table of what was said."""
        return self.saver.database.read(lambda: fetch_rows(f"SELECT * FROM {table}"))

    def keys(self) -> list[str]:
        """The keys of what is kept, in order: each tells a thread and a position."""
        sql = "SELECT key FROM transcript_items"
        return sorted(key for (key,) in self.saver.database.read(lambda: fetch_rows(sql)))

    def close(self) -> None:
        self.store.close()
        self.saver.close()


@pytest.fixture
def both(place: Place) -> Iterator[Opened]:
    with closing(Opened(place)) as opened:
        yield opened


def fill(both: Opened) -> None:
    """Two conversations of ann's, one of bob's, one of nobody's."""
    saver = both.saver
    talk(saver, "trip", said=["I pack a red tent", "The tents are dry"], user_id="ann")
    talk(saver, "home", said=["My canoe is called Nutshell", "It leaks"], user_id="ann", topic="b")
    talk(saver, "work", said=["Bob sells a canoe and a tent", "Good"], user_id="bob")
    talk(saver, "old", said=["A canoe of nobody", "Yes"])


# -- what is found


def test_threads_are_found_by_what_was_said(both: Opened) -> None:
    """Each once, with the message that answers best, its words marked, and when it was said."""
    fill(both)
    [hit] = search_threads(both.saver, both.store, "nutshells canoo", user="ann")

    assert (hit.thread_id, hit.title, hit.role) == ("home", "My canoe is called Nutshell", "user")
    assert hit.marked == "My **canoe** is called **Nutshell**"
    assert [hit.text[begin:end] for begin, end in hit.marks] == ["canoe", "Nutshell"]
    assert (hit.message_id, hit.position) == ("home-0", 0)
    assert hit.link == "/ui/thread?id=home&message=home-0"
    assert hit.at is not None
    assert abs(hit.at - datetime.now(UTC)) < timedelta(minutes=5)
    assert str(hit).startswith("home (My canoe is called Nutshell, ")
    assert both.search("tent") == ["trip", "work"]
    assert both.search("tent", limit=1) == ["trip"]
    assert both.search("zebra") == []


def test_only_threads_that_the_searcher_may_see(both: Opened) -> None:
    """By owner and metadata as lists have them; no other's is read for it."""
    fill(both)
    assert both.search("canoe", user="ann") == ["home"]
    assert len(both.keys()) == 4
    assert both.search("canoe", user="bob") == ["work"]
    assert both.search("canoe", user="zoe") == []
    assert {*both.search("canoe")} == {"home", "work", "old"}
    assert both.search("canoe", filter={"topic": "b"}) == ["home"]
    assert both.search("canoe", user="bob", filter={"topic": "b"}) == []
    assert both.search("canoe", user="ann", filter={"owner": "bob"}) == []


def test_a_thread_that_becomes_anothers_is_found_by_that_one_alone(both: Opened) -> None:
    """Whether its newest checkpoint says so, or a client of the server."""
    fill(both)
    assert both.search("canoe", user="ann") == ["home"]
    talk(both.saver, "home", said=["It is Zoe's now"], user_id="zoe")
    assert both.search("old", user="zoe") == both.search("canoe", user="ann") == []
    assert both.search("canoe", user="zoe") == ["home"]
    assert both.search("nobody", user="eve") == []
    client = ClientMetadata({"owner": "eve"})
    ThreadList(both.saver).update("old", lambda thread: (client, "idle"))
    assert both.search("nobody", user="eve") == ["old"]
    assert len(both.search("nobody")) == 1


def test_what_is_said_later_is_found_at_once(both: Opened) -> None:
    """The messages that were read before are not read again."""
    fill(both)
    assert both.search("kayak") == []
    before = both.keys()
    talk(both.saver, "kayaks", said=["A kayak!"], user_id="ann")
    assert both.search("kayak") == ["kayaks"]
    assert {*before} < {*both.keys()}
    assert len(both.keys()) == len(before) + 1


def test_what_is_not_searched(both: Opened) -> None:
    """Results of tools, what is off the record, and messages without words."""
    off = HumanMessage("secret plum", id="off", response_metadata={"remember": False})
    said: list[AnyMessage] = [
        HumanMessage("which fig", id="q"),
        ToolMessage("plum of a tool", id="t", tool_call_id="c"),
        off,
        AIMessage("", id="e"),
        AIMessage("a green fig"),
    ]
    put(both.saver, {"messages": said})
    assert both.search("plum") == []
    [hit] = search_threads(both.saver, both.store, "green")
    assert hit.message_id is None
    assert hit.link == f"/ui/message?id=t&position={hit.position}"
    assert len(both.keys()) == 2


def test_long_and_foreign_messages(both: Opened) -> None:
    text = "word " * 30_000 + "needle " + "word " * 10
    put(both.saver, {"messages": [HumanMessage("straw " + text, id="a")]}, thread="long")
    put(both.saver, {"messages": [HumanMessage("我喜欢聊天记忆 <b>\0", id="b")]}, thread="zh")
    assert both.search("straw") == ["long"]
    assert both.search("needle") == []  # beyond 100,000 characters
    [hit] = search_threads(both.saver, both.store, "聊天")
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
def test_marks(text: str, query: str, marked: list[str]) -> None:
    assert [text[begin:end] for begin, end in find_query_word_spans(text, query)] == marked


def test_async_twin(both: Opened) -> None:
    fill(both)
    hits = asyncio.run(asearch_threads(both.saver, both.store, "nutshell", user="ann"))
    assert [hit.thread_id for hit in hits] == ["home"]


def test_it_does_not_wait_and_says_how_many_threads_are_left(both: Opened) -> None:
    """The latest threads are read first; the reading goes on, and progress counts all of them."""
    for number in range(80):
        talk(both.saver, f"t{number}", said=[f"canoe {number}"])
    steps: list[tuple[int, int]] = []
    first = search_threads(both.saver, both.store, "canoe", wait_s=0)
    hits = search_threads(
        both.saver, both.store, "canoe", limit=100, progress=lambda *step: steps.append(step)
    )
    assert 0 < first.unread <= 80
    assert (len(hits), hits.unread) == (80, 0)
    assert all(0 <= done <= total for done, total in steps)
    assert len(both.keys()) == 80


def test_a_read_only_database_is_searched_as_far_as_it_was_read(place: Place) -> None:
    with closing(Opened(place)) as both:
        fill(both)
        both.search("canoe", user="ann")
    with closing(Opened(place, read_only=True)) as both:
        hits = search_threads(both.saver, both.store, "canoe")
    assert ([hit.thread_id for hit in hits], hits.unread) == (["home"], 2)


def test_what_is_wrong_is_said(both: Opened, tmp_path: Path) -> None:
    fill(both)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("text is ' '", lambda: both.search(" ")),
        ("limit is 0", lambda: both.search("a", limit=0)),
        ("wait_s is -1", lambda: both.search("a", wait_s=-1)),
        ("user is 7", lambda: both.search("a", user=7)),
        ("filter is", lambda: both.search("a", filter="b")),
        ("a name in filter is 1", lambda: both.search("a", filter={1: "b"})),
    ]
    for message, call in wrong:
        with pytest.raises(ConfigurationError, match=message):
            call()
    with (
        SQLiteStore.open(tmp_path / "other.db") as other,
        pytest.raises(ConfigurationError, match="expected both in one database"),
    ):
        search_threads(both.saver, other, "canoe")
    assert both.kept() == []
    with SQLiteCheckpointer.open(":memory:") as saver, SQLiteStore.open(":memory:") as store:
        with pytest.raises(ConfigurationError, match="not in memory"):
            search_threads(saver, store, "canoe")
        with pytest.raises(ConfigurationError, match="saver is"):
            search_threads(None, store, "canoe")  # type: ignore[arg-type]


def test_a_thread_that_cannot_be_read_does_not_hold_up_others(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Opened(place)) as both:
        fill(both)
        sql = "UPDATE items SET body = ? WHERE row_key = (SELECT min(row_key) FROM items)"
        both.saver.database.write(lambda: fetch_rows(sql, b"damaged"))
    with closing(Opened(place)) as both:
        assert {*both.search("canoe")} == {"home", "work", "old"}
        assert "'trip' is not searched" in caplog.text
        caplog.clear()
        assert "work" in both.search("canoe")
        assert caplog.text == ""


# -- it is in no prompt


def test_nothing_else_sees_it(both: Opened) -> None:
    """Neither a search of the store, from any prefix, nor memories, exports, counts or forget."""
    fill(both)
    me: Any = {"configurable": {"user_id": "ann"}}
    remember("Ann lives in Ghent", store=both.store, config=me)
    assert both.search("canoe") != []
    store, kept = both.store, len(both.keys())

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
    assert len(both.keys()) == kept
    assert both.search("nutshell") == ["home"]


def test_no_model_is_asked_for_vectors(place: Place) -> None:
    """What is said is not sent to the store's embedder, then or by a `reembed`."""
    words = Words()
    index = {"embed": words, "dims": words.dims}
    with place.saver() as saver, place.store(index=index) as store:
        talk(saver, "t", said=["a horse"])
        assert len(search_threads(saver, store, "horses")) == 1
        assert store.reembed() == 0
        assert store.stats().pending == 0
    assert not any("horse" in text for texts in words.calls for text in texts)


def test_a_copy_is_read_anew(place: Place, tmp_path: Path) -> None:
    from perdure.cli.table_copy import StoreTables, ThreadTables

    tables = {table.name for end in (ThreadTables, StoreTables) for table in end.tables}
    assert not any(name.startswith("transcript_") for name in tables)
    with closing(Opened(place)) as both, closing(Opened(Place(tmp_path / "to.db"))) as other:
        fill(both)
        assert len(both.search("canoe")) == 3
        other.saver.import_from(both.saver)
        other.store.import_from(both.store)
        assert other.kept() == []
        assert len(other.search("canoe")) == 3


def test_words_are_encrypted_as_the_threads_are(tmp_path: Path) -> None:
    """By langgraph's serializer too, beside a store without a key."""
    serde = EncryptedSerializer.from_pycryptodome_aes(
        serde=JsonPlusSerializer(allowed_msgpack_modules=None), key=KEY[:16]
    )
    path = tmp_path / "x.db"
    with SQLiteCheckpointer.open(path, serde=serde) as saver, SQLiteStore.open(path) as store:
        talk(saver, "t", said=[f"the {SECRET} horse"] * 40, user_id="ann-of-ghent")
        assert len(search_threads(saver, store, "horse", user="ann-of-ghent")) == 1
    assert not any(text in raw(tmp_path) for text in (b"zorbax", b"t-0"))


# -- it goes with the thread and the message


def whole(both: Opened) -> list[Any]:
    """All rows of all tables of what was said, but counters."""
    names = "progress items versions search_data search_indexes pending_embeddings namespaces"
    tables = [f"transcript_{name}" for name in names.split()]
    return [row for table in tables for row in both.kept(table)]


GO: dict[str, Callable[[Opened], object]] = {
    "delete_thread": lambda both: both.saver.delete_thread("t"),
    "prune": lambda both: both.saver.prune(["t"], strategy="delete"),
    "erase": lambda both: both.saver.erase("t"),
    "delete_idle": lambda both: both.saver.delete_idle(datetime.now(UTC) + timedelta(days=1)),
    "retention": lambda both: retention.apply(Rules(idle_days=0), both.saver, both.store),
    "forget": lambda both: both.store.forget(checkpointer=both.saver, threads=["t"]),
}


@pytest.mark.parametrize("go", GO.values(), ids=GO.keys())
def test_it_goes_with_the_thread(
    go: Callable[[Opened], object], both: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "_is_worth_saving", lambda unsaved, items: unsaved > 0)
    talk(both.saver, "t", said=[f"the {SECRET} horse"], user_id="ann")
    assert both.search("horse", user="ann") == ["t"]
    assert len(both.kept("transcript_items")) == 1
    go(both)
    assert whole(both) == []
    assert both.search("horse", user="ann") == []


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
@pytest.mark.parametrize("whole_thread", [True, False], ids=["thread", "message"])
def test_no_byte_is_left(
    key: bytes | None, whole_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the text, its stem, a name, nor a row as it was, after an erasure in another process.

    The compact index has been written. What was said beside it is found.
    """
    monkeypatch.setattr(indexes, "_is_worth_saving", lambda unsaved, items: unsaved > 0)
    place = Place(tmp_path / "x.db")
    with closing(Opened(place, key=key)) as both:
        said = [f"the {SECRET} horse", "the other horse"]
        talk(both.saver, "t", said=said, user_id="ann-of-ghent")
        assert both.search("horse", user="ann-of-ghent") == ["t"]
        both.saver.database.write(
            lambda: fetch_rows("SELECT 1")
        )  # after the index, which was posted
        assert len(both.kept("transcript_search_indexes")) == 1
        rows = [part for row in whole(both) for part in row if isinstance(part, bytes | str)]
        told = [part if isinstance(part, bytes) else part.encode() for part in rows]
        told = [part for part in told if len(part) > 40 and b"other" not in part]
        told += [] if key else [SECRET.encode(), b"zorbax"]
        before = [part for part in told if part in raw(tmp_path)]
        other = SQLiteCheckpointer.open(place.path, key=key)
        report = other.erase("t", None if whole_thread else ["t-0"])
        other.close()
        after = [part for part in told if part in raw(tmp_path)]
        found = both.search("horse", user="ann-of-ghent")
        gone = both.search(SECRET, user="ann-of-ghent")

    assert report.scrubbed
    assert len(before) >= 2
    assert after == []
    assert found == ([] if whole_thread else ["t"])
    assert gone == []


def raw(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


def test_nothing_of_it_is_clear_in_an_encrypted_database(tmp_path: Path) -> None:
    """Neither words, nor who said them, nor ids, which threads have in clear."""
    place = Place(tmp_path / "x.db")
    with closing(Opened(place, key=KEY)) as both:
        talk(both.saver, "t", said=[f"the {SECRET} horse"] * 40, user_id="ann-of-ghent")
        assert both.search("horse", user="ann-of-ghent") == ["t"]
    assert not any(text in raw(tmp_path) for text in (b"zorbax", b"ann-of-ghent", b"t-0"))


def test_it_goes_with_messages_that_no_checkpoint_keeps(both: Opened) -> None:
    """Those that stay are read again."""
    config = put(both.saver, {"messages": [HumanMessage(f"the {SECRET} horse", id="a")]})
    put(both.saver, {"messages": [HumanMessage("another horse", id="b")]}, config)
    assert both.search("zorbax") == ["t"]
    both.saver.retain(Retention(last=0))
    assert both.search("zorbax") == ["t"]
    both.saver.retain(Retention(last=0, history=False))
    assert len(both.keys()) == 0
    assert both.search("zorbax") == []
    assert both.search("another") == ["t"]


def test_all_that_is_kept_is_removed_at_once(both: Opened) -> None:
    fill(both)
    assert len(both.search("canoe")) == 3
    delete_transcript_index(both.saver)
    assert whole(both) == []
    assert len(both.search("canoe")) == 3
    assert both.keys() == expected_keys(both)


def test_a_thread_of_the_same_id_is_another(both: Opened) -> None:
    talk(both.saver, "t", said=[f"the {SECRET} horse"])
    assert both.search("horse") == ["t"]
    both.saver.delete_thread("t")
    talk(both.saver, "t", said=["a cow"])
    assert both.search("horse") == []
    assert both.search("cow") == ["t"]


def test_what_goes_while_it_is_read_is_not_kept(
    both: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the read of a thread and the write of what was read."""
    talk(both.saver, "t", said=[f"the {SECRET} horse"])
    talk(both.saver, "u", said=["the horse stays"])
    write = TranscriptSearch._write_index_steps

    def late(search: TranscriptSearch, some: Any) -> None:
        both.saver.delete_thread("t")
        write(search, some)

    monkeypatch.setattr(TranscriptSearch, "_write_index_steps", late)
    assert both.search("horse") == ["u"]
    assert len(both.keys()) == 1


def test_a_thread_that_goes_on_while_it_is_read_is_counted_as_unread(
    both: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said meanwhile is found by a later search."""
    talk(both.saver, "t", said=["the horse"])
    said, write = ["the horse"], TranscriptSearch._write_index_steps

    def late(search: TranscriptSearch, some: Any) -> None:
        said.append(f"the canoe {len(said)}")
        talk(both.saver, "t", said=said)
        write(search, some)

    with monkeypatch.context() as patch:
        patch.setattr(TranscriptSearch, "_write_index_steps", late)
        hits = search_threads(both.saver, both.store, "horse")
    assert ([hit.thread_id for hit in hits], hits.unread) == (["t"], 1)
    assert search_threads(both.saver, both.store, "canoe").unread == 0


def test_readings_that_are_over_are_not_kept(both: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has one for each user who ever searched; one that fails is over too."""

    def fails(search: TranscriptSearch, some: Any) -> None:
        raise OSError("the disk is full")

    talk(both.saver, "t", said=["the horse"], user_id="eve")
    with monkeypatch.context() as patch:
        patch.setattr(TranscriptSearch, "_write_index_steps", fails)
        with pytest.raises(OSError, match="the disk is full"):
            both.search("horse", user="eve")
    for user in ("ann", "bob"):
        talk(both.saver, f"of {user}", said=["the horse"], user_id=user)
        assert both.search("horse", user=user) == [f"of {user}"]
    assert both.search("horse", user="eve") == ["t"]
    assert TranscriptSearch.for_checkpointer(both.saver, both.store)._jobs == {}


def test_an_index_of_another_process_forgets_too(place: Place) -> None:
    with closing(Opened(place)) as both, closing(Opened(place)) as other:
        talk(both.saver, "t", said=[f"the {SECRET} horse"])
        talk(both.saver, "u", said=["a horse"])
        assert {*both.search("horse")} == {*other.search("horse")} == {"t", "u"}
        other.saver.erase("t")
        assert both.search("horse") == other.search("horse") == ["u"]
        assert both.search("zorbax") == []


# -- exactly once


def expected_keys(both: Opened) -> list[str]:
    """The keys of all that is to be kept, of the threads as they are."""
    sql = "SELECT thread_key, thread_id FROM threads"
    return sorted(
        f"{thread:x}.{item.position:08x}"
        for thread, thread_id in both.saver.database.read(lambda: fetch_rows(sql))
        for item in both.saver.history(thread_id)
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
def test_after_any_course_each_message_is_kept_once(steps: list[tuple[str, int]]) -> None:
    """Of turns, edits, removals, forks, erasures and deletions, whenever it was searched."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Opened(Place(Path(folder) / "x.db"), synchronous="normal")) as both,
    ):
        configs, said = [config_at()], list[AnyMessage]()
        states: list[list[AnyMessage]] = [[]]
        for number, (step, which) in enumerate(steps):
            if step == "search":
                both.search("horse")
            elif step == "delete":
                both.saver.delete_thread("t")
                configs, said, states = [config_at()], [], [[]]
            elif step == "erase":
                both.saver.erase("t", [f"m{which}"])
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
                configs.append(put(both.saver, {"messages": said}, configs[-1]))
        both.search("horse")

        assert both.keys() == expected_keys(both)


def _searching(place: Place, pipe: Connection, number: int) -> None:
    with closing(Opened(place)) as both:
        pipe.send("ready")
        pipe.recv()
        for _ in range(3):
            assert len(both.search("horse", limit=1000)) == 150
        pipe.send("done")


@pytest.mark.repeats
def test_processes_that_search_at_once_keep_each_message_once(place: Place) -> None:
    with closing(Opened(place)) as both:
        for number in range(150):
            talk(both.saver, f"t{number}", said=["horse", f"cow {number}"])
    run_in_processes(3, _searching, place)
    with closing(Opened(place)) as both:
        assert both.keys() == expected_keys(both)
        assert len(both.search("horse", limit=1000)) == 150


def _victim(place: Place, pipe: Connection) -> None:
    both = Opened(place)
    pipe.send("ready")
    while True:
        both.search("horse", limit=1)
        talk(both.saver, f"more{time.time_ns()}", said=["horse"])
        pipe.send("searched")


@pytest.mark.repeats
def test_a_killed_search_loses_and_doubles_nothing(place: Place) -> None:
    chance = random.Random(3)
    with closing(Opened(place)) as both:
        for number in range(200):
            talk(both.saver, f"t{number}", said=["horse", f"cow {number}"])
    for _ in range(rounds(12)):
        run_and_kill(_victim, (place,), chance, early_share=0.6, max_acks=4)
    with closing(Opened(place)) as both:
        found = both.search("horse", limit=10_000)
        assert both.keys() == expected_keys(both)
        assert {f"t{number}" for number in range(200)} <= {*found}


def test_heads_are_not_changed_by_it(both: Opened) -> None:
    """A thread goes on from its head, whatever was searched meanwhile."""
    config = put(both.saver, {"messages": [HumanMessage("horse", id="a")]})
    assert both.search("horse") == ["t"]
    later = put(both.saver, {"messages": [HumanMessage("horse", id="a")]}, config)
    head = both.saver.get_tuple(config_at())
    assert head is not None
    assert checkpoint_id_of(head.config) == checkpoint_id_of(later)


@pytest.mark.postgres
def test_tenants_have_each_their_own(tmp_path: Path) -> None:
    from tests import postgres_server

    dsn = postgres_server.dsn_of("an_owner")
    place = Place(tmp_path / "x.db", dsn)
    with closing(Opened(place, tenant="acme")) as acme, closing(Opened(place, tenant="b")) as other:
        talk(acme.saver, "t", said=["a horse of acme"], user_id="ann")
        talk(other.saver, "t", said=["a horse of b"], user_id="ann")
        for both, name in ((acme, "acme"), (other, "b")):
            [hit] = search_threads(both.saver, both.store, "horse", user="ann")
            assert hit.text == f"a horse of {name}"
        acme.saver.erase("t")
        assert acme.search("horse") == []
        assert other.search("horse") == ["t"]
    with pytest.raises(PerdureError):
        Opened(place)
