"""Profiles: which changes of a document are allowed, how they are stored, and which are refused."""

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

from perdure.effects import run_operation
from perdure.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidNamespace,
    InvalidPatch,
    VersionConflict,
)
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.profile import Profile
from perdure.memory.long_term.records import Candidate, StoreAdapter, Verdict, build_put
from perdure.memory.short_term.reducers import ChatState
from perdure.stores import SQLiteStore
from perdure.stores.base import Provenance
from tests.memory.long_term.test_profile_patch import draw_document_and_patch, make_op
from tests.memory.reference_patch import NotApplicable, apply_reference_patch
from tests.rounds import rounds


class Home(BaseModel):
    """The address of a person."""

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
    """A schema that accepts any fields."""

    model_config = ConfigDict(extra="allow")


NAMESPACE = ("profiles", "ann")


def make_config(**configurable: Any) -> Any:
    return {"configurable": configurable}


ANN = make_config(user_id="ann")


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


def read_stored_document(profile: Profile[Any], config: Any) -> Any:
    """Return the document as it is stored, or an empty dict if there is none."""
    versions = profile.history(config)
    return versions[-1].document if versions and versions[-1].valid_to is None else {}


def patch_fields(profile: Profile[Any], partial: dict[str, Any], config: Any = None) -> Any:
    """Patch the named fields, also those of nested objects, and return the profile.

    None removes a field.
    """
    fields = {f"/{name}": value for name, value in partial.items()}
    for path, value in list(fields.items()):
        if isinstance(value, dict):
            del fields[path]
            fields |= {f"{path}/{name}": part for name, part in value.items()}
    operations = [
        make_op("remove", path) if value is None else make_op("add", path, value=value)
        for path, value in fields.items()
    ]
    return profile.patch(operations, config)


# -- reading and changing


def test_empty_profile_has_defaults_and_no_versions(profile: Profile[Person]) -> None:
    """Neither a read nor a change without effect writes a version."""
    assert profile.get(ANN) == Person()
    assert read_stored_document(profile, ANN) == {}
    assert profile.history(ANN) == []
    profile.patch([], ANN)
    patch_fields(profile, {"name": ""}, ANN)
    profile.patch([make_op("test", "/name", value=""), make_op("remove", "/age")], ANN)

    assert profile.history(ANN) == []


def test_patches_keep_fields_that_they_do_not_name(profile: Profile[Person]) -> None:
    """Fields and other users' profiles keep their values, in every store."""
    patch_fields(profile, {"name": "Ann", "home": {"city": "Ghent"}}, ANN)
    profile.patch(
        [make_op("add", "/likes/-", value="tea"), make_op("replace", "/age", value=40)], ANN
    )
    patch_fields(profile, {"home": {"zip": "9000"}}, ANN)
    result = profile.patch([make_op("add", "/pets/0", value={"name": "Tom"})], ANN)

    home = Home(city="Ghent", zip="9000")
    assert result == Person(name="Ann", age=40, home=home, likes=["tea"], pets=[Pet(name="Tom")])
    assert profile.get(ANN) == result
    assert read_stored_document(profile, ANN) == result.model_dump(mode="json")
    assert profile.get(make_config(user_id="bo")) == Person()


def test_async_methods_return_the_same_as_sync_methods(any_store: Any) -> None:
    sync_profile, async_profile = (
        Profile(Person, any_store, key="one"),
        Profile(Person, any_store, key="other"),
    )
    operations = [make_op("replace", "/name", value="Ann")]
    sync_results = [
        sync_profile.set({"likes": ["tea"]}, ANN),
        sync_profile.patch(operations, ANN),
        sync_profile.get(ANN),
        read_stored_document(sync_profile, ANN),
        [(each.document, each.change) for each in sync_profile.history(ANN)],
        sync_profile.forget(ANN) is None,
        sync_profile.get(ANN),
    ]

    async def call_async_methods() -> list[Any]:
        return [
            await async_profile.aset({"likes": ["tea"]}, ANN),
            await async_profile.apatch(operations, ANN),
            await async_profile.aget(ANN),
            read_stored_document(async_profile, ANN),
            [(each.document, each.change) for each in await async_profile.ahistory(ANN)],
            await async_profile.aforget(ANN) is None,
            await async_profile.aget(ANN),
        ]

    assert sync_results == asyncio.run(call_async_methods())


