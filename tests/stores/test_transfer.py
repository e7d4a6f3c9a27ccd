"""Export and import: any history can be exported to JSON Lines and imported again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import ImportFailed
from perdure.stores import Provenance, SQLiteStore, TransferReport, VersionRetention, transfer
from tests.backends import KEY
from tests.rounds import rounds
from tests.store_backends import Clock, list_item_keys, make_options, open_store

A = ("a",)
NOW = 1_700_000_000.0

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
)
parts = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
provenances = st.none() | st.builds(
    Provenance,
    thread_id=st.none() | text,
    message_ids=st.lists(text.filter(bool), max_size=2).map(tuple),
    actor=st.none() | text,
    position=st.none() | st.integers(-5, 5),
    at=st.none() | st.datetimes(timezones=st.just(UTC)),
)
labels = st.sampled_from(["a", "b", "*", ".", "ü", "a.b"])
operation_lists = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.lists(labels, min_size=1, max_size=2).map(tuple),
            st.sampled_from(["k", "k0", "ключ"]),
            st.dictionaries(text, parts, max_size=3),
            st.sampled_from([None, False, ["text"], ["a", "b[*].c"]]),
            st.sampled_from([None, None, 0.5, 1.0, 1 / 3, 60.0]),
            provenances,
        ),
        st.tuples(
            st.just("delete"),
            st.lists(labels, min_size=1, max_size=1).map(tuple),
            st.sampled_from(["k", "k0", "ключ"]),
        ),
        st.tuples(st.just("forward"), st.sampled_from([0.000001, 1.0, 30.0, 45.0, -5.0])),
        st.tuples(st.just("sweep")),
        st.tuples(st.just("retain"), st.integers(0, 2)),
    ),
    max_size=14,
)


@contextmanager
def open_memory_store(clock: Clock, **options: Any) -> Iterator[SQLiteStore]:
    with open_store(":memory:", clock=clock, **make_options(index=None, **options)) as store:
        yield store


def apply_operations(store: SQLiteStore, clock: Clock, operations: list[Any]) -> None:
    """Apply a list of operations to a store and its clock."""
    for kind, *args in operations:
        if kind == "put":
            space, key, value, index, ttl, provenance = args
            store.put(space, key, value, index, ttl=ttl, provenance=provenance)
        elif kind == "delete":
            store.delete(*args)
        elif kind == "forward":
            clock.forward(*args)
        elif kind == "sweep":
            store.sweep_ttl()
        else:
            store.retain(VersionRetention(last=args[0]))


def export_lines(store: SQLiteStore) -> list[str]:
    """Return the exported lines of a store."""
    return [json.dumps(line, ensure_ascii=False) for line in store.export()]


@settings(max_examples=rounds(60), deadline=None)
@given(operation_lists, st.sampled_from([None, KEY]))
def test_import_restores_any_exported_history(course: list[Any], key: bytes | None) -> None:
    """A second import of the same lines adds nothing."""
    clock = Clock(NOW)
    with open_memory_store(clock) as source, open_memory_store(clock, key=key) as target:
        apply_operations(source, clock, course)
        lines = export_lines(source)
        report = target.import_lines(lines)
        counts = source.stats(), target.stats()
        again = target.import_lines(lines)

        assert lines == export_lines(target)
        assert len(lines) == report.items + report.versions
        assert TransferReport(skipped=len(lines)) == again
        places = {(tuple(line["namespace"]), line["key"]) for line in map(json.loads, lines)}
        for place in places:
            histories = [
                [(v.version, v.value, v.created_at, v.valid_from, v.provenance) for v in history]
                for history in (source.history(*place), target.history(*place))
            ]
            assert histories[0] == histories[1]
        assert source.list_namespaces() == target.list_namespaces()
        assert [c.versions + c.items for c in counts] == [len(lines)] * 2


@settings(max_examples=rounds(25), deadline=None)
@given(operation_lists, operation_lists)
def test_import_of_second_export_adds_new_versions(course: list[Any], later: list[Any]) -> None:
    clock = Clock(NOW)
    later = [step for step in later if step[0] in ("put", "forward")]
    with open_memory_store(clock) as source, open_memory_store(clock) as target:
        apply_operations(source, clock, course)
        target.import_lines(export_lines(source))
        clock.forward(5)
        apply_operations(source, clock, later)
        target.import_lines(export_lines(source))

        assert read_present_items(source) == read_present_items(target)


def read_present_items(store: SQLiteStore) -> dict[Any, Any]:
    """Return the version and the value of each present item."""
    return {(i.namespace, i.key): (i.version, i.value) for i in store.search((), limit=999)}


def test_export_and_import_in_small_pages_equal_those_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress callback is called for each batch."""
    clock, progress_calls = Clock(NOW), list[tuple[int, int | None]]()
    with open_memory_store(clock) as source, open_memory_store(clock) as target:
        for n in range(7):
            for turn in range(3):
                source.put(("s", str(n % 2)), f"k{n}", {"n": n, "turn": turn})
            clock.forward()
        source.delete(("s", "0"), "k4")
        source.put(("sx",), "outside", {})
        whole = export_lines(source)
        monkeypatch.setattr(transfer, "PAGE", 2)
        pages = export_lines(source)
        report = target.import_lines(
            pages, progress=lambda done, of: progress_calls.append((done, of))
        )
        part = [line["key"] for line in source.export(("s", "1"), versions=False)]
        no_versions = [line["key"] for line in source.export(("s",), versions=False)]

        assert whole == pages == export_lines(target)
        assert TransferReport(items=7, versions=15) == report
        assert [(done, None) for done in range(2, 23, 2)] == progress_calls
        assert part == ["k1", "k3", "k5"]
        assert ["k0", "k2", "k6", *part] == no_versions


