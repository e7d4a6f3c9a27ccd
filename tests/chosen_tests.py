"""Choose the tests that `make test` runs.

`make test` leaves out slow tests. A test with several parameters has a variant for each combination
of their values, and `make test` runs as many variants as are needed for each value of each
parameter to occur. `--all` runs all tests, and `--rest` runs what `make test` left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def choose_tests(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that `make test` runs.

    Of the tests that are not slow, these are all tests without parameters, and of each parametrised
    test a set of variants in which each value of each parameter occurs at least once.
    """
    chosen = list[pytest.Item]()
    variants_of_tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            continue
        if hasattr(item, "callspec"):
            variants_of_tests[item.nodeid.partition("[")[0]].append(item)
        else:
            chosen.append(item)
    for variants in variants_of_tests.values():
        chosen += _choose_covering_variants(variants)
    return chosen


def has_more_rounds(item: pytest.Item) -> bool:
    """Return whether a test does more rounds or more random examples with `--all` and `--rest`."""
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return bool(is_property) or item.get_closest_marker("repeats") is not None


def _choose_covering_variants(variants: list[pytest.Item]) -> list[pytest.Item]:
    """Return variants in which each value of each parameter occurs.

    Each chosen variant has the largest number of values that the variants before it do not have. If
    several variants have the same number, the first of them is chosen.
    """
    values_of_variants = {variant: _list_values(variant) for variant in variants}
    missing = set[tuple[str, int]]().union(*values_of_variants.values())
    chosen = []
    while missing:
        best = max(variants, key=lambda variant: len(missing & values_of_variants[variant]))
        chosen.append(best)
        missing -= values_of_variants[best]
    return chosen


def _list_values(variant: pytest.Item) -> set[tuple[str, int]]:
    """Return the name of each parameter with the identity of its value.

    All variants with the same value of a parameter have the same object.
    """
    params: dict[str, object] = vars(variant)["callspec"].params
    return {(name, id(value)) for name, value in params.items()}