def test_set_replaces_whole_document(profile: Profile[Person]) -> None:
    """The document may be a model or a dict. No earlier field remains."""
    patch_fields(profile, {"name": "Ann", "likes": ["tea"]}, ANN)

    assert profile.set({"age": 3}, ANN) == Person(age=3)
    assert profile.set(Person(name="Bo"), ANN) == Person(name="Bo")
    assert profile.get(ANN) == Person(name="Bo")


def test_changing_returned_documents_does_not_change_profile(any_store: Any) -> None:
    """A caller who changes a returned object in place changes no profile.

    Neither the stored document nor the defaults change.
    """
    profile = Profile(Person, any_store)
    profile.get(ANN).likes.append("x")
    assert profile.get(ANN).likes == []
    document = {"likes": ["figs"]}
    profile.set(document, ANN).likes.append("x")
    document["likes"].append("y")
    read_stored_document(profile, ANN)["likes"].append("z")
    profile.history(ANN)[0].document["likes"].append("z")

    assert profile.get(ANN).likes == ["figs"]


def test_profile_is_stored_as_searchable_text_and_document(store: SQLiteStore) -> None:
    """The text lists the fields for the search. The value holds the document unchanged."""
    profile = Profile(Person, store)
    profile.patch([make_op("replace", "/home/city", value="Ghent")], ANN)
    patch_fields(profile, {"likes": ["green tea", "figs"], "pets": [{"name": "Tom"}]}, ANN)
    [memory] = run_operation(
        StoreAdapter(store).search(("profiles",), query="Who drinks tea?", limit=5)
    )

    assert memory.kind == "profile"
    assert memory.text == "home city: Ghent\npets name: Tom\npets kind: cat\nlikes: green tea, figs"
    assert memory.value["document"] == read_stored_document(profile, ANN)
    assert store.search(("profiles",), query="replace", mode="text") == []


def test_profile_in_node_uses_store_and_config_of_graph(store: SQLiteStore) -> None:
    """Within a node neither has to be passed, and the version records the thread."""
    profile = Profile(Person)

    def learn(state: Any) -> dict[str, Any]:
        patch_fields(profile, {"name": "Ann"})
        return {}

    builder = StateGraph(ChatState).add_node("learn", learn).add_edge(START, "learn")
    graph: Any = builder.compile(store=store)
    graph.invoke({"messages": []}, make_config(user_id="ann", thread_id="t"))
    [version] = Profile(Person, store).history(ANN)

    assert version.document["name"] == "Ann"
    assert version.provenance is not None
    assert version.provenance.thread_id == "t"


# -- versions


def test_each_change_adds_a_version_readable_by_time(store: SQLiteStore) -> None:
    profile = Profile(Person, store)
    first = profile.patch([make_op("add", "/name", value="Ann")], ANN)
    moment = profile.history(ANN)[0].valid_from
    thread = make_config(user_id="ann", thread_id="t", checkpoint_id="c")
    second = patch_fields(profile, {"name": None, "age": 40}, thread)
    old, new = profile.history(ANN)

    assert [old.document, new.document] == [
        first.model_dump(mode="json"),
        read_stored_document(profile, ANN),
    ]
    assert [old.version, new.version] == [1, 2]
    assert [old.valid_to, new.valid_to] == [new.valid_from, None]
    assert [old.change, new.change] == ["patch", "patch"]
    assert old.provenance == Provenance(actor="user", trust="user")
    assert new.provenance == Provenance("t", "c", actor="user", trust="user")
    assert profile.get(ANN, as_of=moment) == first
    assert profile.get(ANN) == second == Person(age=40)


