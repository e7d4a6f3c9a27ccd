"""`list()`, `threads()` and `checkpoints()`: which, in what order, and how many."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from perdure.checkpointers import SQLiteCheckpointer, read_import_metadata, title
from perdure.errors import ConfigurationError, UnknownThread
from tests.contracts.puts import (
    checkpoint_id_of,
    config_at,
    list_checkpoint_ids,
    put,
    read_channel_values,
)

VALUES: list[Any] = [
    "text",
    "",
    "1",
    "x" * 1000,
    1,
    0,
    -(2**60),
    1.5,
    True,
    False,
    None,
    [1, "a"],
    {"a": {"b": [1, None]}},
    {},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_metadata_filters_match_as_langgraphs(saver: SQLiteCheckpointer, value: Any) -> None:
    """A filter finds what InMemorySaver's finds: equal values, nested ones included."""
    memory = InMemorySaver()
    for either in (saver, memory):
        for number, known in enumerate(VALUES):
            put(either, {}, metadata={"k": known}, uid=f"{number:03}")
        put(either, {}, uid="without")
    for thread in (None, config_at("t"), {"configurable": {"thread_id": "t"}}):
        expected = sorted(list_checkpoint_ids(memory, thread, filter={"k": value}))

        assert expected == sorted(list_checkpoint_ids(saver, thread, filter={"k": value}))


def test_several_filters_all_have_to_match(saver: SQLiteCheckpointer) -> None:
    """Indexed and other values are combined, and the order stays."""
    for i in range(8):
        known = {"even": i % 2 == 0, "deep": {"third": i % 3}, "source": "input"}
        put(saver, {}, metadata=known, uid=str(i))

    assert list_checkpoint_ids(saver, config_at(), filter={"even": True, "deep": {"third": 0}}) == [
        "6",
        "0",
    ]
    assert list_checkpoint_ids(
        saver, config_at(), filter={"even": True, "deep": {"third": 0}}, limit=1
    ) == ["6"]
    assert list_checkpoint_ids(saver, config_at(), filter={"even": True, "source": "loop"}) == []


def test_filters_after_deletion_and_replacement(saver: SQLiteCheckpointer) -> None:
    """What a filter finds follows deletions, prunes, copies and checkpoints put once more."""
    put(saver, {}, metadata={"k": 1}, uid="a")
    put(saver, {}, metadata={"k": 1}, uid="b")
    saver.copy_thread("t", "copy")
    put(saver, {}, metadata={"k": 2}, uid="a")

    assert list_checkpoint_ids(saver, config_at(), filter={"k": 1}) == ["b"]
    assert list_checkpoint_ids(saver, config_at(), filter={"k": 2}) == ["a"]
    assert list_checkpoint_ids(saver, config_at("copy"), filter={"k": 1}) == ["b", "a"]
    saver.prune(["t"])
    assert list_checkpoint_ids(saver, config_at(), filter={"k": 2}) == []
    saver.delete_thread("copy")
    assert list_checkpoint_ids(saver, None, filter={"k": 1}) == ["b"]


def test_before_and_limit(saver: SQLiteCheckpointer) -> None:
    """`before` excludes itself, `limit` counts what matches, and both combine."""
    ids = [checkpoint_id_of(put(saver, {})) for _ in range(5)]

    assert ids[::-1] == list_checkpoint_ids(saver, config_at())
    assert ids[:3][::-1] == list_checkpoint_ids(saver, config_at(), before=config_at(uid=ids[3]))
    assert [ids[2]] == list_checkpoint_ids(
        saver, config_at(), before=config_at(uid=ids[3]), limit=1
    )
    assert list_checkpoint_ids(saver, config_at(), before=config_at(uid=ids[0])) == []
    assert list_checkpoint_ids(saver, config_at(), limit=0) == []
    assert [ids[4]] == list_checkpoint_ids(saver, config_at(), limit=1)
    assert ids[3:][::-1] == list_checkpoint_ids(saver, config_at(), limit=2)
    assert ids[::-1] == list_checkpoint_ids(saver, config_at(), limit=9)
    assert [ids[1]] == list_checkpoint_ids(saver, config_at(uid=ids[1]))


