"""The variants of tests that `make test` runs cover each value of each parameter."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chosen_tests import choose_tests

BACKENDS = ["file", "sealed", "postgres"]
DURABILITIES = ["sync", "exit"]
CASES = ["a", "b", "c", "d"]


class CollectedTest(SimpleNamespace):
    """The attributes of a collected test that the choice uses. Like a test, it can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def make_test(name: str, *, is_slow: bool = False, **params: Any) -> Any:
    """Return an object with the attributes of a collected test."""
    item = CollectedTest(
        nodeid=f"tests/test_x.py::{name}[{'-'.join(params.values())}]",
        get_closest_marker=lambda marker: marker == "slow" or None if is_slow else None,
    )
    if params:
        item.callspec = SimpleNamespace(params=params)
    return item


def make_all_variants(name: str) -> list[Any]:
    combinations = product(BACKENDS, DURABILITIES, CASES)
    return [make_test(name, backend=b, durability=d, case=c) for b, d, c in combinations]


def test_each_value_of_each_parameter_occurs_in_few_variants() -> None:
    chosen: list[Any] = choose_tests(
        [*make_all_variants("test_one"), *make_all_variants("test_two")]
    )

    for name in ("test_one", "test_two"):
        params = [item.callspec.params for item in chosen if name in item.nodeid]
        assert {each["backend"] for each in params} == {*BACKENDS}
        assert {each["durability"] for each in params} == {*DURABILITIES}
        assert {each["case"] for each in params} == {*CASES}
        assert len(params) == len(CASES)


@pytest.mark.parametrize("name", ["test_one", "test_two"])
def test_tests_with_one_parameter_and_without_parameters_are_all_chosen(name: str) -> None:
    items = [make_test(name), *(make_test(name, case=case) for case in CASES)]

    assert {id(item) for item in choose_tests(items)} == {id(item) for item in items}


def test_slow_tests_are_left_out_and_cover_no_value() -> None:
    slow = make_test("test_one", is_slow=True, backend="file", case="a")
    quick = [make_test("test_one", backend="file", case=case) for case in ("a", "b")]

    assert choose_tests([slow, *quick]) == quick
