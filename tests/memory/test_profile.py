"""Profiles: what a change may do to a document, what is kept of it, and what is refused."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.graph import START, StateGraph
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field, model_validator

from perdure.effects import run
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    InvalidPatch,
    VersionConflict,
)
from perdure.memory.gate import Gate
from perdure.memory.profile import Profile
from perdure.memory.records import Candidate, StoreAdapter, Verdict, build_put
from perdure.memory.reducers import ChatState
from perdure.stores import SQLiteStore
from perdure.stores.base import Provenance
from tests.memory.patch_oracle import NotApplicable, apply_reference_patch
from tests.memory.test_profile_patch import documents_and_patches, op
from tests.rounds import rounds


class Home(BaseModel):
    """Where somebody lives."""

    city: str = ""
    zip: str | None = None


class Pet(BaseModel):
    name: str
    kind: Literal["cat", "dog"] = "cat"


class Person(BaseModel):
    name: str = ""
    age: int | None = Field(default=None, ge=0)
    born: dt.date | None = None
    home: Home = Field(default_factory=Home)
    pets: list[Pet] = []
    likes: list[str] = Field(default=[], description="What they like to eat and drink")


class Notes(BaseModel):
    """Any fields."""

    model_config = ConfigDict(extra="allow")


NAMESPACE = ("profiles", "ann")


def run_of(**configurable: Any) -> Any:
    return {"configurable": configurable}


ANN = run_of(user_id="ann")


@pytest.fixture
def store() -> Iterator[SQLiteStore]:
    with SQLiteStore.open(":memory:", index=None) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "in memory"])
def any_store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "in memory":
        yield InMemoryStore()
        return
    with SQLiteStore.open(":memory:", index=None) as opened:
        yield opened


@pytest.fixture
def profile(any_store: Any) -> Profile[Person]:
    return Profile(Person, any_store)


def raw(profile: Profile[Any], config: Any) -> Any:
    """The document as it is stored."""
    versions = profile.history(config)
    return versions[-1].document if versions and versions[-1].valid_to is None else {}


def written(profile: Profile[Any], partial: dict[str, Any], config: Any = None) -> Any:
    """The profile after a patch of some fields, those within objects too; None removes one."""
    fields = {f"/{name}": value for name, value in partial.items()}
    for path, value in list(fields.items()):
        if isinstance(value, dict):
            del fields[path]
            fields |= {f"{path}/{name}": part for name, part in value.items()}
    operations = [
        op("remove", path) if value is None else op("add", path, value=value)
        for path, value in fields.items()
    ]
    return profile.patch(operations, config)


# -- reading and changing


def test_the_defaults_hold_until_something_is_known(profile: Profile[Person]) -> None:
    """Reading writes nothing, and nor does a change that changes nothing."""
    assert profile.get(ANN) == Person()
    assert raw(profile, ANN) == {}
    assert profile.history(ANN) == []
    profile.patch([], ANN)
    written(profile, {"name": ""}, ANN)
    profile.patch([op("test", "/name", value=""), op("remove", "/age")], ANN)

    assert profile.history(ANN) == []


def test_a_change_keeps_all_that_it_does_not_name(profile: Profile[Person]) -> None:
    """Patch by patch, whatever the store and the form."""
    written(profile, {"name": "Ann", "home": {"city": "Ghent"}}, ANN)
    profile.patch([op("add", "/likes/-", value="tea"), op("replace", "/age", value=40)], ANN)
    written(profile, {"home": {"zip": "9000"}}, ANN)
    left = profile.patch([op("add", "/pets/0", value={"name": "Tom"})], ANN)

    home = Home(city="Ghent", zip="9000")
    assert left == Person(name="Ann", age=40, home=home, likes=["tea"], pets=[Pet(name="Tom")])
    assert profile.get(ANN) == left
    assert raw(profile, ANN) == left.model_dump(mode="json")
    assert profile.get(run_of(user_id="bo")) == Person()


def test_both_colours_do_the_same(any_store: Any) -> None:
    """Every method, and its async form."""
    one, other = Profile(Person, any_store, key="one"), Profile(Person, any_store, key="other")
    operations = [op("replace", "/name", value="Ann")]
    steps = [
        one.set({"likes": ["tea"]}, ANN),
        one.patch(operations, ANN),
        one.get(ANN),
        raw(one, ANN),
        [(each.document, each.change) for each in one.history(ANN)],
        one.forget(ANN) is None,
        one.get(ANN),
    ]

    async def taken() -> list[Any]:
        return [
            await other.aset({"likes": ["tea"]}, ANN),
            await other.apatch(operations, ANN),
            await other.aget(ANN),
            raw(other, ANN),
            [(each.document, each.change) for each in await other.ahistory(ANN)],
            await other.aforget(ANN) is None,
            await other.aget(ANN),
        ]

    assert steps == asyncio.run(taken())


def test_a_document_is_set_whole(profile: Profile[Person]) -> None:
    """As a model or as a dict; what was there before is not."""
    written(profile, {"name": "Ann", "likes": ["tea"]}, ANN)

    assert profile.set({"age": 3}, ANN) == Person(age=3)
    assert profile.set(Person(name="Bo"), ANN) == Person(name="Bo")
    assert profile.get(ANN) == Person(name="Bo")


def test_what_is_given_out_is_nobodys_but_the_callers(any_store: Any) -> None:
    """Changing it in place changes no profile, stored or default."""
    profile = Profile(Person, any_store)
    profile.get(ANN).likes.append("x")
    assert profile.get(ANN).likes == []
    given = {"likes": ["figs"]}
    profile.set(given, ANN).likes.append("x")
    given["likes"].append("y")
    raw(profile, ANN)["likes"].append("z")
    profile.history(ANN)[0].document["likes"].append("z")

    assert profile.get(ANN).likes == ["figs"]


def test_it_is_a_readable_document_found_by_what_it_says(store: SQLiteStore) -> None:
    """Its text is searched; the value holds the document as it is."""
    profile = Profile(Person, store)
    profile.patch([op("replace", "/home/city", value="Ghent")], ANN)
    written(profile, {"likes": ["green tea", "figs"], "pets": [{"name": "Tom"}]}, ANN)
    [memory] = run(StoreAdapter(store).search(("profiles",), query="Who drinks tea?", limit=5))

    assert memory.kind == "profile"
    assert memory.text == "home city: Ghent\npets name: Tom\npets kind: cat\nlikes: green tea, figs"
    assert memory.value["document"] == raw(profile, ANN)
    assert store.search(("profiles",), query="replace", mode="text") == []


def test_a_graph_gives_its_store_and_its_config(store: SQLiteStore) -> None:
    """Within a node neither has to be passed, and the thread is noted."""
    profile = Profile(Person)

    def learn(state: Any) -> dict[str, Any]:
        written(profile, {"name": "Ann"})
        return {}

    builder = StateGraph(ChatState).add_node("learn", learn).add_edge(START, "learn")
    graph: Any = builder.compile(store=store)
    graph.invoke({"messages": []}, run_of(user_id="ann", thread_id="t"))
    [version] = Profile(Person, store).history(ANN)

    assert version.document["name"] == "Ann"
    assert version.provenance is not None
    assert version.provenance.thread_id == "t"


# -- the past


def test_every_change_is_a_version(store: SQLiteStore) -> None:
    """The past is there as it was, by number and by moment, until it is forgotten."""
    profile = Profile(Person, store)
    first = profile.patch([op("add", "/name", value="Ann")], ANN)
    moment = profile.history(ANN)[0].valid_from
    thread = run_of(user_id="ann", thread_id="t", checkpoint_id="c")
    second = written(profile, {"name": None, "age": 40}, thread)
    old, new = profile.history(ANN)

    assert [old.document, new.document] == [first.model_dump(mode="json"), raw(profile, ANN)]
    assert [old.version, new.version] == [1, 2]
    assert [old.valid_to, new.valid_to] == [new.valid_from, None]
    assert [old.change, new.change] == ["patch", "patch"]
    assert old.provenance == Provenance(actor="user", trust="user")
    assert new.provenance == Provenance("t", "c", actor="user", trust="user")
    assert profile.get(ANN, as_of=moment) == first
    assert profile.get(ANN) == second == Person(age=40)


def test_forgetting_leaves_nothing(store: SQLiteStore) -> None:
    """No version of any item; other profiles stay."""
    profile = Profile(Person, store)
    bo = run_of(user_id="bo")
    for config in (ANN, bo):
        written(profile, {"name": "Ann"}, config)
        written(profile, {"likes": ["tea"]}, config)
    receipt = profile.forget(ANN)

    assert receipt is not None
    assert receipt.items == 1
    assert profile.history(ANN) == []
    assert store.search(NAMESPACE) == []
    assert profile.get(bo).likes == ["tea"]
    assert written(profile, {"age": 3}, ANN) == Person(age=3)


def test_a_store_without_a_past_says_so() -> None:
    """It has the present as its only version, and deletes what is to be forgotten."""
    profile = Profile(Person, InMemoryStore())
    written(profile, {"name": "Ann"}, run_of(user_id="ann", thread_id="t"))
    written(profile, {"age": 4}, ANN)
    [version] = profile.history(ANN)

    assert version.document == raw(profile, ANN)
    assert version.version is None
    with pytest.raises(ConfigurationError, match="keep no versions"):
        profile.get(ANN, as_of=dt.datetime.now(dt.UTC))
    assert profile.forget(ANN) is None
    assert raw(profile, ANN) == {}


def test_a_large_profile_is_several_profiles(store: SQLiteStore) -> None:
    """Each section has its own schema, key and past under one namespace, and changes alone."""
    home, pets = Profile(Home, store, key="home"), Profile(Person, store, key="person")
    written(home, {"city": "Ghent"}, ANN)
    written(pets, {"pets": [{"name": "Tom"}]}, ANN)
    written(home, {"city": "Bruges"}, ANN)

    assert [len(home.history(ANN)), len(pets.history(ANN))] == [2, 1]
    assert {item.key for item in store.search(NAMESPACE)} == {"home", "person"}
    home.forget(ANN)
    assert pets.get(ANN).pets == [Pet(name="Tom")]


# -- at the same time


def test_no_change_is_lost_among_threads(tmp_path: Path) -> None:
    """Two stores over one file, eight threads: each finds what the others wrote."""
    path = tmp_path / "s.db"
    with SQLiteStore.open(path, index=None) as one, SQLiteStore.open(path, index=None) as two:
        ready = threading.Barrier(8)

        def write(number: int) -> None:
            profile = Profile(Person, (one, two)[number % 2])
            ready.wait()
            profile.patch([op("add", "/likes/-", value=f"{number}")], ANN)
            written(profile, {("name", "home")[number % 2]: ("Ann", {"zip": "1"})[number % 2]}, ANN)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left = Profile(Person, one).get(ANN)

    assert sorted(left.likes) == list("01234567")
    assert (left.name, left.home.zip) == ("Ann", "1")


def test_no_change_is_lost_among_tasks(any_store: Any) -> None:
    """In one event loop, in a store without versions too."""
    profile = Profile(Person, any_store)

    async def write() -> None:
        await asyncio.gather(
            *(profile.apatch([op("add", "/likes/-", value=f"{n}")], ANN) for n in range(8))
        )

    asyncio.run(write())
    assert sorted(profile.get(ANN).likes) == list("01234567")


class Range(BaseModel):
    low: int = 0
    high: int = 0

    @model_validator(mode="after")
    def ordered(self) -> Range:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


def test_two_changes_are_accepted_together_or_not(store: SQLiteStore) -> None:
    """What is valid for each alone need not be for both, although they name other fields."""
    profile = Profile(Range, store)
    profile.set({"low": 0, "high": 10}, ANN)
    place = profile.get_handle(ANN)
    seen = run(profile.read_state(place)).document
    one = run(profile.plan_patch(place, [op("replace", "/low", value=9)], seen))
    other = run(profile.plan_patch(place, [op("replace", "/high", value=1)], seen))
    run(place.adapter.write(one))

    with pytest.raises(VersionConflict):
        run(place.adapter.write(other))
    with pytest.raises(InvalidPatch, match="low is above high"):
        profile.patch([op("replace", "/high", value=1)], ANN)
    assert profile.get(ANN) == Range(low=9, high=10)


# -- with other things


def test_a_planned_change_is_written_with_other_things_or_not_at_all(store: SQLiteStore) -> None:
    """Part of one transaction, with the provenance that its author gives it."""
    profile = Profile(Person, store)
    source = Provenance(thread_id="t", message_ids=("m1",), trust="user")
    place = profile.get_handle(ANN)._replace(provenance=source)
    seen = run(profile.read_state(place)).document
    puts = run(profile.plan_patch(place, [op("replace", "/name", value="Ann")], seen))
    assert raw(profile, ANN) == {}
    note = build_put(("facts", "ann"), "1", {"text": "Ann"}, if_version=3)
    with pytest.raises(VersionConflict):
        run(place.adapter.write([*puts, note]))
    assert raw(profile, ANN) == {}
    run(place.adapter.write(puts))

    assert profile.get(ANN) == Person(name="Ann")
    assert profile.history(ANN)[0].provenance == source


def test_a_plan_keeps_fields_and_what_was_seen(profile: Profile[Person]) -> None:
    """A patch that was made for another state of what it concerns is refused."""
    written(profile, {"name": "Ann", "home": {"city": "Ghent", "zip": "9000"}}, ANN)
    place = profile.get_handle(ANN)
    seen = run(profile.read_state(place)).document
    moving = [op("replace", "/home", value={"city": "Oslo"})]
    with pytest.raises(InvalidPatch, match="'/home/zip'"):
        run(profile.plan_patch(place, moving, seen))
    written(profile, {"name": "Anna"}, ANN)
    city = [op("replace", "/home/city", value="Oslo")]
    [put, *_] = run(profile.plan_patch(place, city, seen))
    assert put.value is not None
    assert put.value["document"]["name"] == "Anna"
    written(profile, {"home": {"city": "Bruges"}}, ANN)

    with pytest.raises(VersionConflict, match="was changed where this patch changes it"):
        run(profile.plan_patch(place, city, seen))


# -- what is refused

INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"nmae": "Ann"}, "'/nmae' is an unknown field"),
    "an unknown field within": ({"home": {"town": "x"}}, "'/home/town' is an unknown field"),
    "one in a list": ({"pets": [{"name": "T", "age": 3}]}, "'/pets/0/age' is an unknown field"),
    "text for a number": ({"age": "40"}, "'/age': Input should be a valid integer (it is \"40\")"),
    "a number for text": ({"name": 3}, "'/name': Input should be a valid string (it is 3)"),
    "a truth for a number": ({"age": True}, "'/age'"),
    "out of bounds": ({"age": -1}, "greater than or equal to 0"),
    "no date": ({"born": "soon"}, "'/born'"),
    "none of the choices": ({"pets": [{"name": "T", "kind": "cow"}]}, "'/pets/0/kind'"),
    "a required field": ({"pets": [{"kind": "dog"}]}, "'/pets/0/name': Field required"),
    "too large": ({"name": "x" * 100_000}, "at most 100,000 are allowed"),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_the_schema_refuses_is_not_written(profile: Profile[Person], case: str) -> None:
    """By any of the ways, with the field's name; the profile is as it was."""
    partial, said = INVALID[case]
    profile.set({"name": "Ann", "home": {"city": "Ghent"}}, ANN)
    operations = [op("add", f"/{name}", value=value) for name, value in partial.items()]
    changes: list[Any] = [
        lambda: profile.patch(operations, ANN),
        lambda: profile.set(partial, ANN),
    ]
    for change in changes:
        with pytest.raises(InvalidPatch) as caught:
            change()
        assert said in str(caught.value)
    assert profile.get(ANN) == Person(name="Ann", home=Home(city="Ghent"))
    assert len(profile.history(ANN)) == 1