def test_one_namespace_all_namespaces_all_threads(saver: SQLiteCheckpointer) -> None:
    """Without a namespace a thread is listed in one order; without a config, all there is."""
    put(saver, {}, uid="1")
    put(saver, {}, ns="sub", uid="2")
    put(saver, {}, uid="3")
    put(saver, {}, thread="other", uid="4")
    every: Any = {"configurable": {"thread_id": "t"}}

    assert list_checkpoint_ids(saver, config_at()) == ["3", "1"]
    assert list_checkpoint_ids(saver, config_at(ns="sub")) == ["2"]
    assert list_checkpoint_ids(saver, every) == ["3", "2", "1"]
    assert list_checkpoint_ids(saver, every, before=config_at(uid="3")) == ["2", "1"]
    assert set(list_checkpoint_ids(saver, None, before=config_at("other", uid="4"))) == {
        "1",
        "2",
        "3",
    }
    assert list_checkpoint_ids(saver, None, before=config_at("other", uid="2")) == ["1"]
    assert {"1", "2", "3", "4"} == set(list_checkpoint_ids(saver, None))
    assert len(list_checkpoint_ids(saver, None, limit=2)) == 2
    assert list_checkpoint_ids(saver, config_at("nobody")) == []


def test_the_head_leads(saver: SQLiteCheckpointer) -> None:
    """A head that is not the last put comes first and only once, if it is asked for at all."""
    for i in range(4):
        put(saver, {}, metadata={"even": i % 2 == 0}, uid=f"{i}")
    saver.rewind("t", "1")
    every: Any = {"configurable": {"thread_id": "t"}}
    put(saver, {}, ns="sub", uid="below")

    assert list_checkpoint_ids(saver, config_at()) == ["1", "3", "2", "0"]
    assert list_checkpoint_ids(saver, config_at(), limit=2) == ["1", "3"]
    assert list_checkpoint_ids(saver, config_at(), filter={"even": True}) == ["2", "0"]
    assert list_checkpoint_ids(saver, config_at(), filter={"even": False}) == ["1", "3"]
    assert list_checkpoint_ids(saver, config_at(), before=config_at(uid="1")) == ["0"]
    assert list_checkpoint_ids(saver, config_at(), before=config_at(uid="3")) == ["1", "2", "0"]
    assert list_checkpoint_ids(saver, every) == ["below", "1", "3", "2", "0"]


def test_before_an_id_of_another_namespace(saver: SQLiteCheckpointer) -> None:
    """Ids are compared then, as langgraph's savers do; put order counts within a namespace."""
    for uid in ("5", "1", "3"):
        put(saver, {}, ns="sub", uid=uid)
    put(saver, {}, uid="4")

    assert list_checkpoint_ids(saver, config_at(ns="sub"), before=config_at(uid="4")) == ["3", "1"]
    assert list_checkpoint_ids(saver, config_at(ns="sub"), before=config_at(uid="3")) == ["1", "5"]
    assert list_checkpoint_ids(saver, config_at(ns="sub"), before=config_at(uid="0")) == []


def test_a_filter_with_dots_names_a_value_within_a_dict(saver: SQLiteCheckpointer) -> None:
    """`a.b` is the key of that name, or else `b` within `a`; alone, and beside an indexed one."""
    put(saver, {}, metadata={"user": {"level": 1, "at": {"home": "x"}}, "k": 1}, uid="deep")
    put(saver, {}, metadata={"user.level": 1, "user": {"level": 2}, "k": 1}, uid="flat")
    put(saver, {}, metadata={"user": "level", "k": 2}, uid="text")

    assert list_checkpoint_ids(saver, config_at(), filter={"user.level": 1}) == ["flat", "deep"]
    assert list_checkpoint_ids(saver, config_at(), filter={"user.level": 2}) == []
    assert list_checkpoint_ids(saver, config_at(), filter={"user.at.home": "x", "k": 1}) == ["deep"]
    assert list_checkpoint_ids(saver, config_at(), filter={"user.at.home": "x", "k": 2}) == []
    assert list_checkpoint_ids(saver, None, filter={"user.level": 1}) == ["flat", "deep"]