def test_forget_removes_all_versions_of_one_profile(store: SQLiteStore) -> None:
    """Other users' profiles stay."""
    profile = Profile(Person, store)
    bo = make_config(user_id="bo")
    for config in (ANN, bo):
        patch_fields(profile, {"name": "Ann"}, config)
        patch_fields(profile, {"likes": ["tea"]}, config)
    receipt = profile.forget(ANN)

    assert receipt is not None
    assert receipt.items == 1
    assert profile.history(ANN) == []
    assert store.search(NAMESPACE) == []
    assert profile.get(bo).likes == ["tea"]
    assert patch_fields(profile, {"age": 3}, ANN) == Person(age=3)


def test_store_without_versions_refuses_as_of_and_deletes_on_forget() -> None:
    """Such a store has the present document as its only version."""
    profile = Profile(Person, InMemoryStore())
    patch_fields(profile, {"name": "Ann"}, make_config(user_id="ann", thread_id="t"))
    patch_fields(profile, {"age": 4}, ANN)
    [version] = profile.history(ANN)

    assert version.document == read_stored_document(profile, ANN)
    assert version.version is None
    with pytest.raises(ConfigurationError, match="keep no versions"):
        profile.get(ANN, as_of=dt.datetime.now(dt.UTC))
    assert profile.forget(ANN) is None
    assert read_stored_document(profile, ANN) == {}


def test_profiles_with_different_keys_change_independently(store: SQLiteStore) -> None:
    """Each key has its own schema and versions within the same namespace."""
    home, pets = Profile(Home, store, key="home"), Profile(Person, store, key="person")
    patch_fields(home, {"city": "Ghent"}, ANN)
    patch_fields(pets, {"pets": [{"name": "Tom"}]}, ANN)
    patch_fields(home, {"city": "Bruges"}, ANN)

    assert [len(home.history(ANN)), len(pets.history(ANN))] == [2, 1]
    assert {item.key for item in store.search(NAMESPACE)} == {"home", "person"}
    home.forget(ANN)
    assert pets.get(ANN).pets == [Pet(name="Tom")]


# -- concurrent changes