@pytest.mark.parametrize("document", [None, [], "x", 3, Home(), {"a": {1}}])
def test_what_is_no_document_is_refused(store: SQLiteStore, document: Any) -> None:
    """Another model's instance too."""
    with pytest.raises(InvalidPatch):
        Profile(Person, store).set(document, ANN)


class Member(BaseModel):
    name: str
    city: str = "Ghent"


def test_a_schema_with_required_fields_has_no_profile_at_first(store: SQLiteStore) -> None:
    """The first change has to give them, and none takes them away."""
    member = Profile(Member, store)
    with pytest.raises(ConfigurationError, match=r"does not exist yet.*set\(\)"):
        member.get(ANN)
    with pytest.raises(InvalidPatch, match="'/name': Field required"):
        written(member, {"city": "Oslo"}, ANN)
    assert member.patch([op("add", "/name", value="Ann")], ANN) == Member(name="Ann")
    with pytest.raises(InvalidPatch, match="'/name': Field required"):
        member.patch([op("remove", "/name")], ANN)
    assert member.patch([op("remove", "/city")], ANN) == Member(name="Ann")


def test_a_schema_may_grow_and_shrink(store: SQLiteStore) -> None:
    """New fields get their defaults; what fits no more is named, is there, and can be mended."""

    class Older(BaseModel):
        name: str = ""
        age: str = ""

    older = Profile(Older, store)
    older.set({"name": "Ann", "age": "forty"}, ANN)
    profile = Profile(Person, store)
    with pytest.raises(ConfigurationError, match=r"'/age'.*\"forty\".*history\(\)"):
        profile.get(ANN)
    assert raw(profile, ANN) == {"name": "Ann", "age": "forty"}
    with pytest.raises(InvalidPatch, match="'/age'"):
        written(profile, {"name": "Bo"}, ANN)
    assert written(profile, {"age": 40}, ANN) == Person(name="Ann", age=40)

    with pytest.raises(ConfigurationError, match="'/age'"):
        older.get(ANN)
    names = ("age", "born", "home", "pets", "likes")
    assert older.patch([op("remove", f"/{name}") for name in names], ANN) == Older(name="Ann")
    assert raw(older, ANN) == {"name": "Ann", "age": ""}


