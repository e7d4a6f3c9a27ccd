"""Each `a…` method of a store has a blocking twin that takes the same, and the reverse."""

from __future__ import annotations

import inspect

import pytest

from perdure.stores import ScopedStore, SQLiteStore

# what needs no twin: opening, naming a part, threads of its own
ALONE = {
    *("bind", "from_conn_string", "model", "open", "scoped", "setup", "start_ttl_sweeper"),
    "without_refresh",
    *("supports_ttl", "ttl_config"),
}


def methods(store: type) -> list[str]:
    found = [name for name, _ in inspect.getmembers(store, callable) if not name.startswith("_")]
    return [name for name in found if name not in ALONE]


@pytest.mark.parametrize("store", [SQLiteStore, ScopedStore])
def test_every_method_is_there_in_both_colours(store: type) -> None:
    """Without its `a`, the name of an async method is that of a blocking one."""
    names = set(methods(store))
    waiting = {
        name
        for name in names
        if inspect.iscoroutinefunction(getattr(store, name))
        or inspect.isasyncgenfunction(getattr(store, name))
    }

    assert {f"a{name}" for name in names - waiting} == waiting


@pytest.mark.parametrize("store", [SQLiteStore, ScopedStore])
def test_twins_take_the_same(store: type) -> None:
    """Names, order and defaults of the parameters are the same."""
    for name in methods(store):
        twin = getattr(store, f"a{name}", None)
        if twin is not None:
            one, other = inspect.signature(getattr(store, name)), inspect.signature(twin)
            shape = [(p.name, p.kind, p.default) for p in one.parameters.values()]

            assert shape == [(p.name, p.kind, p.default) for p in other.parameters.values()], name


@pytest.mark.parametrize("store", [SQLiteStore, ScopedStore])
def test_a_signature_says_what_the_caller_gets(store: type) -> None:
    """No internal type, and the same for both twins."""
    for name in methods(store):
        returned = str(inspect.signature(getattr(store, name)).return_annotation)
        assert "Effects" not in returned, name
        twin = getattr(store, f"a{name}", None)
        if twin is not None and not inspect.isasyncgenfunction(twin):
            assert str(inspect.signature(twin).return_annotation) == returned, name