def test_the_head_of_each_namespace_comes_first(saver: SQLiteCheckpointer) -> None:
    """Namespaces are merged by when they were put; within each, its head comes first."""
    for uid, ns in (("1", ""), ("2", "sub"), ("3", ""), ("4", "sub"), ("5", "")):
        put(saver, {}, ns=ns, uid=uid, metadata={"odd": int(uid) % 2})
    every: Any = {"configurable": {"thread_id": "t"}}
    straight = list_checkpoint_ids(saver, every)
    saver.rewind("t", "1")

    assert straight == ["5", "4", "3", "2", "1"]
    assert list_checkpoint_ids(saver, every) == ["1", "5", "4", "3", "2"]
    assert list_checkpoint_ids(saver, config_at()) == ["1", "5", "3"]
    assert list_checkpoint_ids(saver, every, before=config_at(uid="5")) == ["4", "1", "3", "2"]
    assert list_checkpoint_ids(saver, every, filter={"odd": 0}) == ["4", "2"]
    assert list_checkpoint_ids(saver, every, filter={"odd": 1}, limit=2) == ["1", "5"]


def test_many_checkpoints_come_in_pages(saver: SQLiteCheckpointer) -> None:
    """A thread longer than a page is listed whole and in order."""
    ids = [checkpoint_id_of(put(saver, {}, metadata={"odd": bool(i % 2)})) for i in range(300)]

    assert ids[::-1] == list_checkpoint_ids(saver, config_at())
    assert ids[1::2][::-1] == list_checkpoint_ids(saver, config_at(), filter={"odd": True})
    assert [info.checkpoint_id for info in saver.checkpoints("t", limit=280)] == ids[20:][::-1]