class Tree(BaseModel):
    value: Any = None
    inner: list[Tree] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def size(self) -> int:
        return 1 + sum(each.size for each in self.inner)


def test_schemas_of_other_kinds(store: SQLiteStore) -> None:
    """With aliases, with themselves within them, with any fields, with what is computed."""

    class Aliased(BaseModel):
        first: str = Field(default="", alias="firstName")

    aliased = Profile(Aliased, store, key="aliased")
    assert written(aliased, {"firstName": "Ann"}, ANN) == Aliased(firstName="Ann")
    assert raw(aliased, ANN) == {"firstName": "Ann"}
    with pytest.raises(InvalidPatch, match="'/first' is an unknown field"):
        written(aliased, {"first": "Bo"}, ANN)
    tree = Profile(Tree, store, key="tree")
    grown = tree.patch([op("add", "/inner/-", value={"value": {"any": [1]}})], ANN)
    assert grown.size == 2
    with pytest.raises(InvalidPatch, match="'/inner/0/leaf'"):
        written(tree, {"inner": [{"leaf": 1}]}, ANN)
    notes = Profile(Notes, store, key="notes")
    assert written(notes, {"anything": 2**70}, ANN).model_dump() == {"anything": 2**70}


def broken(value: str) -> str:
    raise KeyError(value)


