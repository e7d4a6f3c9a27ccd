"""Patches of JSON documents: what the RFC says, and what is refused, in which words."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonpatch import JsonPointer

from perdure.errors import InvalidPatch
from perdure.memory.profile import (
    apply_patch,
    are_patched_fields_unchanged,
    check_patch_operations,
    copy_and_check_json,
    is_same_json,
)
from tests.memory.patch_oracle import NotApplicable, apply_reference_patch

MAX = 100_000


def patch(document: Any, operations: Any, **options: Any) -> Any:
    return apply_patch(document, check_patch_operations(operations), **options)


def op(name: str, path: str, **more: Any) -> dict[str, Any]:
    return {"op": name, "path": path, **more}


# -- what the RFCs say

RFC_6902: dict[str, tuple[Any, list[dict[str, Any]], Any]] = {
    "A.1 add a member": ({"foo": "bar"}, [op("add", "/baz", value=1)], {"foo": "bar", "baz": 1}),
    "A.2 add an element": ({"a": [1, 3]}, [op("add", "/a/1", value=2)], {"a": [1, 2, 3]}),
    "A.3 remove a member": ({"baz": 1, "foo": 2}, [op("remove", "/baz")], {"foo": 2}),
    "A.4 remove an element": ({"a": [1, 2, 3]}, [op("remove", "/a/1")], {"a": [1, 3]}),
    "A.5 replace": ({"baz": 1, "foo": 2}, [op("replace", "/baz", value=3)], {"baz": 3, "foo": 2}),
    "A.6 move a value": (
        {"foo": {"waldo": "fred"}, "qux": {"corge": "grault"}},
        [{"op": "move", "from": "/foo/waldo", "path": "/qux/thud"}],
        {"foo": {}, "qux": {"corge": "grault", "thud": "fred"}},
    ),
    "A.7 move an element": (
        {"foo": ["all", "grass", "cows", "eat"]},
        [{"op": "move", "from": "/foo/1", "path": "/foo/3"}],
        {"foo": ["all", "cows", "eat", "grass"]},
    ),
    "A.8 test": ({"a": "b", "c": [1]}, [op("test", "/c/0", value=1)], {"a": "b", "c": [1]}),
    "A.10 add a nested member": (
        {"foo": "bar"},
        [op("add", "/child", value={"grandchild": {}})],
        {"foo": "bar", "child": {"grandchild": {}}},
    ),
    "A.11 members that are not known": (
        {"foo": "bar"},
        [op("add", "/baz", value="qux", xyz=123)],
        {"foo": "bar", "baz": "qux"},
    ),
    "A.14 escapes": (
        {"/": 9, "~1": 10},
        [op("test", "/~01", value=10), op("replace", "/~1", value=8)],
        {"/": 8, "~1": 10},
    ),
    "A.16 add to the end": (
        {"foo": ["bar"]},
        [op("add", "/foo/-", value=["abc", "def"])],
        {"foo": ["bar", ["abc", "def"]]},
    ),
    "add in the place of a member": ({"a": 1}, [op("add", "/a", value=2)], {"a": 2}),
    "add null": ({}, [op("add", "/a", value=None)], {"a": None}),
    "an empty name": ({"": 1}, [op("replace", "/", value=2)], {"": 2}),
    "numbers as names": ({"a": {"0": 1}}, [op("remove", "/a/0")], {"a": {}}),
    "copy": ({"a": [1]}, [{"op": "copy", "from": "/a", "path": "/b"}], {"a": [1], "b": [1]}),
    "copy the whole": (
        {"a": 1},
        [{"op": "copy", "from": "", "path": "/b"}],
        {"a": 1, "b": {"a": 1}},
    ),
    "move to itself": ({"a": 1}, [{"op": "move", "from": "/a", "path": "/a"}], {"a": 1}),
    "move to a longer name": (
        {"a": 1, "ab": {}},
        [{"op": "move", "from": "/a", "path": "/ab/c"}],
        {"ab": {"c": 1}},
    ),
    "move what shifts the target": (
        {"a": [0, 1, {}]},
        [{"op": "move", "from": "/a/0", "path": "/a/1/x"}],
        {"a": [1, {"x": 0}]},
    ),
    "one is one point nought": ({"a": 1}, [op("test", "/a", value=1.0)], {"a": 1}),
    "test the whole": ({"a": [1]}, [op("test", "", value={"a": [1]})], {"a": [1]}),
    "nothing": ({"a": 1}, [], {"a": 1}),
}


@pytest.mark.parametrize("case", RFC_6902)
def test_a_patch_does_what_rfc_6902_says(case: str) -> None:
    """The examples of its appendix, and its edges; the former document stays as it is."""
    document, operations, expected = RFC_6902[case]
    former = copy.deepcopy(document)

    assert expected == patch(document, operations)
    assert former == document


# -- what is refused

ANN: dict[str, Any] = {
    "name": "Ann",
    "home": {"city": "Ghent", "zip": "9000"},
    "likes": ["tea", "figs"],
    "seen": True,
}
REFUSED: dict[str, tuple[Any, str]] = {
    "no list": ({"op": "add"}, "a dict; expected a list of at most 100 operations"),
    "text": ("[]", "a str; expected a list"),
    "none": (None, "a NoneType; expected a list"),
    "too many": ([op("remove", "/name")] * 101, "at most 100 operations"),
    "no object": ([1], "operation 1 is not a JSON Patch operation: Operation must be an object"),
    "no op": (
        [{"path": "/a"}],
        "operation 1 is not a JSON Patch operation: Operation does not contain 'op'",
    ),
    "an unknown op": ([op("upsert", "/a")], "Unknown operation 'upsert'"),
    "an op that is no text": ([{"op": ["add"], "path": "/a"}], "op must be a string"),
    "no path": ([{"op": "add", "value": 1}], "must have a 'path' member"),
    "a path that is no text": (
        [{"op": "add", "path": ["a"], "value": 1}],
        "Invalid 'path'",
    ),
    "no pointer": ([op("add", "home.city", value=1)], "must start with /"),
    "a wrong escape": ([op("add", "/a~2", value=1)], "invalid escape ~2"),
    "no value": (
        [op("add", "/a")],
        "The operation does not contain a 'value'",
    ),
    "no from": (
        [op("move", "/a")],
        "The operation does not contain a 'from'",
    ),
    "a value that is no JSON": (
        [op("add", "/a", value={1, 2})],
        "the patch is not JSON that a store accepts: $.document[0].value is",
    ),
    "not a number": ([op("add", "/a", value=float("nan"))], "is not JSON"),
    "a lone surrogate": ([op("add", "/a", value="\ud800")], "is not JSON"),
    "a name that is no text": ([op("add", "/a", value={1: 2})], "is not JSON"),
    "a missing field": (
        [op("replace", "/home/town", value=1)],
        "operation 1, replace '/home/town': can't replace a non-existent object 'town'",
    ),
    "a missing parent": (
        [op("add", "/work/city", value=1)],
        "operation 1, add '/work/city': it does not fit",
    ),
    "the second of two": ([op("remove", "/name"), op("remove", "/name")], "operation 2, remove"),
    "a missing origin": (
        [{"op": "copy", "from": "/x", "path": "/y"}],
        "operation 1, copy '/y': 'x'",
    ),
    "remove what is not there": (
        [op("remove", "/age")],
        "a non-existent object 'age'",
    ),
    "an index out of range": (
        [op("add", "/likes/3", value=1)],
        "can't insert outside of list",
    ),
    "no element there": (
        [op("replace", "/likes/2", value=1)],
        "can't replace outside of list",
    ),
    "the element after the last": (
        [op("remove", "/likes/-")],
        "it does not fit",
    ),
    "a leading zero": ([op("remove", "/likes/01")], "it does not fit"),
    "a negative index": ([op("remove", "/likes/-1")], "it does not fit"),
    "digits of another script": (
        [op("remove", "/likes/\u0661")],
        "it does not fit",
    ),
    "a very long index": (
        [op("remove", "/likes/" + "9" * 5_000)],
        "it does not fit",
    ),
    "a name in a list": (
        [op("add", "/likes/first", value=1)],
        "it does not fit",
    ),
    "a field of text": (
        [op("add", "/name/0", value="A")],
        "it does not fit",
    ),
    "a letter of text": (
        [op("test", "/name/0", value="A")],
        "it does not fit",
    ),
    "a test that fails": (
        [op("test", "/name", value="Bo")],
        "operation 1, test '/name': it does not fit",
    ),
    "true is not one": (
        [op("test", "/seen", value=1)],
        "operation 1, test '/seen': it does not fit",
    ),
    "the whole": ([op("replace", "", value={})], "the path of the whole document"),
    "remove the whole": ([op("remove", "")], "the path of the whole document"),
    "move the whole": (
        [{"op": "move", "from": "", "path": "/a"}],
        "Cannot move values into their own children",
    ),
    "move into itself": (
        [{"op": "move", "from": "/home", "path": "/home/a"}],
        "Cannot move values into their own children",
    ),
    "too large": ([op("add", "/a", value="x" * MAX)], "at most 100,000 are allowed"),
    "too large by copies": (
        [{"op": "copy", "from": "", "path": f"/copy{number}"} for number in range(100)],
        "at most 100,000 are allowed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_patch_or_cannot_be_applied_is_refused(case: str) -> None:
    """In words that tell a model, or a developer, which operation, and why."""
    operations, said = REFUSED[case]
    former = copy.deepcopy(ANN)

    with pytest.raises(InvalidPatch) as caught:
        patch(ANN, operations)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600
    assert former == ANN


def test_a_value_of_any_depth_is_refused_or_taken() -> None:
    """What is too deep for a store is refused before it is applied, or after."""
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(InvalidPatch, match="nested deeper than 64"):
        patch(ANN, [op("add", "/a", value=deep)])
    step = [op("add", "/" + "/".join("a" * depth), value={}) for depth in range(1, 101)]
    with pytest.raises(InvalidPatch, match="nested deeper than 64"):
        patch(ANN, step)


def test_what_was_given_is_not_shared_with_what_comes_of_it() -> None:
    """Who changes a value afterwards does not change the document."""
    value = ["tea"]
    out = patch(
        {"a": [1]}, [op("add", "/b", value=value), {"op": "copy", "from": "/a", "path": "/c"}]
    )
    value.append("figs")
    out["a"].append(2)

    assert out == {"a": [1, 2], "b": ["tea"], "c": [1]}


# -- fields that nobody named

LOSING: dict[str, tuple[dict[str, Any], str | None]] = {
    "an object with less": (op("replace", "/home", value={"city": "Oslo"}), "'/home/zip'"),
    "by adding": (op("add", "/home", value={"city": "Oslo"}), "'/home/zip'"),
    "deeper": (op("replace", "/in", value={"home": {"city": "Oslo"}}), "'/in/home/zip'"),
    "by a move": ({"op": "move", "from": "/in/home", "path": "/home/in"}, None),
    "by a move onto it": ({"op": "move", "from": "/likes/0", "path": "/home"}, "'/home/city'"),
    "by a copy": ({"op": "copy", "from": "/likes/0", "path": "/home"}, "'/home/city'"),
    "all of its fields": (op("replace", "/home", value={"city": "Oslo", "zip": "1"}), None),
    "without what is empty": (op("replace", "/empty", value={"b": 1}), None),
    "the field itself": (op("remove", "/home"), None),
    "null instead": (op("replace", "/home", value=None), None),
    "a list": (op("replace", "/likes", value=[]), None),
    "into a list": (op("add", "/likes/0", value={}), None),
}


@pytest.mark.parametrize("case", LOSING)
def test_an_object_does_not_lose_what_the_new_one_does_not_name(case: str) -> None:
    """With `by_model`; what is removed by its own path may go."""
    home = {"city": "Ghent", "zip": "9000"}
    document = {
        "home": home,
        "in": {"home": home},
        "likes": [{"a": 1}],
        "empty": {"a": None, "b": 2, "c": [], "d": ""},
    }
    operation, lost = LOSING[case]
    patch(document, [operation])
    if lost is None:
        assert patch(document, [operation], by_model=True) is not None
        return

    with pytest.raises(InvalidPatch) as caught:
        patch(document, [operation], by_model=True)
    assert lost in str(caught.value)


# -- any document, any patch

NAMES = st.sampled_from(["a", "b", "0", "-", "", "a/b", "~", "m~1n", "é"])
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "0"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


def places(value: Any, path: str = "") -> list[str]:
    """Every place of a document, and some that are just beside one."""
    out = [path]
    if isinstance(value, dict):
        for name, part in value.items():
            out += places(part, f"{path}/" + name.replace("~", "~0").replace("/", "~1"))
        out.append(f"{path}/new")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            out += places(part, f"{path}/{number}")
        out += [f"{path}/{len(value)}", f"{path}/-", f"{path}/{len(value) + 1}"]
    else:
        out.append(f"{path}/0")
    return out


@st.composite
def documents_and_patches(draw: st.DrawFn) -> tuple[Any, list[dict[str, Any]]]:
    document = draw(DOCUMENTS)
    paths = st.sampled_from(places(document))
    operation = st.one_of(
        st.builds(lambda path, value: op("add", path, value=value), paths, VALUES),
        st.builds(lambda path, value: op("replace", path, value=value), paths, VALUES),
        st.builds(lambda path: op("remove", path), paths),
    )
    return document, draw(st.lists(operation, max_size=4))


@given(documents_and_patches())
def test_a_patch_does_what_an_oracle_does(drawn: tuple[Any, list[dict[str, Any]]]) -> None:
    """An implementation of its own, of add, replace and remove: both refuse, or both agree."""
    document, operations = drawn
    former = copy.deepcopy(document)
    try:
        expected = apply_reference_patch(document, operations)
    except NotApplicable:
        with pytest.raises(InvalidPatch):
            patch(document, operations)
    else:
        assert json.dumps(expected, sort_keys=True) == json.dumps(
            patch(document, operations), sort_keys=True
        )
    assert former == document


@given(documents_and_patches())
def test_a_field_that_no_operation_names_stays(drawn: tuple[Any, list[dict[str, Any]]]) -> None:
    """Whatever the patch does to the others."""
    document, operations = drawn
    named = {(JsonPointer(each["path"]).parts or [""])[0] for each in operations}
    try:
        out = patch(document, operations)
    except InvalidPatch:
        return
    for name in document.keys() - named:
        assert is_same_json(document[name], out[name])


def test_a_patch_is_as_seen_if_its_fields_are() -> None:
    """Other fields may have changed; a pointer to the whole document concerns all of them."""
    home = check_patch_operations([op("replace", "/home/city", value="Oslo")])
    whole = check_patch_operations([op("test", "", value={})])
    moving = check_patch_operations([{"op": "move", "from": "/home", "path": "/a"}])
    renamed = {**ANN, "name": "Bo"}
    moved = {**ANN, "home": {"city": "Bruges"}}

    assert are_patched_fields_unchanged(home, ANN, renamed)
    assert not are_patched_fields_unchanged(home, ANN, moved)
    assert not are_patched_fields_unchanged(whole, ANN, renamed)
    assert not are_patched_fields_unchanged(moving, ANN, moved)
    assert not are_patched_fields_unchanged(home, ANN, {"name": "Ann"})


def test_the_size_is_that_of_the_json() -> None:
    """Not of its characters: what takes more bytes counts as more."""
    copy_and_check_json({"a": "é" * 49_996}, "it")
    with pytest.raises(InvalidPatch, match="takes 100,002 bytes"):
        copy_and_check_json({"a": "é" * 49_997}, "it")
