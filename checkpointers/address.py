"""Which thread, namespace and checkpoint a config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from langchain_core.runnables import RunnableConfig

from perdure.errors import InvalidConfig


class Address(NamedTuple):
    """Where a config points: thread, namespace and (perhaps) one checkpoint."""

    thread_id: str
    checkpoint_ns: str
    checkpoint_id: str | None

    def config(self, checkpoint_id: str) -> RunnableConfig:
        """The config of one checkpoint at this address."""
        return {
            "configurable": {
                "thread_id": self.thread_id,
                "checkpoint_ns": self.checkpoint_ns,
                "checkpoint_id": checkpoint_id,
            }
        }


def address(config: RunnableConfig) -> Address:
    """Read the address out of a config.

    Raises:
        InvalidConfig: `thread_id` is missing or empty, or one of the three is not text.
    """
    configurable = config.get("configurable") if isinstance(config, dict | Mapping) else None
    if not isinstance(configurable, dict | Mapping):
        raise InvalidConfig(
            f"the config {config!r} has no 'configurable' mapping; "
            "pass {'configurable': {'thread_id': 'some-id'}}"
        )
    thread_id = check_thread_id(configurable.get("thread_id"))
    ns = configurable.get("checkpoint_ns", "")
    if not isinstance(ns, str):
        raise InvalidConfig(f"checkpoint_ns is {ns!r}; expected a string ('' is the root graph)")
    checkpoint_id = configurable.get("checkpoint_id")
    if checkpoint_id is not None and not isinstance(checkpoint_id, str):
        raise InvalidConfig(f"checkpoint_id is {checkpoint_id!r}; expected a string or nothing")
    return Address(
        thread_id,
        _text("checkpoint_ns", ns),
        _text("checkpoint_id", checkpoint_id) if checkpoint_id else None,
    )


def check_thread_id(thread_id: object) -> str:
    """The thread id as text. Integers and UUIDs are taken as their text, as langgraph's savers do.

    Raises:
        InvalidConfig: It is missing, empty or of another type.
    """
    if isinstance(thread_id, bool) or not isinstance(thread_id, str | int | UUID):
        raise InvalidConfig(
            f"thread_id is {thread_id!r}; a checkpointer needs text to know which conversation "
            "this is: pass {'configurable': {'thread_id': 'some-id'}}"
        )
    text = _text("thread_id", str(thread_id))
    if not text:
        raise InvalidConfig("thread_id is empty; pass a non-empty string")
    return text


def _text(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidConfig(f"{name} is {value!r}, which is no Unicode text: {exc.reason}") from exc
    return value
