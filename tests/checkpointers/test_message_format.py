"""The stored form of messages stays readable, whatever langchain-core does to its classes."""

from __future__ import annotations

from typing import Any, Final

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from ormsgpack import unpackb

from perdure.checkpointers.codec import Codec
from perdure.checkpointers.messages import is_message_unchanged_by_validation
from perdure.checkpointers.values import pack
from perdure.errors import CorruptRecord

CODEC: Final = Codec(JsonPlusSerializer(allowed_msgpack_modules=None))
CALL: Final[Any] = {"name": "f", "args": {"x": 1}, "id": "c1", "type": "tool_call"}
USAGE: Final[Any] = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
GOLDEN: Final[dict[str, BaseMessage]] = {
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
golden = pytest.mark.parametrize("stored", GOLDEN)


def encoded(message: BaseMessage) -> bytes:
    return CODEC.encode(message, lambda: "it")


@golden
def test_the_format_never_changes(stored: str) -> None:
    """These bytes are in files out there: they are read, and written, for ever."""
    message = GOLDEN[stored]

    assert encoded(message) == bytes.fromhex(stored)
    assert CODEC.decode(bytes.fromhex(stored)) == message


@golden
def test_what_was_stored_before_a_field_was_added(stored: str) -> None:
    """It is read with the default of the field; here a field of today is taken for the new one."""
    code, fields = unpackb(bytes.fromhex(stored))
    del fields["response_metadata"]
    found = CODEC.decode(pack([code, fields]))

    assert found == GOLDEN[stored].model_copy(update={"response_metadata": {}})
    assert list(found.__dict__) == list(GOLDEN[stored].__dict__)


@golden
def test_what_is_stored_once_a_field_is_added(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its default a message has the same form; else the serializer takes over."""
    message = GOLDEN[stored].model_copy(update={"response_metadata": {}})
    today = type(message), frozenset(message.__dict__)
    monkeypatch.setitem(
        is_message_unchanged_by_validation.__globals__["_FIELDS"],
        today[0],
        today[1] - {"response_metadata"},
    )

    assert is_message_unchanged_by_validation(message)
    assert not is_message_unchanged_by_validation(
        message.model_copy(update={"response_metadata": {"m": "x"}})
    )


@golden
def test_a_field_that_this_langchain_core_has_not_got(stored: str) -> None:
    """A newer one wrote it: as any additional field, it is kept with the message."""
    code, fields = unpackb(bytes.fromhex(stored))
    found = CODEC.decode(pack([code, fields | {"importance": 1}]))

    assert found.importance == 1
    assert CODEC.decode(encoded(found)) == found


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", pack(7), pack([9, {}]), pack([1, 2]), pack([1, {}]), pack([1])]
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        CODEC.decode_all([b"\x92" + data[1:]])