def test_order_is_that_of_putting(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither ids that sort the other way nor a clock that is set back changes head or order."""
    now = time.time()
    parent = None
    for i, uid in enumerate(["z", "m", "00000000-0000-0000-0000-000000000001", "a"]):
        monkeypatch.setattr(time, "time", lambda i=i: now - 86400 * i)
        parent = put(saver, {"n": i}, parent, uid=uid)
    found = saver.get_tuple(config_at())

    assert list_checkpoint_ids(saver, config_at()) == [
        "a",
        "00000000-0000-0000-0000-000000000001",
        "m",
        "z",
    ]
    assert found is not None
    assert parent == found.config
    assert [info.order for info in saver.checkpoints("t")] == [4, 3, 2, 1]


def test_a_listing_survives_what_happens_meanwhile(saver: SQLiteCheckpointer) -> None:
    """Checkpoints deleted while a listing goes on are left out, and those put later too."""
    ids = [checkpoint_id_of(put(saver, {})) for _ in range(4)]
    found = saver.list(config_at())
    first = next(found)
    put(saver, {})
    saver.prune(["t"])

    assert ids[3] == checkpoint_id_of(first.config)
    assert list(found) == []


def test_threads_by_latest_activity(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread last written to leads, and pages follow one another without gap or repeat."""
    now = time.time()
    for i in range(7):
        monkeypatch.setattr(time, "time", lambda i=i: now + i)
        put(saver, {}, thread=f"t{i}")
    monkeypatch.setattr(time, "time", lambda: now + 10)
    saver.put_writes(config_at("t2", uid="x"), [("a", 1)], "task")
    pages, after = [], None
    while page := saver.threads(limit=3, after=after):
        pages.append([info.thread_id for info in page])
        after = page[-1].thread_id

    assert pages == [["t2", "t6", "t5"], ["t4", "t3", "t1"], ["t0"]]


def test_a_task_that_asks_once_more_is_an_activity(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote before is replaced, by a second plan: the first one told nobody."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    config = put(saver, {})
    for later in (0, 10, 20):
        monkeypatch.setattr(time, "time", lambda later=later: now + later)
        saver.put_writes(config, [("__interrupt__", [])], "task")

        assert saver.threads()[0].updated_at.timestamp() == pytest.approx(now + later, abs=1e-3)


def test_threads_of_one_moment(saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads last written to at the very same time are paged, each once."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for i in range(5):
        put(saver, {}, thread=f"t{i}")
    first = [info.thread_id for info in saver.threads(limit=2)]
    rest = [info.thread_id for info in saver.threads(after=first[-1])]

    assert first + rest == ["t4", "t3", "t2", "t1", "t0"]


def test_threads_by_prefix(saver: SQLiteCheckpointer) -> None:
    """A prefix is taken literally, letter for letter."""
    for name in ("user:1", "user:2", "USER:3", "us_r:4", "üser:5"):
        put(saver, {}, thread=name)

    assert [info.thread_id for info in saver.threads(prefix="user:")] == ["user:2", "user:1"]
    assert [info.thread_id for info in saver.threads(prefix="us_")] == ["us_r:4"]
    assert [info.thread_id for info in saver.threads(prefix="ü")] == ["üser:5"]
    assert saver.threads(prefix="%") == []


def test_what_a_thread_is_said_to_hold(saver: SQLiteCheckpointer) -> None:
    """Checkpoints of all namespaces, items once each, bytes that grow, and times in UTC."""
    first = put(saver, {"long": "x" * 500})
    before = saver.thread("t")
    put(saver, {"long": "x" * 500}, first)
    put(saver, {"long": "x" * 500}, ns="sub")
    info = saver.thread("t")

    assert [info] == saver.threads()
    assert (info.checkpoints, info.items, info.namespaces) == (3, 1, ("", "sub"))
    assert 500 < before.size_bytes < info.size_bytes < 2 * before.size_bytes
    assert before.created_at == info.created_at <= info.updated_at
    assert info.created_at.tzinfo is not None


def test_equal_elements_are_one_item(saver: SQLiteCheckpointer) -> None:
    """A list that says the same often stores it once, and reads as it was put."""
    notes = ["x" * 50, "y" * 50] * 40
    first = put(saver, {"notes": notes})
    put(saver, {"notes": [*notes, "x" * 50]}, first)

    assert saver.thread("t").items == 2
    assert read_channel_values(saver, first) == {"notes": notes}
    assert read_channel_values(saver, config_at()) == {"notes": [*notes, "x" * 50]}
    assert [i.value[0] for i in saver.history("t", channel="notes")] == ["x", "y"]


def test_what_threads_refuses(saver: SQLiteCheckpointer) -> None:
    """A page of nothing, a page after nobody and a thread that is not there are errors."""
    with pytest.raises(ConfigurationError, match="limit"):
        saver.threads(limit=0)
    with pytest.raises(UnknownThread, match="nobody"):
        saver.threads(after="nobody")
    with pytest.raises(UnknownThread, match="nobody"):
        saver.thread("nobody")
    with pytest.raises(UnknownThread, match="nobody"):
        saver.checkpoints("nobody")


def test_the_tree_of_a_thread(saver: SQLiteCheckpointer) -> None:
    """Every checkpoint with its parent, metadata and counts; one head in each namespace."""
    root = put(saver, {"n": 1}, uid="root", metadata={"source": "input", "k": {"x": 1}})
    put(saver, {"notes": ["x" * 99] * 2}, root, uid="left")
    put(saver, {}, root, uid="right")
    put(saver, {}, ns="sub", uid="below")
    infos = saver.checkpoints("t")
    found = saver.get_tuple(root)

    assert [(i.checkpoint_id, i.parent_id, i.checkpoint_ns, i.is_head) for i in infos] == [
        ("below", None, "sub", True),
        ("right", "root", "", True),
        ("left", "root", "", False),
        ("root", None, "", False),
    ]
    assert found is not None
    assert (found.metadata, found.checkpoint["ts"]) == (infos[3].metadata, infos[3].ts)
    assert infos[2].counts == {"notes": 2}
    assert [i.checkpoint_id for i in saver.checkpoints("t", checkpoint_ns="sub")] == ["below"]
    assert [i.checkpoint_id for i in saver.checkpoints("t", limit=1)] == ["below", "right"]
    assert saver.checkpoints("t", checkpoint_ns="no") == []


def test_heads_and_threads_that_were_active_since(saver: SQLiteCheckpointer) -> None:
    """Heads say where each thread stands and what its run was given; old ones are left out."""
    for number in range(5):
        put(
            saver,
            {},
            metadata={"user_id": f"u{number}"},
            uid=f"first {number}",
            thread=f"t{number}",
        )
        put(saver, {}, metadata={"user_id": "ann"}, uid=f"last {number}", thread=f"t{number}")
    page = saver.heads(limit=3)
    heads = [*page, *saver.heads(limit=3, after=page[-1].thread_id)]

    assert [info.thread_id for info in saver.threads()] == [head.thread_id for head in heads]
    assert {f"last {number}" for number in range(5)} == {head.checkpoint_id for head in heads}
    assert {"ann"} == {head.metadata["user_id"] for head in heads}
    later = heads[0].updated_at + timedelta(seconds=1)
    assert saver.heads(active_since=later) == []
    assert saver.threads(active_since=later) == []
    assert len(saver.heads(active_since=heads[-1].updated_at)) == 5
    assert [saver.head(head.thread_id) for head in heads] == heads
    assert all(head.created_at <= head.updated_at for head in heads)
    put(saver, {}, metadata={"user_id": "bob", "n": 1, "of": {"n": 1}}, uid="z", thread="t3")
    put(saver, {}, metadata={"user_id": "bob", "n": 2}, uid="z", thread="t0")
    assert {"t0", "t3"} == {head.thread_id for head in saver.heads(filter={"user_id": "bob"})}
    assert {"t1", "t2", "t4"} == {head.thread_id for head in saver.heads(filter={"user_id": "ann"})}
    for where in ({"n": 1, "user_id": "bob"}, {"n": 1}, {"of.n": 1}):
        assert [head.thread_id for head in saver.heads(limit=1, filter=where)] == ["t3"]
    assert saver.heads(filter={"user_id": "u1"}) == []
    assert saver.head("no") is None
    with pytest.raises(ConfigurationError, match="time zone"):
        saver.heads(active_since=later.replace(tzinfo=None))


def test_usage_lists_the_largest_threads(saver: SQLiteCheckpointer) -> None:
    """The threads with the most bytes come first, as `thread` describes them."""
    assert saver.usage().largest == ()
    for name, text in (("small", "a"), ("large", "b" * 9_000), ("medium", "c" * 3_000)):
        put(saver, {"messages": [text]}, thread=name, uid=name)

    usage = saver.usage(limit=2)

    assert usage.largest == (saver.thread("large"), saver.thread("medium"))
    assert usage.by_month == {f"{saver.thread('large').created_at:%Y-%m}": 3}


def test_what_is_known_of_a_conversation(saver: SQLiteCheckpointer) -> None:
    """An import's title stays known when another program goes on with the thread."""
    asked = [HumanMessage(["What is a pond?", {"type": "text", "text": ""}], id="1")]
    given = {"title": 5, "titled": True, "model": "m", "other": 1}
    put(saver, {"messages": asked}, metadata=given, thread="imported")
    put(saver, {"messages": asked}, metadata={}, thread="imported", uid="later")
    put(saver, {"messages": asked}, metadata={}, thread="plain")
    put(saver, {"notes": ["x"]}, metadata={}, thread="silent")

    assert read_import_metadata(saver, "imported") == {"title": "5", "model": "m"}
    assert read_import_metadata(saver, "plain") == {}
    assert read_import_metadata(saver, "plain", {"title": "given"}) == {"title": "given"}
    assert [title(saver, each) for each in ("imported", "plain", "silent", "no")] == [
        "5",
        "What is a pond?",
        "",
        "",
    ]
    with pytest.raises(UnknownThread):
        read_import_metadata(saver, "no")


def test_the_beginning_of_an_id_is_of_no_other(saver: SQLiteCheckpointer) -> None:
    """It has at least so many characters, finds its thread alone, and is whole where need be."""
    ids = ["aaaa-1", "aaaa-2", "aaaa-22", "b", "größe-1", "größe-2", "große", "c" * 40]
    for thread in ids:
        put(saver, {}, thread=thread)
    short = {thread: saver.unique_prefix(thread, 1) for thread in ids}
    mine = {thread: [i.thread_id for i in saver.threads(prefix=short[thread])] for thread in ids}

    assert list(short.values()) == [*ids[:5], "größe-2", "gro", "c"]
    assert mine == {thread: [thread] for thread in ids} | {"aaaa-2": ["aaaa-22", "aaaa-2"]}
    assert saver.unique_prefix("c" * 40) == "c" * 8
    assert saver.unique_prefix("cd", 1) == "cd"
