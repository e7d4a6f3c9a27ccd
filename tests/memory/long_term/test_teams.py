"""Shared memory of teams: who may read it, who wrote it, and how a model reads and writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.server_faults import database
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel

from perdure.checkpointers.address import TEAMS_KEY, WITHOUT_MEMORY_KEY
from perdure.errors import ConfigurationError, InvalidConfig, InvalidNamespace
from perdure.memory import (
    Collection,
    Extraction,
    Profile,
    manage_memory,
    recall,
    remember,
    remember_turns,
    search_memory,
    use_memories,
)
from perdure.memory.long_term.records import fill_namespace
from perdure.memory.namespace_templates import Template
from perdure.memory.run_config import read_run_teams
from perdure.stores import SQLiteStore, open_store
from tests import postgres_server

BOTH: Any = [("memories", "{user_id}"), ("teams", "{team}")]
TEAM = ("teams", "{team}")


def make_config(user_id: Any = "ann", /, **values: Any) -> Any:
    """Build the config of a user's run."""
    return {"configurable": {"user_id": user_id, **values}}


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A store of perdure."""
    if request.param == "sqlite":
        with open_store(str(tmp_path / "s.db")) as opened:
            yield opened
        return
    with database(postgres_server.dsn()) as dsn, open_store(dsn) as opened:
        yield opened


def store_memories(store: Any) -> None:
    """Store memories of Ann, of a team red, of a team that is called like Ann, and of Bob."""
    remember("Ann drinks green tea", store=store, config=make_config())
    remember("Bob drinks black tea", store=store, config=make_config("bob"))
    red = Collection(store, TEAM)
    red.insert("The tea of the office is Assam", config=make_config("bob", team="red"), key="assam")
    red.insert("The tea of the team ann is Darjeeling", config=make_config("cleo", team="ann"))


def test_prompt_has_memories_of_user_and_of_own_teams_only(store: Any) -> None:
    store_memories(store)
    shown: list[Any] = []
    node = use_memories(namespaces=BOTH, min_score=0, place="system")

    def answer(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        shown.extend(node(state, config))
        return {"messages": []}

    graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer")
    input: Any = {"messages": [HumanMessage("Which tea?")]}
    graph.compile(store=store).invoke(input, make_config(teams=["red"]))
    prompt = shown[0].text
    words = ("green tea", "Assam", "black tea", "Darjeeling")
    assert [word in prompt for word in words] == [True, True, False, False]


def test_recalled_team_memory_shows_its_author_and_team(store: Any) -> None:
    """The words of another member are not shown as words of the user who asks."""
    store_memories(store)
    recalled = recall(
        "tea", store=store, namespaces=BOTH, min_score=0, config=make_config(teams=["red"])
    )
    [shared] = [json.loads(line) for line in recalled.lines if "Assam" in line]
    assert (shared["said_by"], shared["team"]) == ("bob", "red")
    [memory] = [memory for memory in recalled.memories if memory.namespace[0] == "teams"]
    assert memory.provenance is not None
    assert memory.provenance.author == "bob"
    own = next(memory for memory in recalled.memories if memory.namespace[0] == "memories")
    assert own.provenance is not None
    assert own.provenance.author is None


def test_author_is_user_of_run_whatever_provenance_claims(store: Any) -> None:
    from perdure.stores import Provenance

    shared = Collection(store, TEAM)
    claimed = Provenance(actor="bob", author="bob", trust="user")
    outcome = shared.insert("A claim", provenance=claimed, config=make_config("cleo", team="red"))
    memory = shared.get(str(outcome.key), config=make_config("cleo", team="red"))
    assert memory is not None
    assert memory.provenance is not None
    assert memory.provenance.author == "cleo"


@pytest.mark.parametrize(
    ("team_values", "expected"),
    [
        ({}, ()),
        ({"team": "red"}, ("red",)),
        ({"teams": ["red", "blue", "red"]}, ("red", "blue")),
        ({"teams": []}, ()),
        ({"team": "red", "teams": ["blue", "red"]}, ("red",)),
        ({TEAMS_KEY: ["red", "blue"]}, ("red", "blue")),
        ({TEAMS_KEY: ["red"], "teams": ["red", "blue"]}, ("red",)),
        ({TEAMS_KEY: ["red"], "team": "blue"}, ()),
        ({TEAMS_KEY: [], "team": "blue"}, ()),
        ({"teams": ["red"], WITHOUT_MEMORY_KEY: True}, ()),
    ],
)
def test_teams_of_run_come_from_config_within_server_limit(
    team_values: Any, expected: tuple[str, ...]
) -> None:
    assert read_run_teams(make_config(**team_values)) == expected
    assert Template(TEAM, shared=True).fill_for_teams(make_config(**team_values)) == [
        ("teams", t) for t in expected
    ]


@pytest.mark.parametrize(
    "team_values",
    [{"team": ""}, {"team": 3}, {"teams": "red"}, {"teams": ["a\0b"]}, {"teams": [None]}],
)
def test_invalid_team_names_are_refused(team_values: Any) -> None:
    """Blank names and values that are not text are errors."""
    with pytest.raises(InvalidConfig):
        read_run_teams(make_config(**team_values))


def test_team_must_be_one_of_teams() -> None:
    with pytest.raises(InvalidConfig, match="which is not one of the run's 'teams'"):
        read_run_teams(make_config(team="blue", teams=["red"]))


def test_user_without_team_reads_no_team_memories_without_error(store: Any) -> None:
    store_memories(store)
    recalled = recall("tea", store=store, namespaces=BOTH, min_score=0, config=make_config())
    assert [memory.text for memory in recalled.memories] == ["Ann drinks green tea"]
    assert Collection(store, TEAM).search("tea", config=make_config()) == []


def test_insert_without_exactly_one_team_is_refused(store: Any) -> None:
    """A collection does not choose between teams."""
    shared = Collection(store, TEAM)
    for named in ({}, {"teams": ["red", "blue"]}):
        with pytest.raises(InvalidConfig, match="exactly one"):
            shared.insert("one", config=make_config(**named))


def test_fixed_team_namespace_is_limited_to_members(store: Any) -> None:
    """A server sets the teams of which the user is a member."""
    store_memories(store)
    search: Any = {"store": store, "namespace": ("teams", "red"), "min_score": 0}
    assert len(recall("tea", **search, config=make_config(**{TEAMS_KEY: ["red"]})).memories) == 1
    assert recall("tea", **search, config=make_config(**{TEAMS_KEY: ["ann"]})).memories == []
    with pytest.raises(InvalidConfig):
        Collection(store, ("teams", "red")).insert(
            "one", config=make_config(**{TEAMS_KEY: ["ann"]})
        )


@pytest.mark.parametrize("labels", [("teams",), ("teams", "{user_id}"), ("teams", "x{team}")])
def test_team_namespace_refuses_other_second_labels(labels: Any) -> None:
    """A user who is called like a team could otherwise reach its memory."""
    with pytest.raises(ConfigurationError, match="second label"):
        Collection(None, labels)


@dataclass
class RunContext:
    """The context of a run."""

    user_id: str
    teams: list[str]


class LikesProfile(BaseModel):
    """The schema of a profile."""

    drink: str = ""


PARTS_WITHOUT_AUTHORS: list[Callable[[], Any]] = [
    lambda: Extraction(InMemorySaver(), namespace=TEAM),
    lambda: remember_turns(namespace=TEAM),
    lambda: Profile(LikesProfile, namespace=TEAM),
]


@pytest.mark.parametrize("make_part", PARTS_WITHOUT_AUTHORS)
def test_parts_that_record_no_author_refuse_team_namespace(make_part: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match="cannot begin with 'teams'"):
        make_part()


def test_user_named_teams_cannot_reach_team_namespace() -> None:
    template = Template(("{user_id}", "red"))
    with pytest.raises(InvalidNamespace, match="which is reserved for team memories"):
        fill_namespace(template, make_config("teams"))
    assert fill_namespace(Template(("memories", "{user_id}")), make_config("teams")) == (
        "memories",
        "teams",
    )


def call_tool(tool: Any, config: Any, **arguments: Any) -> str:
    """Call a tool as a model does."""
    input = {"name": tool.name, "args": arguments, "id": "c", "type": "tool_call"}
    return str(tool.invoke(input, config).content)


def test_tool_writes_to_user_unless_model_names_own_team(store: Any) -> None:
    """The argument `team` must be one of the user's teams."""
    manage = manage_memory(store=store, team_namespace=TEAM)
    search = search_memory(store=store, namespaces=BOTH, min_score=0)
    ann, bob = make_config(teams=["red", "blue"]), make_config("bob", teams=["red"])
    assert "Stored" in call_tool(manage, ann, action="create", text="Ann likes figs")
    kept = call_tool(manage, ann, action="create", text="The office has figs", team='"red"')
    assert "Stored" in kept
    places = sorted(store.list_namespaces())
    assert [place for place in places if place[0] != "perdure"] == [
        ("memories", "ann"),
        ("teams", "red"),
    ]
    for team in ("green", "ann", "../red", "{team}"):
        assert "not in the team" in call_tool(
            manage, ann, action="create", text="More figs", team=team
        )
    assert "office" in call_tool(search, bob, query="figs")
    assert "Ann likes" not in call_tool(search, bob, query="figs")
    assert "Ann likes" in call_tool(search, ann, query="figs")
    key = kept.removeprefix("Stored. The memory's id is ").split(".")[0]
    changed = call_tool(
        manage, bob, action="supersede", id=key, text="The office has dates", team="red"
    )
    assert "superseded" in changed
    [item] = store.search(("teams",))
    assert (item.provenance.author, item.value["formerly"][0]["author"]) == ("bob", "ann")