def test_async_export_and_import_equal_blocking_ones(tmp_path: Path) -> None:
    clock = Clock(NOW)

    async def run(source: SQLiteStore, target: SQLiteStore) -> tuple[list[str], Any, Any, Any]:
        lines = [json.dumps(line) async for line in source.aexport()]
        some = [line["key"] async for line in source.aexport(A, versions=False)]
        report = await target.aimport_lines(lines)
        own = await target.aimport_lines(['{"text": "mine"}'], namespace=("own",))
        return lines, some, report, own

    with open_memory_store(clock) as source, open_memory_store(clock) as target:
        for n in range(3):
            source.put(A, "k", {"n": n})
            source.put(("b",), f"k{n}", {"n": n})
        lines, some, report, own = asyncio.run(run(source, target))

        assert [json.dumps(line) for line in source.export()] == lines
        assert (["k"], TransferReport(4, 2), TransferReport(1)) == (some, report, own)
        assert lines == [json.dumps(line) for line in target.export() if "own" not in str(line)]


def test_imported_items_are_found_by_words_and_vectors(tmp_path: Path) -> None:
    """If the embedder fails, an imported item is found by its words and is pending."""
    options = make_options()
    lines = [
        json.dumps({"namespace": ["a"], "key": f"k{n}", "value": {"text": t}})
        for n, t in enumerate(("my car", "tea"))
    ]
    unsearched = '{"namespace": ["a"], "key": "no", "value": {"text": "tea"}, "index": false}'
    with SQLiteStore.open(tmp_path / "x.db", **options) as store:
        store.import_lines([*lines, unsearched])
        found_keys = list_item_keys(store.search(A, query="automobile", limit=1, mode="semantic"))
        options["index"]["embed"].failing = True
        store.import_lines(['{"namespace": ["a"], "key": "new", "value": {"text": "herb tea"}}'])
        waiting = [each.key for each in store.pending_embeddings()]
        by_text = list_item_keys(store.search(A, query="tea", mode="text"))

    assert (found_keys, waiting, sorted(by_text)) == (["k0"], ["new"], ["k1", "new"])


def test_import_of_bare_values_uses_namespace_and_content_key(file_store: SQLiteStore) -> None:
    """A line without namespace and value is a value.

    Its key is its field `key`, or a hash of the content.
    """
    lines = ['{"text": "tea"}', "", '{"key": "named", "text": "milk"}', '{"key": null}', "  \n"]
    addressed = '{"namespace": ["b"], "key": "k", "value": {"text": "elsewhere"}}'
    report = file_store.import_lines([*lines, addressed, '{"value": {"n": 1}}'], namespace=A)
    again = file_store.import_lines([*lines, '{"value": {"n": 1}}'], namespace=A)
    changed = file_store.import_lines(['{"key": "named", "text": "cream"}'], namespace=A)
    values = {item.key: item.value for item in file_store.search(A)}

    assert (TransferReport(5), TransferReport(skipped=4)) == (report, again)
    assert TransferReport(1) == changed
    assert values["named"] == {"key": "named", "text": "cream"}
    assert sorted((value for key, value in values.items() if len(key) == 24), key=str) == [
        {"key": None},
        {"n": 1},
        {"text": "tea"},
    ]
    assert [item.version for item in file_store.history(A, "named")] == [1, 2]
    with pytest.raises(ImportFailed, match="line 1: the line has no field 'namespace'"):
        file_store.import_lines(['{"text": "tea"}'])
    with pytest.raises(ImportFailed, match=r"line 1: the key is 7; expected a JSON string"):
        file_store.import_lines(['{"key": 7}'], namespace=A)


def test_import_of_contradicting_version_is_refused(file_store: SQLiteStore) -> None:
    """A version number that exists with another value or provenance stops the import."""
    file_store.put(A, "k", {"n": 1})
    file_store.put(A, "k", {"n": 2})
    line = {"namespace": ["a"], "key": "k", "version": 2}
    for value, said in (({"n": 9}, {}), ({"n": 2}, {"provenance": {"actor": "Eve"}})):
        with pytest.raises(ImportFailed, match="version 2 of 'k'"):
            file_store.import_lines([json.dumps({**line, "value": value, **said})])
    file_store.retain(VersionRetention(last=0))
    older = file_store.import_lines([json.dumps({**line, "value": {"n": 9}, "version": 1})])
    newer = file_store.import_lines([json.dumps({**line, "value": {"n": 9}, "version": 7})])

    assert (TransferReport(skipped=1), TransferReport(items=1)) == (older, newer)
    assert [item.version for item in file_store.history(A, "k")] == [2, 7]


def test_import_keeps_times_of_versions(file_store: SQLiteStore, clock: Clock) -> None:
    """Creation, start, end and expiry are taken from the line, to the microsecond."""
    at = [f"2020-01-0{day}T00:00:00.000001+00:00" for day in range(1, 5)]
    line = {"namespace": ["a"], "key": "k", "value": {}, "created_at": at[0]}
    until = "2099-01-01T02:00:00+02:00"
    file_store.import_lines(
        [
            json.dumps({**line, "version": 3, "valid_from": at[1], "valid_to": at[2]}),
            json.dumps({**line, "version": 4, "valid_from": at[3], "expires_at": until, "ttl": 5}),
        ]
    )
    first, last = file_store.history(A, "k")
    moments = [datetime.fromisoformat(each) for each in at]

    assert [moments[0]] * 2 == [first.created_at, last.created_at]
    assert (moments[1:3], moments[3]) == ([first.valid_from, first.valid_to], last.valid_from)
    assert (None, datetime(2099, 1, 1, tzinfo=UTC)) == (last.valid_to, last.expires_at)
    assert file_store.get(A, "k", as_of=moments[2]) is None
