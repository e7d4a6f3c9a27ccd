"""`list()`, `threads()`, `heads()` and `checkpoints()`: selection, order and pages."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from perdure.checkpointers import SQLiteCheckpointer, read_import_metadata, title
from perdure.errors import ConfigurationError, UnknownThread
from tests.backends import BACKENDS
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
def test_metadata_filter_matches_as_in_langgraph_memory_saver(
    saver: SQLiteCheckpointer, value: Any
) -> None:
    """A filter matches equal values, also nested ones."""
    memory = InMemorySaver()
    for checkpointer in (saver, memory):
        for number, stored_value in enumerate(VALUES):
            put(checkpointer, {}, metadata={"k": stored_value}, uid=f"{number:03}")
        put(checkpointer, {}, uid="without")
    for thread in (None, config_at("t"), {"configurable": {"thread_id": "t"}}):
        expected = sorted(list_checkpoint_ids(memory, thread, filter={"k": value}))

        assert expected == sorted(list_checkpoint_ids(saver, thread, filter={"k": value}))


def test_list_returns_checkpoints_that_match_all_filters(saver: SQLiteCheckpointer) -> None:
    """Filters on indexed and other values can be combined, and the order stays."""
    for i in range(8):
        metadata = {"even": i % 2 == 0, "deep": {"third": i % 3}, "source": "input"}
        put(saver, {}, metadata=metadata, uid=str(i))

    assert list_checkpoint_ids(saver, config_at(), filter={"even": True, "deep": {"third": 0}}) == [
        "6",
        "0",
    ]
    assert list_checkpoint_ids(
        saver, config_at(), filter={"even": True, "deep": {"third": 0}}, limit=1
    ) == ["6"]
    assert list_checkpoint_ids(saver, config_at(), filter={"even": True, "source": "loop"}) == []


@pytest.mark.parametrize("backend", ["file", "sealed", "langgraph-encrypted"])
def test_filters_find_checkpoints_that_another_process_stored(backend: str, tmp_path: Path) -> None:
    """A saver that is opened later stands for another process, which has its own hash key."""
    with BACKENDS[backend](tmp_path) as first:
        put(first, {}, metadata={"k": 1, "run_id": "r"}, uid="a")
    with BACKENDS[backend](tmp_path) as second:
        for thread in (None, config_at("t")):
            assert list_checkpoint_ids(second, thread, filter={"k": 1}) == ["a"]
        assert [head.thread_id for head in second.heads(filter={"k": 1})] == ["t"]
        second.delete_for_runs(["r"])

        assert list_checkpoint_ids(second, None) == []
        put(second, {}, metadata={"k": 1}, uid="b")
        assert list_checkpoint_ids(second, None, filter={"k": 1}) == ["b"]


def test_filters_follow_deletions_prunes_copies_and_replacements(saver: SQLiteCheckpointer) -> None:
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


def test_list_applies_before_and_limit(saver: SQLiteCheckpointer) -> None:
    """`before` excludes its own checkpoint, and `limit` counts the matches."""
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


def test_list_returns_one_namespace_one_thread_or_all_threads(saver: SQLiteCheckpointer) -> None:
    """A config without a namespace lists the whole thread in one order.

    Without a config, all threads are listed.
    """
    put(saver, {}, uid="1")
    put(saver, {}, ns="sub", uid="2")
    put(saver, {}, uid="3")
    put(saver, {}, thread="other", uid="4")
    whole_thread: Any = {"configurable": {"thread_id": "t"}}

    assert list_checkpoint_ids(saver, config_at()) == ["3", "1"]
    assert list_checkpoint_ids(saver, config_at(ns="sub")) == ["2"]
    assert list_checkpoint_ids(saver, whole_thread) == ["3", "2", "1"]
    assert list_checkpoint_ids(saver, whole_thread, before=config_at(uid="3")) == ["2", "1"]
    assert set(list_checkpoint_ids(saver, None, before=config_at("other", uid="4"))) == {
        "1",
        "2",
        "3",
    }
    assert list_checkpoint_ids(saver, None, before=config_at("other", uid="2")) == ["1"]
    assert {"1", "2", "3", "4"} == set(list_checkpoint_ids(saver, None))
    assert len(list_checkpoint_ids(saver, None, limit=2)) == 2
    assert list_checkpoint_ids(saver, config_at("nobody")) == []


def test_list_returns_explicit_head_first_and_only_once(saver: SQLiteCheckpointer) -> None:
    """The head is left out if the filter does not match it."""
    for i in range(4):
        put(saver, {}, metadata={"even": i % 2 == 0}, uid=f"{i}")
    saver.rewind("t", "1")
    whole_thread: Any = {"configurable": {"thread_id": "t"}}
    put(saver, {}, ns="sub", uid="below")

    assert list_checkpoint_ids(saver, config_at()) == ["1", "3", "2", "0"]
    assert list_checkpoint_ids(saver, config_at(), limit=2) == ["1", "3"]
    assert list_checkpoint_ids(saver, config_at(), filter={"even": True}) == ["2", "0"]
    assert list_checkpoint_ids(saver, config_at(), filter={"even": False}) == ["1", "3"]
    assert list_checkpoint_ids(saver, config_at(), before=config_at(uid="1")) == ["0"]
    assert list_checkpoint_ids(saver, config_at(), before=config_at(uid="3")) == ["1", "2", "0"]
    assert list_checkpoint_ids(saver, whole_thread) == ["below", "1", "3", "2", "0"]


def test_list_before_id_of_another_namespace_compares_ids(saver: SQLiteCheckpointer) -> None:
    """langgraph's savers compare ids too. Within a namespace, the order of puts counts."""
    for uid in ("5", "1", "3"):
        put(saver, {}, ns="sub", uid=uid)
    put(saver, {}, uid="4")

    assert list_checkpoint_ids(saver, config_at(ns="sub"), before=config_at(uid="4")) == ["3", "1"]
    assert list_checkpoint_ids(saver, config_at(ns="sub"), before=config_at(uid="3")) == ["1", "5"]
    assert list_checkpoint_ids(saver, config_at(ns="sub"), before=config_at(uid="0")) == []


