"""Each async method of a store has a blocking twin with the same signature, and vice versa."""

from __future__ import annotations

import inspect

import pytest

from perdure.stores import ScopedStore, SQLiteStore

# methods without a twin: those that open a store, select a part of it, or start a thread
ALONE = {
    *("bind", "from_conn_string", "model", "open", "scoped", "setup", "start_ttl_sweeper"),
    "without_refresh",
    *("supports_ttl", "ttl_config"),
}


def list_paired_methods(store: type) -> list[str]:
    names = [name for name, _ in inspect.getmembers(store, callable) if not name.startswith("_")]
    return [name for name in names if name not in ALONE]


@pytest.mark.parametrize("store", [SQLiteStore, ScopedStore])
def test_every_method_exists_in_blocking_and_async_form(store: type) -> None:
    """The name of the async method has the prefix `a`."""
    names = set(list_paired_methods(store))
    async_names = {
        name
        for name in names
        if inspect.iscoroutinefunction(getattr(store, name))
        or inspect.isasyncgenfunction(getattr(store, name))
    }

    assert {f"a{name}" for name in names - async_names} == async_names


@pytest.mark.parametrize("store", [SQLiteStore, ScopedStore])
def test_blocking_and_async_twin_have_same_parameters(store: type) -> None:
    """Names, order, kinds and defaults of the parameters are equal."""
    for name in list_paired_methods(store):
        twin = getattr(store, f"a{name}", None)
        if twin is not None:
            one, other = inspect.signature(getattr(store, name)), inspect.signature(twin)
            shape = [(p.name, p.kind, p.default) for p in one.parameters.values()]

            assert shape == [(p.name, p.kind, p.default) for p in other.parameters.values()], name


@pytest.mark.parametrize("store", [SQLiteStore, ScopedStore])
def test_blocking_and_async_twin_have_same_public_return_type(store: type) -> None:
    """No signature contains an internal type."""
    for name in list_paired_methods(store):
        returned = str(inspect.signature(getattr(store, name)).return_annotation)
        assert "Effects" not in returned, name
        twin = getattr(store, f"a{name}", None)
        if twin is not None and not inspect.isasyncgenfunction(twin):
            assert str(inspect.signature(twin).return_annotation) == returned, name
