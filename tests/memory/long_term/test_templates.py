"""Namespace templates: each value fills one label, and a missing or invalid value is an error."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.runnables import RunnableLambda

from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.namespace_templates import Template
from tests.user_names import has_letter_or_digit

# `tests/perdure/test_user_names.py` checks which names of users are refused.
USER_IDS = st.text(min_size=1).filter(lambda text: has_letter_or_digit(text) and "\0" not in text)


def make_config(**configurable: Any) -> Any:
    return {"configurable": configurable}


@pytest.mark.parametrize(
    ("labels", "expected_namespace"),
    [
        (["notes"], ("notes",)),
        (["notes", "{user_id}"], ("notes", "ann")),
        (["user-{user_id}!", "x"], ("user-ann!", "x")),
    ],
)
def test_placeholders_are_filled_and_other_text_stays(
    labels: Any, expected_namespace: tuple[str, ...]
) -> None:
    assert Template(labels).fill(make_config(user_id="ann", thread_id="t")) == expected_namespace


@given(USER_IDS, USER_IDS)
def test_each_value_fills_exactly_one_label(first_user: str, second_user: str) -> None:
    """Two users have two namespaces with as many labels as the template.

    Braces in a value have no meaning.
    """
    template = Template(("a", "u:{user_id}", "z"))

    filled = [template.fill(make_config(user_id=user)) for user in (first_user, second_user)]

    assert filled[0] == ("a", f"u:{first_user}", "z")
    assert (filled[0] == filled[1]) == (first_user == second_user)


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
def test_invalid_template_is_refused_when_built(labels: Any) -> None:
    """The error shows the invalid label."""
    with pytest.raises(ConfigurationError, match="template"):
        Template(labels)


@pytest.mark.parametrize("value", ["", " ", "\n\t", "a\0b", None, 7, ["ann"], b"ann", True])
def test_value_that_is_no_visible_text_is_refused(value: Any) -> None:
    """No default is used, because it could be the name of another user."""
    with pytest.raises(InvalidConfig, match="user_id"):
        Template(["{user_id}"]).fill(make_config(user_id=value))


@pytest.mark.parametrize("config", [None, {}, make_config(), make_config(userid="ann")])
def test_missing_value_is_refused_with_advice(config: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"pass context=\{'user_id'.* or config=.*'user_id'"):
        Template(["{user_id}"]).fill(config)


def test_text_enum_is_filled_as_plain_text() -> None:
    class User(enum.StrEnum):
        ANN = "ann"

    [label] = Template(["{user_id}"]).fill(make_config(user_id=User.ANN))

    assert (label, type(label)) == ("ann", str)


def test_template_uses_config_of_current_run_unless_given_one() -> None:
    template = Template(["{user_id}"])
    node: RunnableLambda[Any, Any] = RunnableLambda(lambda given: template.fill(given))

    assert node.invoke(None, make_config(user_id="ann")) == ("ann",)
    assert node.invoke(make_config(user_id="bo"), make_config(user_id="ann")) == ("bo",)
    with pytest.raises(InvalidConfig):
        node.invoke(make_config(other="x"), make_config(user_id="ann"))