def test_filter_with_dots_matches_value_within_dict(saver: SQLiteCheckpointer) -> None:
    """`a.b` is the key of that name, or else the key `b` within `a`."""
    put(saver, {}, metadata={"user": {"level": 1, "at": {"home": "x"}}, "k": 1}, uid="deep")
    put(saver, {}, metadata={"user.level": 1, "user": {"level": 2}, "k": 1}, uid="flat")
    put(saver, {}, metadata={"user": "level", "k": 2}, uid="text")

    assert list_checkpoint_ids(saver, config_at(), filter={"user.level": 1}) == ["flat", "deep"]
    assert list_checkpoint_ids(saver, config_at(), filter={"user.level": 2}) == []
    assert list_checkpoint_ids(saver, config_at(), filter={"user.at.home": "x", "k": 1}) == ["deep"]
    assert list_checkpoint_ids(saver, config_at(), filter={"user.at.home": "x", "k": 2}) == []
    assert list_checkpoint_ids(saver, None, filter={"user.level": 1}) == ["flat", "deep"]


def test_list_of_thread_returns_head_of_each_namespace_first(saver: SQLiteCheckpointer) -> None:
    """Namespaces are merged in the order of puts. Within each namespace, its head comes first."""
    for uid, ns in (("1", ""), ("2", "sub"), ("3", ""), ("4", "sub"), ("5", "")):
        put(saver, {}, ns=ns, uid=uid, metadata={"odd": int(uid) % 2})
    whole_thread: Any = {"configurable": {"thread_id": "t"}}
    ids_before_rewind = list_checkpoint_ids(saver, whole_thread)
    saver.rewind("t", "1")

    assert ids_before_rewind == ["5", "4", "3", "2", "1"]
    assert list_checkpoint_ids(saver, whole_thread) == ["1", "5", "4", "3", "2"]
    assert list_checkpoint_ids(saver, config_at()) == ["1", "5", "3"]
    assert list_checkpoint_ids(saver, whole_thread, before=config_at(uid="5")) == [
        "4",
        "1",
        "3",
        "2",
    ]
    assert list_checkpoint_ids(saver, whole_thread, filter={"odd": 0}) == ["4", "2"]
    assert list_checkpoint_ids(saver, whole_thread, filter={"odd": 1}, limit=2) == ["1", "5"]


