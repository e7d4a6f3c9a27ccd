"""The encoding of replies as JSON, for values that orjson refuses."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from perdure.errors import SerializationError
from perdure.server.http.reply import MAX_JSON_LEVELS, encode_json

LARGE_NUMBER = 2**70


def build_nested_lists(levels: int, innermost: Any = None) -> Any:
    value = innermost
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("innermost", [None, LARGE_NUMBER, "[[{", {"]": '"[\\'}])
def test_nested_value_up_to_the_limit_can_be_read_by_clients(innermost: Any) -> None:
    """Brackets in texts are not counted."""
    value = build_nested_lists(MAX_JSON_LEVELS - 1, innermost)

    assert json.loads(encode_json(value)) == value


@pytest.mark.parametrize("levels", [MAX_JSON_LEVELS + 1, 3_000, 100_000])
@pytest.mark.parametrize("innermost", [None, LARGE_NUMBER])
def test_deeper_value_is_refused(levels: int, innermost: Any) -> None:
    """From Python 3.13 on, json.dumps encodes values that no client can decode."""
    with pytest.raises(SerializationError, match="500 levels"):
        encode_json(build_nested_lists(levels, innermost))


def test_numbers_that_json_does_not_have_become_null() -> None:
    """This also holds beside a number that only Python's own encoder accepts."""
    value = {"large": LARGE_NUMBER, "numbers": [float("nan"), float("-inf")], "text": "NaN"}
    expected = {"large": LARGE_NUMBER, "numbers": [None, None], "text": "NaN"}

    assert json.loads(encode_json(value)) == expected
    assert orjson.loads(encode_json({"numbers": [float("nan")]})) == {"numbers": [None]}