def test_tool_without_team_namespace_has_no_team_argument(store: Any) -> None:
    """The tool then writes to the user's memories."""
    assert "team" not in manage_memory(store=store).args
    with pytest.raises(ConfigurationError, match="team_namespace"):
        manage_memory(store=store, team_namespace=("notes", "{team}"))


def test_langgraph_store_keeps_author_in_value() -> None:
    other = InMemoryStore()
    shared = Collection(other, TEAM)
    shared.insert("The office has figs", config=make_config(team="red"))
    [memory] = shared.list(config=make_config("bob", team="red"))
    assert memory.provenance is not None
    assert memory.provenance.author == "ann"


def test_invalid_namespaces_or_both_options_are_refused() -> None:
    invalid_values: list[Any] = [TEAM, [], "teams"]
    for invalid_value in invalid_values:
        with pytest.raises(ConfigurationError, match="'namespaces' is"):
            use_memories(namespaces=invalid_value)
    with pytest.raises(ConfigurationError, match="pass either 'namespace' or 'namespaces'"):
        use_memories(namespace=("notes", "{user_id}"), namespaces=BOTH)


def test_recall_in_node_uses_teams_of_context(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "s.db") as store:
        store_memories(store)
        seen: list[str] = []

        def read(state: MessagesState) -> dict[str, Any]:
            recalled = recall("tea", namespaces=BOTH, min_score=0)
            seen.extend(memory.text for memory in recalled.memories)
            return {"messages": []}

        graph = StateGraph(MessagesState, context_schema=RunContext).add_node(read)
        compiled = graph.add_edge(START, "read").compile(store=store)
        compiled.invoke({"messages": []}, context=RunContext("ann", ["red"]))
        assert sorted(seen) == ["Ann drinks green tea", "The tea of the office is Assam"]