def test_an_error_within_a_validator_is_a_refusal(store: SQLiteStore) -> None:
    """A model's patch is not to bring down a run by it."""

    class Fragile(BaseModel):
        name: str = ""

        @model_validator(mode="after")
        def checked(self) -> Fragile:
            if self.name:
                broken(self.name)
            return self

    with pytest.raises(InvalidPatch, match="a validator of Fragile raised KeyError"):
        written(Profile(Fragile, store), {"name": "x"}, ANN)


class Lossy(BaseModel):
    seen: str = Field(default="", exclude=True)


class Untold(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    lock: Any = Field(default_factory=threading.Lock)
    own: threading.Event | None = None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schema": dict}, "expected a pydantic model"),
        ({"schema": Person()}, "expected a pydantic model"),
        ({"schema": RootModel[list[str]]}, "expected a pydantic model"),
        ({"schema": Untold}, "and a JSON schema"),
        ({"store": {}}, "expected a BaseStore"),
        ({"namespace": "profiles"}, "expected labels"),
        ({"key": ""}, "not empty"),
        ({"gate": "open"}, "gate is 'open'"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    """When it is made, not when the first user comes."""
    with pytest.raises(ConfigurationError, match=said):
        Profile(**{"schema": Person, **options})


def test_a_field_that_the_schema_leaves_out_is_refused(store: SQLiteStore) -> None:
    """It would be lost when the profile is written."""
    with pytest.raises(InvalidPatch, match="'/seen' is an unknown field"):
        written(Profile(Lossy, store), {"seen": "x"}, ANN)


def test_a_place_that_cannot_be_is_refused(store: SQLiteStore) -> None:
    """No user id, a wrong one, no store, perdure's own namespace, somebody else's item."""
    profile = Profile(Person, store)
    for config in (None, run_of(), run_of(user_id=""), run_of(user_id=3)):
        with pytest.raises(InvalidConfig, match="user_id"):
            written(profile, {"name": "Ann"}, config)
    with pytest.raises(ConfigurationError, match="no store"):
        Profile(Person).get(ANN)
    with pytest.raises(InvalidNamespace, match="perdure"):
        Profile(Person, store, namespace=("{user_id}",)).get(run_of(user_id="perdure"))
    store.put(NAMESPACE, "profile", {"text": "A fact", "kind": "fact", "sections": []})
    doing: list[Any] = [
        profile.get,
        profile.history,
        profile.forget,
        lambda config: written(profile, {"name": "Ann"}, config),
    ]
    for do in doing:
        with pytest.raises(ConfigurationError, match="is not a profile"):
            do(ANN)
    assert store.get(NAMESPACE, "profile").value["text"] == "A fact"  # type: ignore[union-attr]


# -- the gate

CARD = "4111 1111 1111 1111"
PASSWORD = "hunter2secret"
SENSITIVE: dict[str, tuple[dict[str, Any], str]] = {
    "a password": (
        {"note": f"my password is {PASSWORD}"},
        "'/note' cannot be stored: the text contains a pa",
    ),
    "a card": ({"home": {"note": f"it is {CARD}"}}, "'/home/note' cannot be stored"),
    "a card's number": ({"card": 4111111111111111}, "'/card' cannot be stored"),
    "in a list": ({"likes": ["tea", {"a": [CARD]}]}, "'/likes/1/a/0' cannot be stored"),
    "what its field calls a secret": ({"api_key": "abcd1234"}, "'/api_key' cannot be stored"),
    "a number that it does": ({"pin": 4711}, "'/pin' cannot be stored"),
    "deeper": ({"bank": {"my_pin": "4711"}}, "'/bank/my_pin' cannot be stored"),
    "a name after another": ({"password": {"hunter22": True}}, "'the change' cannot be stored"),
    "the name of a field": ({"a": [{CARD: 1}]}, "'/a/0/[card]' cannot be stored"),
}
SECRETS = (PASSWORD, "hunter22", CARD, "4111111111111111", "abcd1234", "4711")


@pytest.mark.parametrize("case", SENSITIVE)
def test_what_the_gate_does_not_let_pass_is_not_written(any_store: Any, case: str) -> None:
    """By none of the ways: the error names the field and the reason, and not the secret."""
    partial, said = SENSITIVE[case]
    profile = Profile(Notes, any_store)
    profile.set({"name": "Ann", "likes": []}, ANN)
    operations = [op("add", f"/{name}", value=value) for name, value in partial.items()]
    changes: list[Any] = [
        lambda: profile.patch(operations, ANN),
        lambda: profile.set(partial, ANN),
        lambda: asyncio.run(profile.apatch(operations, ANN)),
    ]
    for change in changes:
        with pytest.raises(InvalidPatch) as caught:
            change()
        assert said in str(caught.value)
        assert [secret for secret in SECRETS if secret in str(caught.value)] == []
    assert raw(profile, ANN) == {"name": "Ann", "likes": []}


def test_an_error_does_not_quote_a_secret(store: SQLiteStore) -> None:
    """Nor is one noted that does not stay, of the path of an operation."""
    profile = Profile(Notes, store)
    profile.patch([op("add", "/a", value=1)], ANN)
    profile.patch([op("add", f"/{CARD}", value=1), op("remove", f"/{CARD}")], ANN)
    with pytest.raises(InvalidPatch, match=r"remove '/\[card\]': can't remove") as caught:
        profile.patch([op("remove", f"/{CARD}")], ANN)

    assert CARD not in str(caught.value)
    assert caught.value.__cause__ is None
    assert [version.document for version in profile.history(ANN)] == [{"a": 1}]


def test_a_secret_is_not_quoted_by_what_the_schema_refuses(store: SQLiteStore) -> None:
    """The gate is asked first."""
    with pytest.raises(InvalidPatch, match="payment card") as caught:
        written(Profile(Person, store), {"age": CARD}, ANN)
    assert CARD not in str(caught.value)


def test_what_the_gate_blots_out_is_kept_so(profile: Profile[Person], any_store: Any) -> None:
    """Of a text its part; a number cannot be blotted out, and is refused."""
    blotting = Profile(Notes, any_store, gate=Gate(secrets="redact"))
    left = written(blotting, {"notes": ["tea", f"my card is {CARD}"], "pin": "4711 now"}, ANN)

    assert left.model_dump() == {"notes": ["tea", "my card is [card]"], "pin": "[secret] now"}
    with pytest.raises(InvalidPatch, match=r"'/card' cannot be stored: redacted "):
        written(blotting, {"card": 4111111111111111}, ANN)


def test_contacts_are_kept_by_hand(store: SQLiteStore) -> None:
    """Who writes them into a profile asks for them, unless the gate lets none pass."""
    ways = {"email": "ann@example.com", "phone": "+32 470 12 34 56"}
    assert written(Profile(Notes, store), ways, ANN).model_dump() == ways
    with pytest.raises(
        InvalidPatch, match="'/mail' cannot be stored: the text contains an e-mail address"
    ):
        written(
            Profile(Notes, store, gate=Gate(contacts="refuse")), {"mail": "bo@example.com"}, ANN
        )


def test_what_a_profile_holds_already_is_not_judged_again(store: SQLiteStore) -> None:
    """It does not stand in the way of other changes, nor when its place in a list changes."""
    lenient = Profile(Notes, store, gate=Gate(secrets="keep"))
    lenient.set({"notes": [CARD]}, ANN)
    profile = Profile(Notes, store)
    written(profile, {"name": "Ann"}, ANN)
    profile.patch([op("add", "/notes/0", value="tea")], ANN)

    assert raw(profile, ANN) == {"notes": ["tea", CARD], "name": "Ann"}


def test_the_checks_of_a_gate_are_asked(any_store: Any) -> None:
    """About each value with its name; what they put otherwise is kept so."""
    seen: list[tuple[str, str, bool]] = []

    def sober(candidate: Candidate) -> Verdict | None:
        seen.append((candidate.text, candidate.kind, candidate.explicit))
        if "beer" in candidate.text:
            return Verdict("refuse", "it is beer")
        return Verdict("keep", text="likes: milk") if "wine" in candidate.text else None

    profile = Profile(Person, any_store, gate=Gate([sober]))
    assert written(profile, {"likes": ["tea", "wine"]}, ANN).likes == ["tea", "milk"]
    assert seen == [("likes: tea", "profile", True), ("likes: wine", "profile", True)]
    with pytest.raises(InvalidPatch, match=r"'/name' cannot be stored: it is beer.*sober"):
        asyncio.run(profile.apatch([op("add", "/name", value="beer")], ANN))


def test_a_detector_that_fails_lets_nothing_pass(store: SQLiteStore) -> None:
    """Nobody knows what it would have found."""

    def failing(text: str) -> Any:
        raise RuntimeError(text)

    profile = Profile(Notes, store, gate=Gate(detectors=[failing]))
    with pytest.raises(InvalidPatch, match="a detector raised RuntimeError"):
        written(profile, {"note": CARD}, ANN)


# -- any patches


@settings(max_examples=rounds(25))
@given(st.lists(documents_and_patches(), max_size=4))
def test_a_profile_is_what_an_oracle_makes_of_it(drawn: list[Any]) -> None:
    """Patch after patch, valid or not: what is refused changes nothing, nothing else is lost."""
    with SQLiteStore.open(":memory:", index=None) as store:
        profile = Profile(Notes, store)
        expected: dict[str, Any] = {}
        for document, operations in drawn:
            given = [op("add", f"/{number}", value=part) for number, part in enumerate([document])]
            for patch in (given, [{**each, "path": f"/0{each['path']}"} for each in operations]):
                try:
                    after = apply_reference_patch(expected, patch)
                    profile.patch(patch, ANN)
                    expected = after
                except NotApplicable:
                    with pytest.raises(InvalidPatch):
                        profile.patch(patch, ANN)
                assert raw(profile, ANN) == expected
        assert profile.history(ANN) == [] or profile.history(ANN)[-1].document == expected
