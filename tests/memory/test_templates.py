"""Namespaces by template: one value is one label, and what cannot be filled is an error."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.runnables import RunnableLambda

from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.run_config import Template
from tests.user_names import has_letter_or_digit

# `tests/perdure/test_user_names.py` checks which names of users are refused.
values = st.text(min_size=1).filter(lambda text: has_letter_or_digit(text) and "\0" not in text)


def run_of(**configurable: Any) -> Any:
    return {"configurable": configurable}


@pytest.mark.parametrize(
    ("labels", "filled"),
    [
        (["notes"], ("notes",)),
        (["notes", "{user_id}"], ("notes", "ann")),
        (["user-{user_id}!", "x"], ("user-ann!", "x")),
    ],
)
def test_placeholders_are_filled(labels: Any, filled: tuple[str, ...]) -> None:
    """Text around a placeholder stays."""
    assert Template(labels).fill(run_of(user_id="ann", thread_id="t")) == filled


@given(values, values)
def test_a_value_is_one_label_whatever_is_in_it(one: str, other: str) -> None:
    """Two users have two namespaces, of as many labels as the template; braces are no template."""
    template = Template(("a", "u:{user_id}", "z"))

    filled = [template.fill(run_of(user_id=user)) for user in (one, other)]

    assert filled[0] == ("a", f"u:{one}", "z")
    assert (filled[0] == filled[1]) == (one == other)


@pytest.mark.parametrize(
    "labels",
    [
        [],
        "notes",
        None,
        [""],
        [3],
        ["{}"],
        ["{0}"],
        ["{user_id"],
        ["user_id}"],
        ["{user.id}"],
        ["{user[id]}"],
        ["{user_id!r}"],
        ["{user_id:>9}"],
        ["{a}-{b}"],
        ["{{user_id}}"],
        ["{user id}"],
    ],
)
def test_what_is_no_template_is_refused_when_it_is_built(labels: Any) -> None:
    """Before any run, by an error that shows the offending label."""
    with pytest.raises(ConfigurationError, match="template"):
        Template(labels)


@pytest.mark.parametrize("value", ["", " ", "\n\t", "a\0b", None, 7, ["ann"], b"ann", True])
def test_a_value_that_is_no_text_is_refused(value: Any) -> None:
    """Nothing stands in for it: else it could be another user's."""
    with pytest.raises(InvalidConfig, match="user_id"):
        Template(["{user_id}"]).fill(run_of(user_id=value))


@pytest.mark.parametrize("config", [None, {}, run_of(), run_of(userid="ann")])
def test_a_value_that_is_missing_is_refused(config: Any) -> None:
    """The message says what to pass."""
    with pytest.raises(InvalidConfig, match=r"pass context=\{'user_id'.* or config=.*'user_id'"):
        Template(["{user_id}"]).fill(config)


def test_a_text_enum_gives_its_text() -> None:
    class User(enum.StrEnum):
        ANN = "ann"

    [label] = Template(["{user_id}"]).fill(run_of(user_id=User.ANN))

    assert (label, type(label)) == ("ann", str)


def test_within_a_run_its_config_is_found() -> None:
    """A node need not pass its config on; one that is given counts alone."""
    template = Template(["{user_id}"])
    node: RunnableLambda[Any, Any] = RunnableLambda(lambda given: template.fill(given))

    assert node.invoke(None, run_of(user_id="ann")) == ("ann",)
    assert node.invoke(run_of(user_id="bo"), run_of(user_id="ann")) == ("bo",)
    with pytest.raises(InvalidConfig):
        node.invoke(run_of(other="x"), run_of(user_id="ann"))
