"""The stored form of messages stays readable, whatever langchain-core adds to its classes."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic.fields import FieldInfo

from perdure.checkpointers import messages
from perdure.checkpointers.messages import (
    CLASSES,
    form_of,
    full_from_stored,
    messages_from_full,
    pack_message,
)

CALL: Any = {"name": "f", "args": {"x": 1}, "id": "c1", "type": "tool_call"}
USAGE: Any = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
GOLDEN: dict[str, BaseMessage] = {
    "018300a2686904a3616e6e05a26831": HumanMessage("hi", id="h1", name="ann"),
    (
        "028600a37965730181a16b010281a16da17805a26131069184a46e616d65a166a46172677381a178"
        "01a26964a26331a474797065a9746f6f6c5f63616c6c0883ac696e7075745f746f6b656e7301ad6f"
        "75747075745f746f6b656e7302ac746f74616c5f746f6b656e7303"
    ): AIMessage(
        "yes",
        id="a1",
        additional_kwargs={"k": 1},
        response_metadata={"m": "x"},
        tool_calls=[CALL],
        usage_metadata=USAGE,
    ),
    "038200a76265206b696e6405a27331": SystemMessage("be kind", id="s1"),
    "048500a4646f6e6505a2743106a2633107910108a56572726f72": ToolMessage(
        "done", id="t1", tool_call_id="c1", artifact=[1], status="error"
    ),
}


def read(stored: bytes) -> BaseMessage:
    return messages_from_full(full_from_stored([stored]))[0]


@pytest.mark.parametrize("stored", GOLDEN)
def test_the_format_never_changes(stored: str) -> None:
    """These bytes are in files out there: they are read, and written, for ever."""
    message = GOLDEN[stored]

    assert pack_message(message) == bytes.fromhex(stored)
    assert read(bytes.fromhex(stored)) == message


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A langchain-core whose messages have two more fields, before all others and after them."""
    forms = {}
    for cls in CLASSES.values():
        fields = {
            "importance": FieldInfo(annotation=int, default=0),
            **cls.model_fields,
            "labels": FieldInfo(annotation=list, default_factory=list),
        }
        forms[cls] = form_of(cls, fields)
    monkeypatch.setattr(messages, "_FORMS", forms)


def with_new_fields(message: BaseMessage, **values: Any) -> BaseMessage:
    """A message as that langchain-core has it."""
    copy = message.model_copy()
    fields = {"importance": 0, **message.__dict__, "labels": [], **values}
    object.__setattr__(copy, "__dict__", fields)
    return copy


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("stored", GOLDEN)
def test_what_was_stored_before_a_field_was_added(stored: str) -> None:
    """It is read as it was; the new fields have their defaults, in the order of the class."""
    found = read(bytes.fromhex(stored))

    assert list(with_new_fields(GOLDEN[stored]).__dict__.items()) == list(found.__dict__.items())
    assert found.__dict__["labels"] is not read(bytes.fromhex(stored)).__dict__["labels"]


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("stored", GOLDEN)
def test_what_is_stored_after_a_field_was_added(stored: str) -> None:
    """Without the new fields the bytes are the same as ever; with one the serializer takes over."""
    message = GOLDEN[stored]

    assert pack_message(with_new_fields(message)) == bytes.fromhex(stored)
    assert pack_message(with_new_fields(message, importance=1)) is None
    assert pack_message(with_new_fields(message, labels=["x"])) is None


def test_a_default_that_is_no_plain_data() -> None:
    """A field that langchain-core adds without a default, or with an object, reads as None."""
    fields = {
        **HumanMessage.model_fields,
        "needed": FieldInfo(annotation=str),
        "thing": FieldInfo(annotation=object, default=object()),
    }

    assert form_of(HumanMessage, fields).added == {"needed": None, "thing": None}
