"""Shared memory of teams: whose it is, who wrote it, and how a model reads and writes it."""

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
from perdure.memory.records import fill_namespace
from perdure.memory.run_config import Template, read_run_teams
from perdure.stores import SQLiteStore, open_store
from tests import postgres_server

BOTH: Any = [("memories", "{user_id}"), ("teams", "{team}")]
TEAM = ("teams", "{team}")


def of(who: Any = "ann", /, **also: Any) -> Any:
    """Build the config of a user's run."""
    return {"configurable": {"user_id": who, **also}}


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A store of perdure."""
    if request.param == "sqlite":
        with open_store(str(tmp_path / "s.db")) as opened:
            yield opened
        return
    with database(postgres_server.dsn()) as dsn, open_store(dsn) as opened:
        yield opened


def filled(store: Any) -> None:
    """Remember something for Ann, for a team red, for a team of Ann's name, and for Bob."""
    remember("Ann drinks green tea", store=store, config=of())
    remember("Bob drinks black tea", store=store, config=of("bob"))
    red = Collection(store, TEAM)
    red.insert("The tea of the office is Assam", config=of("bob", team="red"), key="assam")
    red.insert("The tea of the team ann is Darjeeling", config=of("cleo", team="ann"))


def test_both_namespaces_are_recalled_in_one_prompt(store: Any) -> None:
    """The request has the person's memories and those of her teams, and no others."""
    filled(store)
    shown: list[Any] = []
    node = use_memories(namespaces=BOTH, min_score=0, place="system")

    def answer(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        shown.extend(node(state, config))
        return {"messages": []}

    graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer")
    asked: Any = {"messages": [HumanMessage("Which tea?")]}
    graph.compile(store=store).invoke(asked, of(teams=["red"]))
    prompt = shown[0].text
    words = ("green tea", "Assam", "black tea", "Darjeeling")
    assert [word in prompt for word in words] == [True, True, False, False]


def test_each_memory_of_a_team_has_its_author_and_team(store: Any) -> None:
    """What another member said is not shown as the words of the user who asks."""
    filled(store)
    found = recall("tea", store=store, namespaces=BOTH, min_score=0, config=of(teams=["red"]))
    [shared] = [json.loads(line) for line in found.lines if "Assam" in line]
    assert (shared["said_by"], shared["team"]) == ("bob", "red")
    [memory] = [each for each in found.memories if each.namespace[0] == "teams"]
    assert memory.provenance is not None
    assert memory.provenance.author == "bob"
    own = next(each for each in found.memories if each.namespace[0] == "memories")
    assert own.provenance is not None
    assert own.provenance.author is None


def test_a_claimed_author_gives_way_to_the_user_of_the_run(store: Any) -> None:
    """The provenance that a caller passes cannot name somebody else as the author."""
    from perdure.stores import Provenance

    shared = Collection(store, TEAM)
    claimed = Provenance(actor="bob", author="bob", trust="user")
    outcome = shared.insert("A claim", provenance=claimed, config=of("cleo", team="red"))
    memory = shared.get(str(outcome.key), config=of("cleo", team="red"))
    assert memory is not None
    assert memory.provenance is not None
    assert memory.provenance.author == "cleo"


@pytest.mark.parametrize(
    ("named", "expected"),
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
def test_teams_of_a_run(named: Any, expected: tuple[str, ...]) -> None:
    """The context or config decides, within the limit that a server sets."""
    assert read_run_teams(of(**named)) == expected
    assert Template(TEAM, shared=True).fill_for_teams(of(**named)) == [
        ("teams", t) for t in expected
    ]


@pytest.mark.parametrize(
    "named", [{"team": ""}, {"team": 3}, {"teams": "red"}, {"teams": ["a\0b"]}, {"teams": [None]}]
)
def test_a_team_that_is_no_name_is_refused(named: Any) -> None:
    """Blank names, and other values than text, are errors and not somebody's team."""
    with pytest.raises(InvalidConfig):
        read_run_teams(of(**named))


def test_team_must_be_one_of_teams() -> None:
    """`team` chooses among `teams`."""
    with pytest.raises(InvalidConfig, match="not one of its 'teams'"):
        read_run_teams(of(team="blue", teams=["red"]))


def test_a_person_without_a_team_reads_nothing_and_gets_no_error(store: Any) -> None:
    """The namespace is left out."""
    filled(store)
    found = recall("tea", store=store, namespaces=BOTH, min_score=0, config=of())
    assert [memory.text for memory in found.memories] == ["Ann drinks green tea"]
    assert Collection(store, TEAM).search("tea", config=of()) == []


def test_a_write_needs_exactly_one_team(store: Any) -> None:
    """A collection does not choose between teams."""
    shared = Collection(store, TEAM)
    for named in ({}, {"teams": ["red", "blue"]}):
        with pytest.raises(InvalidConfig, match="exactly one"):
            shared.insert("one", config=of(**named))


def test_a_named_team_is_limited_by_the_server(store: Any) -> None:
    """A template with the name of a team is for its members only."""
    filled(store)
    search: Any = {"store": store, "namespace": ("teams", "red"), "min_score": 0}
    assert len(recall("tea", **search, config=of(**{TEAMS_KEY: ["red"]})).memories) == 1
    assert recall("tea", **search, config=of(**{TEAMS_KEY: ["ann"]})).memories == []
    with pytest.raises(InvalidConfig):
        Collection(store, ("teams", "red")).insert("one", config=of(**{TEAMS_KEY: ["ann"]}))


@pytest.mark.parametrize("labels", [("teams",), ("teams", "{user_id}"), ("teams", "x{team}")])
def test_other_second_labels_are_refused(labels: Any) -> None:
    """A user who is called like a team could reach its memory."""
    with pytest.raises(ConfigurationError, match="second label"):
        Collection(None, labels)


@dataclass
class Asks:
    """The context of a run."""

    user_id: str
    teams: list[str]


class Likes(BaseModel):
    """A profile."""

    drink: str = ""


PARTS: list[Callable[[], Any]] = [
    lambda: Extraction(InMemorySaver(), namespace=TEAM),
    lambda: remember_turns(namespace=TEAM),
    lambda: Profile(Likes, namespace=TEAM),
]


@pytest.mark.parametrize("make", PARTS)
def test_parts_without_authors_refuse_teams(make: Callable[[], Any]) -> None:
    """What would not record an author does not write into a team's memory."""
    with pytest.raises(ConfigurationError, match="begins with 'teams'"):
        make()


def test_a_first_label_cannot_be_filled_in_to_be_teams() -> None:
    """A user who is called `teams` reaches no team."""
    template = Template(("{user_id}", "red"))
    with pytest.raises(InvalidNamespace, match="which is reserved for memories of teams"):
        fill_namespace(template, of("teams"))
    assert fill_namespace(Template(("memories", "{user_id}")), of("teams")) == ("memories", "teams")


def call(tool: Any, config: Any, **arguments: Any) -> str:
    """Call a tool as a model does."""
    asked = {"name": tool.name, "args": arguments, "id": "c", "type": "tool_call"}
    return str(tool.invoke(asked, config).content)


def test_a_model_writes_to_the_person_unless_it_names_a_team(store: Any) -> None:
    """The argument `team` must be one of the user's teams."""
    manage = manage_memory(store=store, team_namespace=TEAM)
    search = search_memory(store=store, namespaces=BOTH, min_score=0)
    ann, bob = of(teams=["red", "blue"]), of("bob", teams=["red"])
    assert "Kept" in call(manage, ann, action="create", text="Ann likes figs")
    kept = call(manage, ann, action="create", text="The office has figs", team='"red"')
    assert "Kept" in kept
    places = sorted(store.list_namespaces())
    assert [place for place in places if place[0] != "perdure"] == [
        ("memories", "ann"),
        ("teams", "red"),
    ]
    for team in ("green", "ann", "../red", "{team}"):
        assert "not in the team" in call(manage, ann, action="create", text="More figs", team=team)
    assert "office" in call(search, bob, query="figs")
    assert "Ann likes" not in call(search, bob, query="figs")
    assert "Ann likes" in call(search, ann, query="figs")
    key = kept.removeprefix("Kept. Its id is ").split(".")[0]
    changed = call(manage, bob, action="supersede", id=key, text="The office has dates", team="red")
    assert "superseded" in changed
    [item] = store.search(("teams",))
    assert (item.provenance.author, item.value["formerly"][0]["author"]) == ("bob", "ann")


def test_a_tool_without_team_namespace_has_no_argument_team(store: Any) -> None:
    """Writes go to the person."""
    assert "team" not in manage_memory(store=store).args
    with pytest.raises(ConfigurationError, match="team_namespace"):
        manage_memory(store=store, team_namespace=("notes", "{team}"))


def test_another_store_keeps_the_author_too() -> None:
    """A store that is not perdure's has the author in the value."""
    other = InMemoryStore()
    shared = Collection(other, TEAM)
    shared.insert("The office has figs", config=of(team="red"))
    [memory] = shared.list(config=of("bob", team="red"))
    assert memory.provenance is not None
    assert memory.provenance.author == "ann"


def test_namespaces_are_given_in_place_of_namespace() -> None:
    """Both options together, or no list of labels, is an error."""
    wrongs: list[Any] = [TEAM, [], "teams"]
    for wrong in wrongs:
        with pytest.raises(ConfigurationError, match="namespaces is"):
            use_memories(namespaces=wrong)
    with pytest.raises(ConfigurationError, match="namespaces is"):
        use_memories(namespace=("notes", "{user_id}"), namespaces=BOTH)


def test_context_of_a_graph_names_the_teams(tmp_path: Path) -> None:
    """In the library, the context decides as for `user_id`."""
    with SQLiteStore.open(tmp_path / "s.db") as store:
        filled(store)
        seen: list[str] = []

        def read(state: MessagesState) -> dict[str, Any]:
            found = recall("tea", namespaces=BOTH, min_score=0)
            seen.extend(memory.text for memory in found.memories)
            return {"messages": []}

        graph = StateGraph(MessagesState, context_schema=Asks).add_node(read)
        compiled = graph.add_edge(START, "read").compile(store=store)
        compiled.invoke({"messages": []}, context=Asks("ann", ["red"]))
        assert sorted(seen) == ["Ann drinks green tea", "The tea of the office is Assam"]
