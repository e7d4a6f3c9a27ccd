"""JSON patches: what RFC 6902 says, which patches are refused, and with which messages."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonpatch import JsonPointer

from perdure.errors import InvalidPatch
from perdure.memory.long_term.profile import (
    apply_patch,
    are_patched_fields_unchanged,
    check_patch_operations,
    copy_and_check_json,
    is_same_json,
)
from tests.memory.reference_patch import NotApplicable, apply_reference_patch

MAX_BYTES = 100_000


def check_and_apply_patch(document: Any, operations: Any, **options: Any) -> Any:
    return apply_patch(document, check_patch_operations(operations), **options)


def make_op(name: str, path: str, **more: Any) -> dict[str, Any]:
    return {"op": name, "path": path, **more}


# -- the rules of RFC 6902

RFC_6902_CASES: dict[str, tuple[Any, list[dict[str, Any]], Any]] = {
    "A.1 add a member": (
        {"foo": "bar"},
        [make_op("add", "/baz", value=1)],
        {"foo": "bar", "baz": 1},
    ),
    "A.2 add an element": ({"a": [1, 3]}, [make_op("add", "/a/1", value=2)], {"a": [1, 2, 3]}),
    "A.3 remove a member": ({"baz": 1, "foo": 2}, [make_op("remove", "/baz")], {"foo": 2}),
    "A.4 remove an element": ({"a": [1, 2, 3]}, [make_op("remove", "/a/1")], {"a": [1, 3]}),
    "A.5 replace": (
        {"baz": 1, "foo": 2},
        [make_op("replace", "/baz", value=3)],
        {"baz": 3, "foo": 2},
    ),
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
    "A.8 test": ({"a": "b", "c": [1]}, [make_op("test", "/c/0", value=1)], {"a": "b", "c": [1]}),
    "A.10 add a nested member": (
        {"foo": "bar"},
        [make_op("add", "/child", value={"grandchild": {}})],
        {"foo": "bar", "child": {"grandchild": {}}},
    ),
    "A.11 members that are not known": (
        {"foo": "bar"},
        [make_op("add", "/baz", value="qux", xyz=123)],
        {"foo": "bar", "baz": "qux"},
    ),
    "A.14 escapes": (
        {"/": 9, "~1": 10},
        [make_op("test", "/~01", value=10), make_op("replace", "/~1", value=8)],
        {"/": 8, "~1": 10},
    ),
    "A.16 add to the end": (
        {"foo": ["bar"]},
        [make_op("add", "/foo/-", value=["abc", "def"])],
        {"foo": ["bar", ["abc", "def"]]},
    ),
    "add in the place of a member": ({"a": 1}, [make_op("add", "/a", value=2)], {"a": 2}),
    "add null": ({}, [make_op("add", "/a", value=None)], {"a": None}),
    "an empty name": ({"": 1}, [make_op("replace", "/", value=2)], {"": 2}),
    "numbers as names": ({"a": {"0": 1}}, [make_op("remove", "/a/0")], {"a": {}}),
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
    "one is one point nought": ({"a": 1}, [make_op("test", "/a", value=1.0)], {"a": 1}),
    "test the whole": ({"a": [1]}, [make_op("test", "", value={"a": [1]})], {"a": [1]}),
    "nothing": ({"a": 1}, [], {"a": 1}),
}


@pytest.mark.parametrize("case", RFC_6902_CASES)
def test_patch_behaves_as_in_rfc_6902(case: str) -> None:
    """The examples of the appendix and some edge cases hold. The original document is unchanged."""
    document, operations, expected = RFC_6902_CASES[case]
    former = copy.deepcopy(document)

    assert expected == check_and_apply_patch(document, operations)
    assert former == document


# -- refused patches

ANN: dict[str, Any] = {
    "name": "Ann",
    "home": {"city": "Ghent", "zip": "9000"},
    "likes": ["tea", "figs"],
    "seen": True,
}
REFUSED_PATCHES: dict[str, tuple[Any, str]] = {
    "no list": ({"op": "add"}, "a dict; expected a list of at most 100 operations"),
    "text": ("[]", "a str; expected a list"),
    "none": (None, "a NoneType; expected a list"),
    "too many": ([make_op("remove", "/name")] * 101, "at most 100 operations"),
    "no object": ([1], "operation 1 is not a JSON Patch operation: Operation must be an object"),
    "no op": (
        [{"path": "/a"}],
        "operation 1 is not a JSON Patch operation: Operation does not contain 'op'",
    ),
    "an unknown op": ([make_op("upsert", "/a")], "Unknown operation 'upsert'"),
    "an op that is no text": ([{"op": ["add"], "path": "/a"}], "op must be a string"),
    "no path": ([{"op": "add", "value": 1}], "must have a 'path' member"),
    "a path that is no text": (
        [{"op": "add", "path": ["a"], "value": 1}],
        "Invalid 'path'",
    ),
    "no pointer": ([make_op("add", "home.city", value=1)], "must start with /"),
    "a wrong escape": ([make_op("add", "/a~2", value=1)], "invalid escape ~2"),
    "no value": (
        [make_op("add", "/a")],
        "The operation does not contain a 'value'",
    ),
    "no from": (
        [make_op("move", "/a")],
        "The operation does not contain a 'from'",
    ),
    "a value that is no JSON": (
        [make_op("add", "/a", value={1, 2})],
        "the patch cannot be stored as JSON: $.document[0].value is",
    ),
    "not a number": ([make_op("add", "/a", value=float("nan"))], "cannot be stored as JSON"),
    "a lone surrogate": ([make_op("add", "/a", value="\ud800")], "cannot be stored as JSON"),
    "a name that is no text": ([make_op("add", "/a", value={1: 2})], "cannot be stored as JSON"),
    "a missing field": (
        [make_op("replace", "/home/town", value=1)],
        "operation 1, replace '/home/town': can't replace a non-existent object 'town'",
    ),
    "a missing parent": (
        [make_op("add", "/work/city", value=1)],
        "operation 1, add '/work/city': it cannot be applied",
    ),
    "the second of two": (
        [make_op("remove", "/name"), make_op("remove", "/name")],
        "operation 2, remove",
    ),
    "a missing origin": (
        [{"op": "copy", "from": "/x", "path": "/y"}],
        "operation 1, copy '/y': 'x'",
    ),
    "remove what is not there": (
        [make_op("remove", "/age")],
        "a non-existent object 'age'",
    ),
    "an index out of range": (
        [make_op("add", "/likes/3", value=1)],
        "can't insert outside of list",
    ),
    "no element there": (
        [make_op("replace", "/likes/2", value=1)],
        "can't replace outside of list",
    ),
    "the element after the last": (
        [make_op("remove", "/likes/-")],
        "it cannot be applied",
    ),
    "a leading zero": ([make_op("remove", "/likes/01")], "it cannot be applied"),
    "a negative index": ([make_op("remove", "/likes/-1")], "it cannot be applied"),
    "digits of another script": (
        [make_op("remove", "/likes/\u0661")],
        "it cannot be applied",
    ),
    "a very long index": (
        [make_op("remove", "/likes/" + "9" * 5_000)],
        "it cannot be applied",
    ),
    "a name in a list": (
        [make_op("add", "/likes/first", value=1)],
        "it cannot be applied",
    ),
    "a field of text": (
        [make_op("add", "/name/0", value="A")],
        "it cannot be applied",
    ),
    "a letter of text": (
        [make_op("test", "/name/0", value="A")],
        "it cannot be applied",
    ),
    "a test that fails": (
        [make_op("test", "/name", value="Bo")],
        "operation 1, test '/name': it cannot be applied",
    ),
    "true is not one": (
        [make_op("test", "/seen", value=1)],
        "operation 1, test '/seen': it cannot be applied",
    ),
    "the whole": ([make_op("replace", "", value={})], "would change the whole document"),
    "remove the whole": ([make_op("remove", "")], "would change the whole document"),
    "move the whole": (
        [{"op": "move", "from": "", "path": "/a"}],
        "Cannot move values into their own children",
    ),
    "move into itself": (
        [{"op": "move", "from": "/home", "path": "/home/a"}],
        "Cannot move values into their own children",
    ),
    "too large": ([make_op("add", "/a", value="x" * MAX_BYTES)], "at most 100,000 are allowed"),
    "too large by copies": (
        [{"op": "copy", "from": "", "path": f"/copy{number}"} for number in range(100)],
        "at most 100,000 are allowed",
    ),
}


@pytest.mark.parametrize("case", REFUSED_PATCHES)
def test_invalid_patch_is_refused_with_operation_and_reason(case: str) -> None:
    """The message tells a model or a developer which operation failed, and why."""
    operations, expected_message = REFUSED_PATCHES[case]
    former = copy.deepcopy(ANN)

    with pytest.raises(InvalidPatch) as caught:
        check_and_apply_patch(ANN, operations)
    assert expected_message in str(caught.value)
    assert len(str(caught.value)) < 600
    assert former == ANN


def test_patch_that_nests_too_deeply_is_refused() -> None:
    """The depth is checked both before and after the patch is applied."""
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(InvalidPatch, match="nested deeper than 64"):
        check_and_apply_patch(ANN, [make_op("add", "/a", value=deep)])
    step = [make_op("add", "/" + "/".join("a" * depth), value={}) for depth in range(1, 101)]
    with pytest.raises(InvalidPatch, match="nested deeper than 64"):
        check_and_apply_patch(ANN, step)


def test_patched_document_shares_no_values_with_its_inputs() -> None:
    """A later change of the patch or of the original does not change the result."""
    value = ["tea"]
    out = check_and_apply_patch(
        {"a": [1]}, [make_op("add", "/b", value=value), {"op": "copy", "from": "/a", "path": "/c"}]
    )
    value.append("figs")
    out["a"].append(2)

    assert out == {"a": [1, 2], "b": ["tea"], "c": [1]}


# -- fields that no operation names

FIELD_LOSING_OPERATIONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "an object with less": (make_op("replace", "/home", value={"city": "Oslo"}), "'/home/zip'"),
    "by adding": (make_op("add", "/home", value={"city": "Oslo"}), "'/home/zip'"),
    "deeper": (make_op("replace", "/in", value={"home": {"city": "Oslo"}}), "'/in/home/zip'"),
    "by a move": ({"op": "move", "from": "/in/home", "path": "/home/in"}, None),
    "by a move onto it": ({"op": "move", "from": "/likes/0", "path": "/home"}, "'/home/city'"),
    "by a copy": ({"op": "copy", "from": "/likes/0", "path": "/home"}, "'/home/city'"),
    "all of its fields": (make_op("replace", "/home", value={"city": "Oslo", "zip": "1"}), None),
    "without what is empty": (make_op("replace", "/empty", value={"b": 1}), None),
    "the field itself": (make_op("remove", "/home"), None),
    "null instead": (make_op("replace", "/home", value=None), None),
    "a list": (make_op("replace", "/likes", value=[]), None),
    "into a list": (make_op("add", "/likes/0", value={}), None),
}


@pytest.mark.parametrize("case", FIELD_LOSING_OPERATIONS)
def test_patch_by_model_must_not_drop_unnamed_fields_of_object(case: str) -> None:
    """With `by_model`, a field may be removed only by its own path."""
    home = {"city": "Ghent", "zip": "9000"}
    document = {
        "home": home,
        "in": {"home": home},
        "likes": [{"a": 1}],
        "empty": {"a": None, "b": 2, "c": [], "d": ""},
    }
    operation, lost_path = FIELD_LOSING_OPERATIONS[case]
    check_and_apply_patch(document, [operation])
    if lost_path is None:
        assert check_and_apply_patch(document, [operation], by_model=True) is not None
        return

    with pytest.raises(InvalidPatch) as caught:
        check_and_apply_patch(document, [operation], by_model=True)
    assert lost_path in str(caught.value)


# -- any document, any patch

NAMES = st.sampled_from(["a", "b", "0", "-", "", "a/b", "~", "m~1n", "é"])
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "0"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


def list_pointers(value: Any, path: str = "") -> list[str]:
    """Return the pointers to all values in `value`, and some pointers to missing values."""
    out = [path]
    if isinstance(value, dict):
        for name, part in value.items():
            out += list_pointers(part, f"{path}/" + name.replace("~", "~0").replace("/", "~1"))
        out.append(f"{path}/new")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            out += list_pointers(part, f"{path}/{number}")
        out += [f"{path}/{len(value)}", f"{path}/-", f"{path}/{len(value) + 1}"]
    else:
        out.append(f"{path}/0")
    return out


@st.composite
def draw_document_and_patch(draw: st.DrawFn) -> tuple[Any, list[dict[str, Any]]]:
    document = draw(DOCUMENTS)
    paths = st.sampled_from(list_pointers(document))
    operation = st.one_of(
        st.builds(lambda path, value: make_op("add", path, value=value), paths, VALUES),
        st.builds(lambda path, value: make_op("replace", path, value=value), paths, VALUES),
        st.builds(lambda path: make_op("remove", path), paths),
    )
    return document, draw(st.lists(operation, max_size=4))


@given(draw_document_and_patch())
def test_random_patches_agree_with_oracle(drawn: tuple[Any, list[dict[str, Any]]]) -> None:
    """The oracle is an independent implementation of add, replace and remove.

    Both agree, or both refuse the patch.
    """
    document, operations = drawn
    former = copy.deepcopy(document)
    try:
        expected = apply_reference_patch(document, operations)
    except NotApplicable:
        with pytest.raises(InvalidPatch):
            check_and_apply_patch(document, operations)
    else:
        assert json.dumps(expected, sort_keys=True) == json.dumps(
            check_and_apply_patch(document, operations), sort_keys=True
        )
    assert former == document


@given(draw_document_and_patch())
def test_patch_keeps_fields_that_no_operation_names(
    drawn: tuple[Any, list[dict[str, Any]]],
) -> None:
    document, operations = drawn
    named = {(JsonPointer(operation["path"]).parts or [""])[0] for operation in operations}
    try:
        out = check_and_apply_patch(document, operations)
    except InvalidPatch:
        return
    for name in document.keys() - named:
        assert is_same_json(document[name], out[name])


def test_unchanged_check_looks_only_at_fields_of_the_patch() -> None:
    """Other fields may have changed, except if a pointer names the whole document."""
    home = check_patch_operations([make_op("replace", "/home/city", value="Oslo")])
    whole = check_patch_operations([make_op("test", "", value={})])
    moving = check_patch_operations([{"op": "move", "from": "/home", "path": "/a"}])
    renamed = {**ANN, "name": "Bo"}
    moved = {**ANN, "home": {"city": "Bruges"}}

    assert are_patched_fields_unchanged(home, ANN, renamed)
    assert not are_patched_fields_unchanged(home, ANN, moved)
    assert not are_patched_fields_unchanged(whole, ANN, renamed)
    assert not are_patched_fields_unchanged(moving, ANN, moved)
    assert not are_patched_fields_unchanged(home, ANN, {"name": "Ann"})


def test_json_size_limit_counts_bytes_not_characters() -> None:
    copy_and_check_json({"a": "é" * 49_996}, "it")
    with pytest.raises(InvalidPatch, match="has 100,002 bytes"):
        copy_and_check_json({"a": "é" * 49_997}, "it")
