"""The stored form of messages stays readable when langchain-core changes its classes."""

from __future__ import annotations

from typing import Any, Final

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from ormsgpack import unpackb

from perdure.checkpointers.codec import Codec
from perdure.checkpointers.message_encoding import is_message_unchanged_by_validation
from perdure.checkpointers.values import pack
from perdure.errors import CorruptRecord

CODEC: Final = Codec(JsonPlusSerializer(allowed_msgpack_modules=None))
CALL: Final[Any] = {"name": "f", "args": {"x": 1}, "id": "c1", "type": "tool_call"}
USAGE: Final[Any] = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
MESSAGE_BY_STORED_FORM: Final[dict[str, BaseMessage]] = {
    (
        "920186a7636f6e74656e74a26869b16164646974696f6e616c5f6b776172677380b1726573706f6e"
        "73655f6d6574616461746180a474797065a568756d616ea46e616d65a3616e6ea26964a26831"
    ): HumanMessage("hi", id="h1", name="ann"),
    (
        "920289a7636f6e74656e74a3796573b16164646974696f6e616c5f6b776172677381a16b01b17265"
        "73706f6e73655f6d6574616461746181a16da178a474797065a26169a46e616d65c0a26964a26131"
        "aa746f6f6c5f63616c6c739184a46e616d65a166a46172677381a17801a26964a26331a474797065"
        "a9746f6f6c5f63616c6cb2696e76616c69645f746f6f6c5f63616c6c7390ae75736167655f6d6574"
        "616461746183ac696e7075745f746f6b656e7301ad6f75747075745f746f6b656e7302ac746f7461"
        "6c5f746f6b656e7303"
    ): AIMessage(
        "yes",
        id="a1",
        additional_kwargs={"k": 1},
        response_metadata={"m": "x"},
        tool_calls=[CALL],
        usage_metadata=USAGE,
    ),
    (
        "920386a7636f6e74656e74a76265206b696e64b16164646974696f6e616c5f6b776172677380b172"
        "6573706f6e73655f6d6574616461746180a474797065a673797374656da46e616d65c0a26964a273"
        "31"
    ): SystemMessage("be kind", id="s1"),
    (
        "920489a7636f6e74656e74a4646f6e65b16164646974696f6e616c5f6b776172677380b172657370"
        "6f6e73655f6d6574616461746180a474797065a4746f6f6ca46e616d65c0a26964a27431ac746f6f"
        "6c5f63616c6c5f6964a26331a861727469666163749101a6737461747573a56572726f72"
    ): ToolMessage("done", id="t1", tool_call_id="c1", artifact=[1], status="error"),
}
for_each_stored_form = pytest.mark.parametrize("stored", MESSAGE_BY_STORED_FORM)


def encode(message: BaseMessage) -> bytes:
    return CODEC.encode(message, lambda: "it")


@for_each_stored_form
def test_stored_form_of_message_never_changes(stored: str) -> None:
    """Existing files contain these bytes, so they must be read and written for ever."""
    message = MESSAGE_BY_STORED_FORM[stored]

    assert encode(message) == bytes.fromhex(stored)
    assert CODEC.decode(bytes.fromhex(stored)) == message


@for_each_stored_form
def test_message_stored_before_field_was_added_gets_its_default(stored: str) -> None:
    """An existing field stands for the new one."""
    code, fields = unpackb(bytes.fromhex(stored))
    del fields["response_metadata"]
    decoded = CODEC.decode(pack([code, fields]))

    assert decoded == MESSAGE_BY_STORED_FORM[stored].model_copy(update={"response_metadata": {}})
    assert list(decoded.__dict__) == list(MESSAGE_BY_STORED_FORM[stored].__dict__)


@for_each_stored_form
def test_message_with_default_of_new_field_keeps_stored_form(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message with another value of the new field is encoded by the serializer."""
    message = MESSAGE_BY_STORED_FORM[stored].model_copy(update={"response_metadata": {}})
    class_and_fields = type(message), frozenset(message.__dict__)
    monkeypatch.setitem(
        is_message_unchanged_by_validation.__globals__["_FIELDS"],
        class_and_fields[0],
        class_and_fields[1] - {"response_metadata"},
    )

    assert is_message_unchanged_by_validation(message)
    assert not is_message_unchanged_by_validation(
        message.model_copy(update={"response_metadata": {"m": "x"}})
    )


@for_each_stored_form
def test_unknown_field_of_newer_langchain_core_is_kept(stored: str) -> None:
    """The field is kept as an additional field of the message."""
    code, fields = unpackb(bytes.fromhex(stored))
    decoded = CODEC.decode(pack([code, fields | {"importance": 1}]))

    assert decoded.importance == 1
    assert CODEC.decode(encode(decoded)) == decoded


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", pack(7), pack([9, {}]), pack([1, 2]), pack([1, {}]), pack([1])]
)
def test_bytes_that_are_no_message_raise_corrupt_record(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        CODEC.decode_all([b"\x92" + data[1:]])
