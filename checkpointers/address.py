"""Addresses: the thread, namespace and checkpoint that a config names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError, InvalidConfig

REMOVALS_KEY: Final = "__perdure_removals"
"""The key in `configurable` under which a config holds the number of the newest removal record.

See `removal_records`. langgraph does not copy keys that begin with two underscores to the metadata
of a checkpoint.
"""
WITHOUT_MEMORY_KEY: Final = "__perdure_without_memory"
"""The key in `configurable` that, with the value True, marks a run which neither recalls nor
remembers anything of a user.

The server sets it for a message that somebody else sends on a person's thread. The `user_id` of the
run is `""` then, and the metadata of its checkpoints keeps the person.
"""
TEAMS_KEY: Final = "__perdure_teams"
"""The key in `configurable` under which the server lists the teams whose memory a run may use.

Without this key, `team` and `teams` in the context or the `configurable` of a run decide.
"""
_MAPPING: Final = (dict, Mapping)


class Address(NamedTuple):
    """The address in a config: thread, namespace and perhaps one checkpoint."""

    thread_id: str
    checkpoint_ns: str
    checkpoint_id: str | None

    def config(self, checkpoint_id: str, removals: int = 0) -> RunnableConfig:
        """Return the config of one checkpoint at this address.

        Args:
            checkpoint_id: The id of the checkpoint.
            removals: The number of the newest removal record whose messages are missing from the
                state of the checkpoint.
        """
        configurable: dict[str, Any] = {
            "thread_id": self.thread_id,
            "checkpoint_ns": self.checkpoint_ns,
            "checkpoint_id": checkpoint_id,
        }
        if removals:
            configurable[REMOVALS_KEY] = removals
        return {"configurable": configurable}


def parse_address(config: RunnableConfig) -> Address:
    """The address in a config; raises as `named` does."""
    configurable = config.get("configurable") if isinstance(config, _MAPPING) else None
    if not isinstance(configurable, _MAPPING):
        raise InvalidConfig(
            f"the config {config!r} has no 'configurable' mapping; "
            "pass {'configurable': {'thread_id': 'some-id'}}"
        )
    at = thread_id, ns, uid = (
        configurable.get("thread_id"),
        configurable.get("checkpoint_ns", ""),
        configurable.get("checkpoint_id"),
    )
    if not (type(thread_id) is type(ns) is str and (uid is None or type(uid) is str)):
        return build_address(*at)
    plain = thread_id and thread_id.isascii() and ns.isascii() and (uid is None or uid.isascii())
    return Address(thread_id, ns, uid or None) if plain else build_address(*at)


def build_address(thread_id: object, checkpoint_ns: object, checkpoint_id: object) -> Address:
    """An address of these parts; no checkpoint_id, or an empty one, is the head's.

    Raises:
        InvalidConfig: `thread_id` is missing or empty, or one of the three is not text.
    """
    return Address(
        check_thread_id(thread_id),
        check_text("checkpoint_ns", checkpoint_ns),
        check_optional_text("checkpoint_id", checkpoint_id) or None,
    )


def find_context(config: RunnableConfig) -> Any:
    """Return the `context` of the run that a config belongs to, or None if it has none.

    Only a config that langgraph gives to a node, a tool or a checkpointer has a context.
    """
    runtime: Any = sys.modules.get("langgraph.runtime")  # without it no graph runs
    for part in config.get("configurable", {}).values() if runtime else ():
        if isinstance(part, runtime.Runtime):
            return part.context
    return None


def find_context_values(config: RunnableConfig, names: Iterable[str]) -> dict[str, Any]:
    """Return the named values in the `context` of the run that a config belongs to.

    The context is a dict or an object with attributes. Names whose value is None are omitted.
    """
    context = find_context(config)
    read = context.get if isinstance(context, Mapping) else partial(getattr, context)
    return {name: value for name in names if (value := read(name, None)) is not None}


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
    text = check_text("thread_id", str(thread_id))
    if not text:
        raise InvalidConfig("thread_id is empty; pass a non-empty string")
    return text


def check_thread_ids(thread_ids: object) -> list[str]:
    """Thread ids, each as `check_thread_id` takes it."""
    return [check_thread_id(value) for value in _check_list("thread_ids", thread_ids)]


def check_texts(name: str, values: object) -> list[str]:
    """Several ids of what `name` says."""
    return [check_text(name, value) for value in _check_list(name, values, str)]


def _check_list(name: str, values: object, kind: type = object) -> list[Any]:
    if not isinstance(values, str | bytes) and isinstance(values, Iterable):
        items = list(values)
        if all(isinstance(item, kind) for item in items):
            return items
    ids = name.replace("_", " ")
    raise InvalidConfig(f"{name} is {values!r:.80}; expected a list of {ids}, like ['id-1']")


def check_optional_text(name: str, value: object) -> str | None:
    """Text, or None; see `check_text`."""
    return None if value is None else check_text(name, value)


def check_datetime(name: str, value: datetime) -> datetime:
    """A moment with a time zone.

    Raises:
        ConfigurationError: It has none.
    """
    if value.tzinfo is None:
        raise ConfigurationError(f"{name} is {value!r}; expected a datetime with a time zone")
    return value


def check_text(name: str, value: object) -> str:
    """Text that a database can hold.

    Raises:
        InvalidConfig: It is of another type, or has a lone surrogate.
    """
    if type(value) is str and value.isascii():
        return value
    if not isinstance(value, str):
        raise InvalidConfig(f"{name} is {value!r:.80}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidConfig(
            f"{name} is {value!r:.80}; expected text without lone surrogates ({exc.reason})"
        ) from exc
    return value
