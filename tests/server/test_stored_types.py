"""Types and aliases that a `langgraph.json` names for the checkpointer of the graphs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph_sdk import get_sync_client

from perdure.checkpointers import SQLiteCheckpointer, StoredType
from perdure.errors import ConfigurationError
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.server.running import run_server

MODULE = """
    from dataclasses import dataclass
    from fractions import Fraction
    from typing import Any, TypedDict

    from langgraph.graph import START, StateGraph
    from perdure.checkpointers import StoredType

    TYPES = [StoredType(Fraction, str, Fraction)]

    @dataclass
    class Purchase:
        item: str

    ALIASES = {("stored_types_shop", "Order"): Purchase}

    class State(TypedDict, total=False):
        share: Any
        order: Any
        known: list[str]

    def turn(state: State) -> State:
        order = state.get("order") or Purchase("figs")
        known = [type(order).__name__, type(state.get("share")).__name__]
        return {"share": Fraction(1, 3), "order": order, "known": known}

    builder = StateGraph(State).add_node("turn", turn).add_edge(START, "turn")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module of graphs, which the process forgets afterwards."""
    (tmp_path / "stored_types_shop.py").write_text(textwrap.dedent(MODULE))
    yield tmp_path
    sys.modules.pop("stored_types_shop", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def load_graphs(folder: Path, perdure: Any) -> Graphs:
    file = folder / "langgraph.json"
    graphs = {"shop": "./stored_types_shop.py:builder"}
    file.write_text(json.dumps({"graphs": graphs, "perdure": perdure}))
    return Graphs.load_langgraph_json(file)


TYPE_OPTIONS: list[Any] = [
    {
        "types": "./stored_types_shop.py:TYPES",
        "aliases": {"stored_types_shop:Order": "stored_types_shop:Purchase"},
    },
    {"types": "stored_types_shop:TYPES", "aliases": "stored_types_shop:ALIASES"},
]


@pytest.mark.parametrize("options", TYPE_OPTIONS)
def test_served_graph_uses_configured_types_and_aliases(
    folder: Path, settings: Settings, options: Any
) -> None:
    """A run stores the type and finds an object that was stored under the old name."""
    graphs = load_graphs(folder, options)
    shop = sys.modules["stored_types_shop"]
    old = type("Order", (shop.Purchase,), {"__module__": "stored_types_shop"})
    config: Any = {"configurable": {"thread_id": "t"}}
    with SQLiteCheckpointer.open(settings.db, types=shop.TYPES) as saver:
        shop.builder.compile(checkpointer=saver).invoke({"order": old("figs")}, config)
    with run_server(create_app(settings, graphs=graphs)) as url, get_sync_client(url=url) as sdk:
        values: Any = sdk.runs.wait("t", "shop", input={})
        state: Any = sdk.threads.get_state("t")

    assert values["known"] == ["Purchase", "Fraction"]
    assert state["values"]["share"] == "1/3"
    with SQLiteCheckpointer.open(settings.db, types=shop.TYPES) as saver:
        found = saver.get_tuple(config)
        assert found is not None
        assert str(found.checkpoint["channel_values"]["share"]) == "1/3"


def test_page_names_class_of_value_that_cannot_be_rebuilt(folder: Path, settings: Settings) -> None:
    """A page without the type, or the renamed class, shows its name and its fields."""
    load_graphs(folder, {})
    shop = sys.modules["stored_types_shop"]
    old = type("Order", (shop.Purchase,), {"__module__": "stored_types_shop"})
    config: Any = {"configurable": {"thread_id": "t"}}
    with SQLiteCheckpointer.open(settings.db, types=shop.TYPES) as saver:
        graph = shop.builder.compile(checkpointer=saver)
        graph.invoke({"order": old("figs")}, config)
        uid = graph.get_state(config).config["configurable"]["checkpoint_id"]
    with run_server(create_app(settings)) as url:
        text = httpx.get(f"{url}/ui/checkpoint?id=t&checkpoint={uid}").text
        whole = httpx.get(f"{url}/ui/checkpoint?id=t&checkpoint={uid}&channel=share").text

    assert all(name in text for name in ("Fraction", "Order", "figs", "1/3"))
    assert "1/3" in whole
    assert "DetachedFields" not in text + whole


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"types": "./stored_types_shop.py:NONE"}, "cannot be imported"),
        ({"types": "./stored_types_shop.py:Purchase"}, "types"),
        ({"aliases": {"a:A": "no_such_module:B"}}, "cannot be imported"),
        ({"aliases": {"a:A": "a:A"}}, "form a cycle"),
        ({"alias": {}}, "expected an object with the keys"),
        (["types"], "expected an object with the keys"),
    ],
)
def test_graphs_with_invalid_type_options_are_refused(
    folder: Path, options: Any, expected: str
) -> None:
    """The error names the invalid option."""
    with pytest.raises(ConfigurationError, match=expected):
        load_graphs(folder, options)


def test_graphs_accept_type_options_as_objects() -> None:
    """A program that creates the application itself passes the options as objects."""
    types = [StoredType(complex, str, complex)]
    assert Graphs({}, {"types": types}).saver_options == {"types": types}
    with pytest.raises(ConfigurationError, match=r"'types' registers the class .* twice"):
        Graphs({}, {"types": types * 2})