def test_concurrent_changes_from_threads_are_all_kept(tmp_path: Path) -> None:
    """Eight threads write through two stores on the same file."""
    path = tmp_path / "s.db"
    with (
        SQLiteStore.open(path, index=None) as first_store,
        SQLiteStore.open(path, index=None) as second_store,
    ):
        ready = threading.Barrier(8)

        def write_changes(number: int) -> None:
            profile = Profile(Person, (first_store, second_store)[number % 2])
            ready.wait()
            profile.patch([make_op("add", "/likes/-", value=f"{number}")], ANN)
            patch_fields(
                profile, {("name", "home")[number % 2]: ("Ann", {"zip": "1"})[number % 2]}, ANN
            )

        threads = [threading.Thread(target=write_changes, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        result = Profile(Person, first_store).get(ANN)

    assert sorted(result.likes) == list("01234567")
    assert (result.name, result.home.zip) == ("Ann", "1")


def test_concurrent_changes_from_tasks_are_all_kept(any_store: Any) -> None:
    """The tasks run in one event loop. Stores without versions are tested too."""
    profile = Profile(Person, any_store)

    async def write() -> None:
        await asyncio.gather(
            *(profile.apatch([make_op("add", "/likes/-", value=f"{n}")], ANN) for n in range(8))
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


def test_change_is_refused_if_invalid_with_concurrent_change(store: SQLiteStore) -> None:
    """Two changes of different fields may each be valid alone and invalid together."""
    profile = Profile(Range, store)
    profile.set({"low": 0, "high": 10}, ANN)
    place = profile.get_item_handle(ANN)
    seen = run_operation(profile.read_state(place)).document
    first_change = run_operation(
        profile.plan_patch(place, [make_op("replace", "/low", value=9)], seen)
    )
    second_change = run_operation(
        profile.plan_patch(place, [make_op("replace", "/high", value=1)], seen)
    )
    run_operation(place.adapter.write(first_change))

    with pytest.raises(VersionConflict):
        run_operation(place.adapter.write(second_change))
    with pytest.raises(InvalidPatch, match="low is above high"):
        profile.patch([make_op("replace", "/high", value=1)], ANN)
    assert profile.get(ANN) == Range(low=9, high=10)


# -- planned changes


def test_planned_change_is_atomic_with_other_writes(store: SQLiteStore) -> None:
    """All writes of one transaction fail together.

    The version has the provenance that the caller set.
    """
    profile = Profile(Person, store)
    source = Provenance(thread_id="t", message_ids=("m1",), trust="user")
    place = profile.get_item_handle(ANN)._replace(provenance=source)
    seen = run_operation(profile.read_state(place)).document
    puts = run_operation(
        profile.plan_patch(place, [make_op("replace", "/name", value="Ann")], seen)
    )
    assert read_stored_document(profile, ANN) == {}
    note = build_put(("facts", "ann"), "1", {"text": "Ann"}, if_version=3)
    with pytest.raises(VersionConflict):
        run_operation(place.adapter.write([*puts, note]))
    assert read_stored_document(profile, ANN) == {}
    run_operation(place.adapter.write(puts))

    assert profile.get(ANN) == Person(name="Ann")
    assert profile.history(ANN)[0].provenance == source


def test_planned_patch_is_refused_if_its_fields_have_changed(profile: Profile[Person]) -> None:
    """A change of other fields does not matter."""
    patch_fields(profile, {"name": "Ann", "home": {"city": "Ghent", "zip": "9000"}}, ANN)
    place = profile.get_item_handle(ANN)
    seen = run_operation(profile.read_state(place)).document
    moving = [make_op("replace", "/home", value={"city": "Oslo"})]
    with pytest.raises(InvalidPatch, match="'/home/zip'"):
        run_operation(profile.plan_patch(place, moving, seen))
    patch_fields(profile, {"name": "Anna"}, ANN)
    city = [make_op("replace", "/home/city", value="Oslo")]
    [put, *_] = run_operation(profile.plan_patch(place, city, seen))
    assert put.value is not None
    assert put.value["document"]["name"] == "Anna"
    patch_fields(profile, {"home": {"city": "Bruges"}}, ANN)

    with pytest.raises(VersionConflict, match="has changed in fields that this patch also changes"):
        run_operation(profile.plan_patch(place, city, seen))


# -- refused changes and arguments

INVALID_PARTIALS: dict[str, tuple[dict[str, Any], str]] = {
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


@pytest.mark.parametrize("case", INVALID_PARTIALS)
def test_change_that_violates_schema_is_refused_and_not_written(
    profile: Profile[Person], case: str
) -> None:
    """The error names the field, for each method of writing."""
    partial, expected_message = INVALID_PARTIALS[case]
    profile.set({"name": "Ann", "home": {"city": "Ghent"}}, ANN)
    operations = [make_op("add", f"/{name}", value=value) for name, value in partial.items()]
    changes: list[Any] = [
        lambda: profile.patch(operations, ANN),
        lambda: profile.set(partial, ANN),
    ]
    for change in changes:
        with pytest.raises(InvalidPatch) as caught:
            change()
        assert expected_message in str(caught.value)
    assert profile.get(ANN) == Person(name="Ann", home=Home(city="Ghent"))
    assert len(profile.history(ANN)) == 1


@pytest.mark.parametrize("document", [None, [], "x", 3, Home(), {"a": {1}}])
def test_set_refuses_values_that_are_no_document(store: SQLiteStore, document: Any) -> None:
    """An instance of another model is refused too."""
    with pytest.raises(InvalidPatch):
        Profile(Person, store).set(document, ANN)


class Member(BaseModel):
    name: str
    city: str = "Ghent"


def test_required_fields_must_be_given_first_and_cannot_be_removed(store: SQLiteStore) -> None:
    member = Profile(Member, store)
    with pytest.raises(ConfigurationError, match=r"does not exist yet.*set\(\)"):
        member.get(ANN)
    with pytest.raises(InvalidPatch, match="'/name': Field required"):
        patch_fields(member, {"city": "Oslo"}, ANN)
    assert member.patch([make_op("add", "/name", value="Ann")], ANN) == Member(name="Ann")
    with pytest.raises(InvalidPatch, match="'/name': Field required"):
        member.patch([make_op("remove", "/name")], ANN)
    assert member.patch([make_op("remove", "/city")], ANN) == Member(name="Ann")


def test_stored_document_survives_schema_changes(store: SQLiteStore) -> None:
    """New fields get their defaults.

    A stored value that no longer fits is reported, kept, and can be repaired.
    """

    class Older(BaseModel):
        name: str = ""
        age: str = ""

    older = Profile(Older, store)
    older.set({"name": "Ann", "age": "forty"}, ANN)
    profile = Profile(Person, store)
    with pytest.raises(ConfigurationError, match=r"'/age'.*\"forty\".*history\(\)"):
        profile.get(ANN)
    assert read_stored_document(profile, ANN) == {"name": "Ann", "age": "forty"}
    with pytest.raises(InvalidPatch, match="'/age'"):
        patch_fields(profile, {"name": "Bo"}, ANN)
    assert patch_fields(profile, {"age": 40}, ANN) == Person(name="Ann", age=40)

    with pytest.raises(ConfigurationError, match="'/age'"):
        older.get(ANN)
    names = ("age", "born", "home", "pets", "likes")
    assert older.patch([make_op("remove", f"/{name}") for name in names], ANN) == Older(name="Ann")
    assert read_stored_document(older, ANN) == {"name": "Ann", "age": ""}


class Tree(BaseModel):
    value: Any = None
    inner: list[Tree] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def size(self) -> int:
        return 1 + sum(each.size for each in self.inner)


def test_schemas_with_aliases_recursion_and_extra_fields_work(store: SQLiteStore) -> None:
    class Aliased(BaseModel):
        first: str = Field(default="", alias="firstName")

    aliased = Profile(Aliased, store, key="aliased")
    assert patch_fields(aliased, {"firstName": "Ann"}, ANN) == Aliased(firstName="Ann")
    assert read_stored_document(aliased, ANN) == {"firstName": "Ann"}
    with pytest.raises(InvalidPatch, match="'/first' is an unknown field"):
        patch_fields(aliased, {"first": "Bo"}, ANN)
    tree = Profile(Tree, store, key="tree")
    grown = tree.patch([make_op("add", "/inner/-", value={"value": {"any": [1]}})], ANN)
    assert grown.size == 2
    with pytest.raises(InvalidPatch, match="'/inner/0/leaf'"):
        patch_fields(tree, {"inner": [{"leaf": 1}]}, ANN)
    notes = Profile(Notes, store, key="notes")
    assert patch_fields(notes, {"anything": 2**70}, ANN).model_dump() == {"anything": 2**70}


def raise_key_error(value: str) -> str:
    raise KeyError(value)


def test_exception_in_validator_becomes_invalid_patch(store: SQLiteStore) -> None:
    """A patch that a model wrote must not make the run fail."""

    class Fragile(BaseModel):
        name: str = ""

        @model_validator(mode="after")
        def checked(self) -> Fragile:
            if self.name:
                raise_key_error(self.name)
            return self

    with pytest.raises(InvalidPatch, match="a validator of Fragile raised KeyError"):
        patch_fields(Profile(Fragile, store), {"name": "x"}, ANN)


class SchemaWithExcludedField(BaseModel):
    seen: str = Field(default="", exclude=True)


class SchemaWithoutJsonSchema(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    lock: Any = Field(default_factory=threading.Lock)
    own: threading.Event | None = None


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"schema": dict}, "expected a pydantic model"),
        ({"schema": Person()}, "expected a pydantic model"),
        ({"schema": RootModel[list[str]]}, "expected a pydantic model"),
        ({"schema": SchemaWithoutJsonSchema}, "and a JSON schema"),
        ({"store": {}}, "expected a BaseStore"),
        ({"namespace": "profiles"}, "expected labels"),
        ({"key": ""}, "not empty"),
        ({"gate": "open"}, "gate is 'open'"),
    ],
)
def test_constructor_refuses_invalid_arguments(
    options: dict[str, Any], expected_message: str
) -> None:
    with pytest.raises(ConfigurationError, match=expected_message):
        Profile(**{"schema": Person, **options})


def test_field_excluded_from_serialization_is_refused(store: SQLiteStore) -> None:
    """Such a field would be lost when the profile is written."""
    with pytest.raises(InvalidPatch, match="'/seen' is an unknown field"):
        patch_fields(Profile(SchemaWithExcludedField, store), {"seen": "x"}, ANN)


def test_missing_user_or_store_and_foreign_items_are_refused(store: SQLiteStore) -> None:
    """A missing or invalid user id, a missing store and the reserved namespace are refused.

    An item that is not a profile is refused too.
    """
    profile = Profile(Person, store)
    for config in (None, make_config(), make_config(user_id=""), make_config(user_id=3)):
        with pytest.raises(InvalidConfig, match="user_id"):
            patch_fields(profile, {"name": "Ann"}, config)
    with pytest.raises(ConfigurationError, match="need a store"):
        Profile(Person).get(ANN)
    with pytest.raises(InvalidNamespace, match="perdure"):
        Profile(Person, store, namespace=("{user_id}",)).get(make_config(user_id="perdure"))
    store.put(NAMESPACE, "profile", {"text": "A fact", "kind": "fact", "sections": []})
    operations: list[Any] = [
        profile.get,
        profile.history,
        profile.forget,
        lambda config: patch_fields(profile, {"name": "Ann"}, config),
    ]
    for operation in operations:
        with pytest.raises(ConfigurationError, match="already holds an item that is not a profile"):
            operation(ANN)
    assert store.get(NAMESPACE, "profile").value["text"] == "A fact"  # type: ignore[union-attr]


# -- the gate

CARD = "4111 1111 1111 1111"
PASSWORD = "hunter2secret"
SENSITIVE_PARTIALS: dict[str, tuple[dict[str, Any], str]] = {
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


@pytest.mark.parametrize("case", SENSITIVE_PARTIALS)
def test_value_that_gate_refuses_is_not_written(any_store: Any, case: str) -> None:
    """The error names the field and the reason but not the secret, for each method of writing."""
    partial, expected_message = SENSITIVE_PARTIALS[case]
    profile = Profile(Notes, any_store)
    profile.set({"name": "Ann", "likes": []}, ANN)
    operations = [make_op("add", f"/{name}", value=value) for name, value in partial.items()]
    changes: list[Any] = [
        lambda: profile.patch(operations, ANN),
        lambda: profile.set(partial, ANN),
        lambda: asyncio.run(profile.apatch(operations, ANN)),
    ]
    for change in changes:
        with pytest.raises(InvalidPatch) as caught:
            change()
        assert expected_message in str(caught.value)
        assert [secret for secret in SECRETS if secret in str(caught.value)] == []
    assert read_stored_document(profile, ANN) == {"name": "Ann", "likes": []}


def test_patch_error_redacts_secret_in_path(store: SQLiteStore) -> None:
    """A secret in the path of an operation is not stored either."""
    profile = Profile(Notes, store)
    profile.patch([make_op("add", "/a", value=1)], ANN)
    profile.patch([make_op("add", f"/{CARD}", value=1), make_op("remove", f"/{CARD}")], ANN)
    with pytest.raises(InvalidPatch, match=r"remove '/\[card\]': can't remove") as caught:
        profile.patch([make_op("remove", f"/{CARD}")], ANN)

    assert CARD not in str(caught.value)
    assert caught.value.__cause__ is None
    assert [version.document for version in profile.history(ANN)] == [{"a": 1}]


def test_schema_error_does_not_quote_secret(store: SQLiteStore) -> None:
    """The gate is asked before the schema."""
    with pytest.raises(InvalidPatch, match="payment card") as caught:
        patch_fields(Profile(Person, store), {"age": CARD}, ANN)
    assert CARD not in str(caught.value)


def test_gate_with_redact_stores_redacted_text_and_refuses_numbers(
    profile: Profile[Person], any_store: Any
) -> None:
    """A number cannot be redacted in part."""
    blotting = Profile(Notes, any_store, gate=Gate(secrets="redact"))
    result = patch_fields(
        blotting, {"notes": ["tea", f"my card is {CARD}"], "pin": "4711 now"}, ANN
    )

    assert result.model_dump() == {"notes": ["tea", "my card is [card]"], "pin": "[secret] now"}
    with pytest.raises(InvalidPatch, match=r"'/card' cannot be stored: redacted "):
        patch_fields(blotting, {"card": 4111111111111111}, ANN)


def test_explicit_change_may_store_contacts_unless_gate_refuses(store: SQLiteStore) -> None:
    contacts = {"email": "ann@example.com", "phone": "+32 470 12 34 56"}
    assert patch_fields(Profile(Notes, store), contacts, ANN).model_dump() == contacts
    with pytest.raises(
        InvalidPatch, match="'/mail' cannot be stored: the text contains an e-mail address"
    ):
        patch_fields(
            Profile(Notes, store, gate=Gate(contacts="refuse")), {"mail": "bo@example.com"}, ANN
        )


def test_gate_does_not_check_unchanged_values_again(store: SQLiteStore) -> None:
    """A stored secret blocks neither other changes nor a move of its list element."""
    lenient = Profile(Notes, store, gate=Gate(secrets="keep"))
    lenient.set({"notes": [CARD]}, ANN)
    profile = Profile(Notes, store)
    patch_fields(profile, {"name": "Ann"}, ANN)
    profile.patch([make_op("add", "/notes/0", value="tea")], ANN)

    assert read_stored_document(profile, ANN) == {"notes": ["tea", CARD], "name": "Ann"}


def test_custom_gate_checks_see_each_value_and_may_replace_it(any_store: Any) -> None:
    seen: list[tuple[str, str, bool]] = []

    def sober(candidate: Candidate) -> Verdict | None:
        seen.append((candidate.text, candidate.kind, candidate.explicit))
        if "beer" in candidate.text:
            return Verdict("refuse", "it is beer")
        return Verdict("keep", text="likes: milk") if "wine" in candidate.text else None

    profile = Profile(Person, any_store, gate=Gate([sober]))
    assert patch_fields(profile, {"likes": ["tea", "wine"]}, ANN).likes == ["tea", "milk"]
    assert seen == [("likes: tea", "profile", True), ("likes: wine", "profile", True)]
    with pytest.raises(InvalidPatch, match=r"'/name' cannot be stored: it is beer.*sober"):
        asyncio.run(profile.apatch([make_op("add", "/name", value="beer")], ANN))


def test_failing_detector_refuses_change(store: SQLiteStore) -> None:
    def fail(text: str) -> Any:
        raise RuntimeError(text)

    profile = Profile(Notes, store, gate=Gate(detectors=[fail]))
    with pytest.raises(InvalidPatch, match="a detector raised RuntimeError"):
        patch_fields(profile, {"note": CARD}, ANN)


# -- random patches


@settings(max_examples=rounds(25))
@given(st.lists(draw_document_and_patch(), max_size=4))
def test_random_patches_of_profile_agree_with_oracle(drawn: list[Any]) -> None:
    """A refused patch changes nothing, and an accepted patch loses nothing."""
    with SQLiteStore.open(":memory:", index=None) as store:
        profile = Profile(Notes, store)
        expected: dict[str, Any] = {}
        for document, operations in drawn:
            adding = [
                make_op("add", f"/{number}", value=part) for number, part in enumerate([document])
            ]
            for patch in (adding, [{**each, "path": f"/0{each['path']}"} for each in operations]):
                try:
                    after = apply_reference_patch(expected, patch)
                    profile.patch(patch, ANN)
                    expected = after
                except NotApplicable:
                    with pytest.raises(InvalidPatch):
                        profile.patch(patch, ANN)
                assert read_stored_document(profile, ANN) == expected
        assert profile.history(ANN) == [] or profile.history(ANN)[-1].document == expected