def test_thread_longer_than_page_is_listed_completely(saver: SQLiteCheckpointer) -> None:
    """All checkpoints are listed in order."""
    ids = [checkpoint_id_of(put(saver, {}, metadata={"odd": bool(i % 2)})) for i in range(300)]

    assert ids[::-1] == list_checkpoint_ids(saver, config_at())
    assert ids[1::2][::-1] == list_checkpoint_ids(saver, config_at(), filter={"odd": True})
    assert [info.checkpoint_id for info in saver.checkpoints("t", limit=280)] == ids[20:][::-1]


def test_list_has_order_of_puts(saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the order of ids nor a clock that is set back changes the head or the order."""
    now = time.time()
    parent = None
    for i, uid in enumerate(["z", "m", "00000000-0000-0000-0000-000000000001", "a"]):
        monkeypatch.setattr(time, "time", lambda i=i: now - 86400 * i)
        parent = put(saver, {"n": i}, parent, uid=uid)
    head = saver.get_tuple(config_at())

    assert list_checkpoint_ids(saver, config_at()) == [
        "a",
        "00000000-0000-0000-0000-000000000001",
        "m",
        "z",
    ]
    assert head is not None
    assert parent == head.config
    assert [info.order for info in saver.checkpoints("t")] == [4, 3, 2, 1]


def test_list_leaves_out_checkpoints_deleted_or_put_during_iteration(
    saver: SQLiteCheckpointer,
) -> None:
    ids = [checkpoint_id_of(put(saver, {})) for _ in range(4)]
    listing = saver.list(config_at())
    first = next(listing)
    put(saver, {})
    saver.prune(["t"])

    assert ids[3] == checkpoint_id_of(first.config)
    assert list(listing) == []


def test_threads_are_listed_by_latest_activity_in_pages(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages have each thread once."""
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


def test_repeated_interrupt_of_task_updates_activity_of_thread(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second interrupt replaces the stored write of the first."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    config = put(saver, {})
    for later in (0, 10, 20):
        monkeypatch.setattr(time, "time", lambda later=later: now + later)
        saver.put_writes(config, [("__interrupt__", [])], "task")

        assert saver.threads()[0].updated_at.timestamp() == pytest.approx(now + later, abs=1e-3)


def test_threads_updated_at_same_time_are_each_listed_once(
    saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for i in range(5):
        put(saver, {}, thread=f"t{i}")
    first_page = [info.thread_id for info in saver.threads(limit=2)]
    second_page = [info.thread_id for info in saver.threads(after=first_page[-1])]

    assert first_page + second_page == ["t4", "t3", "t2", "t1", "t0"]


def test_threads_match_prefix_literally(saver: SQLiteCheckpointer) -> None:
    """No character is a wildcard, and upper and lower case differ."""
    for name in ("user:1", "user:2", "USER:3", "us_r:4", "üser:5"):
        put(saver, {}, thread=name)

    assert [info.thread_id for info in saver.threads(prefix="user:")] == ["user:2", "user:1"]
    assert [info.thread_id for info in saver.threads(prefix="us_")] == ["us_r:4"]
    assert [info.thread_id for info in saver.threads(prefix="ü")] == ["üser:5"]
    assert saver.threads(prefix="%") == []


def test_thread_reports_counts_sizes_and_times(saver: SQLiteCheckpointer) -> None:
    """Checkpoints are those of all namespaces, each item is counted once, and times are in UTC."""
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


def test_equal_elements_of_list_are_stored_once(saver: SQLiteCheckpointer) -> None:
    """The list is read as it was put."""
    notes = ["x" * 50, "y" * 50] * 40
    first = put(saver, {"notes": notes})
    put(saver, {"notes": [*notes, "x" * 50]}, first)

    assert saver.thread("t").items == 2
    assert read_channel_values(saver, first) == {"notes": notes}
    assert read_channel_values(saver, config_at()) == {"notes": [*notes, "x" * 50]}
    assert [i.value[0] for i in saver.history("t", channel="notes")] == ["x", "y"]


def test_threads_refuses_invalid_limit_and_unknown_thread(saver: SQLiteCheckpointer) -> None:
    with pytest.raises(ConfigurationError, match="limit"):
        saver.threads(limit=0)
    with pytest.raises(UnknownThread, match="nobody"):
        saver.threads(after="nobody")
    with pytest.raises(UnknownThread, match="nobody"):
        saver.thread("nobody")
    with pytest.raises(UnknownThread, match="nobody"):
        saver.checkpoints("nobody")


def test_checkpoints_lists_parents_metadata_counts_and_heads(saver: SQLiteCheckpointer) -> None:
    """Each namespace has one head."""
    root = put(saver, {"n": 1}, uid="root", metadata={"source": "input", "k": {"x": 1}})
    put(saver, {"notes": ["x" * 99] * 2}, root, uid="left")
    put(saver, {}, root, uid="right")
    put(saver, {}, ns="sub", uid="below")
    infos = saver.checkpoints("t")
    stored_root = saver.get_tuple(root)

    assert [(i.checkpoint_id, i.parent_id, i.checkpoint_ns, i.is_head) for i in infos] == [
        ("below", None, "sub", True),
        ("right", "root", "", True),
        ("left", "root", "", False),
        ("root", None, "", False),
    ]
    assert stored_root is not None
    assert (stored_root.metadata, stored_root.checkpoint["ts"]) == (infos[3].metadata, infos[3].ts)
    assert infos[2].counts == {"notes": 2}
    assert [i.checkpoint_id for i in saver.checkpoints("t", checkpoint_ns="sub")] == ["below"]
    assert [i.checkpoint_id for i in saver.checkpoints("t", limit=1)] == ["below", "right"]
    assert saver.checkpoints("t", checkpoint_ns="no") == []


def test_heads_are_filtered_by_activity_and_metadata(saver: SQLiteCheckpointer) -> None:
    """`threads` and `heads` list the same threads in the same order."""
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
    for filter in ({"n": 1, "user_id": "bob"}, {"n": 1}, {"of.n": 1}):
        assert [head.thread_id for head in saver.heads(limit=1, filter=filter)] == ["t3"]
    assert saver.heads(filter={"user_id": "u1"}) == []
    assert saver.head("no") is None
    with pytest.raises(ConfigurationError, match="time zone"):
        saver.heads(active_since=later.replace(tzinfo=None))


def test_usage_lists_largest_threads_first(saver: SQLiteCheckpointer) -> None:
    assert saver.usage().largest == ()
    for name, text in (("small", "a"), ("large", "b" * 9_000), ("medium", "c" * 3_000)):
        put(saver, {"messages": [text]}, thread=name, uid=name)

    usage = saver.usage(limit=2)

    assert usage.largest == (saver.thread("large"), saver.thread("medium"))
    assert usage.by_month == {f"{saver.thread('large').created_at:%Y-%m}": 3}


def test_import_metadata_of_thread_survives_later_puts(saver: SQLiteCheckpointer) -> None:
    """The title of an import stays when another program continues the thread."""
    messages = [HumanMessage(["What is a pond?", {"type": "text", "text": ""}], id="1")]
    import_metadata = {"title": 5, "titled": True, "model": "m", "other": 1}
    put(saver, {"messages": messages}, metadata=import_metadata, thread="imported")
    put(saver, {"messages": messages}, metadata={}, thread="imported", uid="later")
    put(saver, {"messages": messages}, metadata={}, thread="plain")
    put(saver, {"notes": ["x"]}, metadata={}, thread="silent")

    assert read_import_metadata(saver, "imported") == {"title": "5", "model": "m"}
    assert read_import_metadata(saver, "plain") == {}
    assert read_import_metadata(saver, "plain", {"title": "given"}) == {"title": "given"}
    assert [title(saver, thread_id) for thread_id in ("imported", "plain", "silent", "no")] == [
        "5",
        "What is a pond?",
        "",
        "",
    ]
    with pytest.raises(UnknownThread):
        read_import_metadata(saver, "no")


def test_unique_prefix_matches_only_its_thread(saver: SQLiteCheckpointer) -> None:
    """The prefix has at least the given length.

    If no shorter prefix is unique, the whole id is returned.
    """
    ids = ["aaaa-1", "aaaa-2", "aaaa-22", "b", "größe-1", "größe-2", "große", "c" * 40]
    for thread in ids:
        put(saver, {}, thread=thread)
    prefixes = {thread: saver.unique_prefix(thread, 1) for thread in ids}
    matches = {
        thread: [i.thread_id for i in saver.threads(prefix=prefixes[thread])] for thread in ids
    }

    assert list(prefixes.values()) == [*ids[:5], "größe-2", "gro", "c"]
    assert matches == {thread: [thread] for thread in ids} | {"aaaa-2": ["aaaa-22", "aaaa-2"]}
    assert saver.unique_prefix("c" * 40) == "c" * 8
    assert saver.unique_prefix("cd", 1) == "cd"
