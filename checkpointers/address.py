"""Read and check the thread id, namespace, checkpoint id and other values in a LangGraph config."""

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
"""The key in `configurable` for the number of the newest removal from the thread.

The number is read when a run loads the thread. `get_tuple` stores it in the config that it returns;
see `removal_records`. langgraph does not copy keys that begin with two underscores to the metadata
of a checkpoint.
"""
WITHOUT_MEMORY_KEY: Final = "__perdure_without_memory"
"""The key in `configurable` that, with the value True, marks a run which neither recalls nor
remembers anything of a user.

The server sets the key, for example, if a user who may not act for the person of a thread sends a
message to the thread. The `user_id` in the run's `configurable` is `""` then. The metadata of the
run's checkpoints still contains the person's id.
"""
TEAMS_KEY: Final = "__perdure_teams"
"""The key in `configurable` under which the server lists the teams whose memory a run may use.

Without this key, a run may use the teams named by `team` and `teams` in its context or its
`configurable`.
"""
# The types of objects that are accepted as a LangGraph config. `dict` comes first, because
# `isinstance` is faster for `dict` than for `Mapping`.
_MAPPING: Final = (dict, Mapping)


class Address(NamedTuple):
    """Identifies a checkpoint by thread id, namespace and checkpoint id.

    If `checkpoint_id` is None, the address refers to the head of the namespace, which is the
    checkpoint from which the next run starts.
    """

    thread_id: str
    checkpoint_ns: str
    checkpoint_id: str | None

    def build_config(self, checkpoint_id: str, removal_number: int = 0) -> RunnableConfig:
        """Return a LangGraph config for a checkpoint in the thread and namespace of this address.

        Args:
            checkpoint_id: The id of the checkpoint.
            removal_number: The number of the thread's newest removal when the checkpoint was read,
                or 0 if nothing was removed. It is stored under `REMOVALS_KEY`.
        """
        configurable: dict[str, Any] = {
            "thread_id": self.thread_id,
            "checkpoint_ns": self.checkpoint_ns,
            "checkpoint_id": checkpoint_id,
        }
        if removal_number:
            configurable[REMOVALS_KEY] = removal_number
        return {"configurable": configurable}


def parse_checkpoint_address(config: RunnableConfig) -> Address:
    """Return the address in a config.

    Raises:
        InvalidConfig: The config has no `configurable`, or the address in it is not valid; see
            `build_address`.
    """
    configurable = config.get("configurable") if isinstance(config, _MAPPING) else None
    if not isinstance(configurable, _MAPPING):
        raise InvalidConfig(
            f"the config {config!r} has no 'configurable' mapping; "
            "pass {'configurable': {'thread_id': 'some-id'}}"
        )
    parts = thread_id, checkpoint_ns, checkpoint_id = (
        configurable.get("thread_id"),
        configurable.get("checkpoint_ns", ""),
        configurable.get("checkpoint_id"),
    )
    if not (
        type(thread_id) is type(checkpoint_ns) is str
        and (checkpoint_id is None or type(checkpoint_id) is str)
    ):
        return build_address(*parts)
    is_ascii = (
        thread_id
        and thread_id.isascii()
        and checkpoint_ns.isascii()
        and (checkpoint_id is None or checkpoint_id.isascii())
    )
    # `build_address` checks that the texts contain no lone surrogates. ASCII text never contains
    # one, so skip the checks to save time.
    return (
        Address(thread_id, checkpoint_ns, checkpoint_id or None)
        if is_ascii
        else build_address(*parts)
    )


def build_address(thread_id: object, checkpoint_ns: object, checkpoint_id: object) -> Address:
    """Validate a thread id, a namespace and a checkpoint id, and build an address from them.

    A `checkpoint_id` of None or `""` refers to the head.

    Raises:
        InvalidConfig: `thread_id` is missing or empty, or one of the three is of a wrong type or
            contains a lone surrogate.
    """
    return Address(
        check_thread_id(thread_id),
        check_storable_text("checkpoint_ns", checkpoint_ns),
        check_optional_text("checkpoint_id", checkpoint_id) or None,
    )


def find_langgraph_runtime(config: RunnableConfig) -> Any:
    """Return the langgraph `Runtime` in the config of a run, or None if the config has none.

    The runtime in the root graph's config has no `execution_info`. langgraph passes this config to
    the checkpointer when loading the thread. In the config of a subgraph or a node, the runtime has
    an `execution_info`.
    """
    # If `langgraph.runtime` has not been imported, no graph can be running in this process.
    module: Any = sys.modules.get("langgraph.runtime")
    for part in config.get("configurable", {}).values() if module else ():
        if isinstance(part, module.Runtime):
            return part
    return None


def find_run_context(config: RunnableConfig) -> Any:
    """Return the LangGraph runtime `context` from a run's config, or None if the config has none.

    langgraph adds the context only to configs that it passes to a node, a tool or a checkpointer.
    """
    runtime = find_langgraph_runtime(config)
    return None if runtime is None else runtime.context


def find_run_context_values(config: RunnableConfig, names: Iterable[str]) -> dict[str, Any]:
    """Look up names in the run context that `config` contains, and return the values by name.

    The run's context may be a mapping or an object with attributes. The returned dict does not
    contain names that are missing from the context or whose value is None.
    """
    context = find_run_context(config)
    get_value = context.get if isinstance(context, Mapping) else partial(getattr, context)
    return {name: value for name in names if (value := get_value(name, None)) is not None}


def check_thread_id(thread_id: object) -> str:
    """Return the thread id as text.

    A thread id that is an integer or a UUID is converted to text, as in langgraph's savers.

    Raises:
        InvalidConfig: The thread id is missing, empty or of another type.
    """
    if isinstance(thread_id, bool) or not isinstance(thread_id, str | int | UUID):
        raise InvalidConfig(
            f"thread_id is {thread_id!r}; expected a string that identifies the conversation, such "
            "as {'configurable': {'thread_id': 'some-id'}}"
        )
    text = check_storable_text("thread_id", str(thread_id))
    if not text:
        raise InvalidConfig("thread_id is empty; pass a non-empty string")
    return text


def check_thread_ids(thread_ids: object) -> list[str]:
    """Check each thread id in a list with `check_thread_id`, and return the ids as text."""
    return [check_thread_id(value) for value in _check_list_items("thread_ids", thread_ids)]


def check_storable_texts(argument_name: str, values: object) -> list[str]:
    """Check that a value is an iterable of texts that a database can store, and return a list.

    Error messages contain `argument_name`.
    """
    return [
        check_storable_text(argument_name, value)
        for value in _check_list_items(argument_name, values, str)
    ]


def _check_list_items(argument_name: str, values: object, item_type: type = object) -> list[Any]:
    """Check that a value is an iterable of items of type `item_type`; return the items as a list.

    Raises:
        InvalidConfig: The value is not such an iterable, or is a single str or bytes object.
    """
    if not isinstance(values, str | bytes) and isinstance(values, Iterable):
        items = list(values)
        if all(isinstance(item, item_type) for item in items):
            return items
    raise InvalidConfig(
        f"{argument_name} is {values!r:.80}; expected a list of "
        f"{argument_name.replace('_', ' ')}, like ['id-1']"
    )


def check_optional_text(argument_name: str, value: object) -> str | None:
    """Check a value with `check_storable_text` unless it is None, and return it."""
    return None if value is None else check_storable_text(argument_name, value)


def check_has_time_zone(argument_name: str, value: datetime) -> datetime:
    """Check that a datetime is timezone-aware, and return the datetime.

    Raises:
        ConfigurationError: The datetime has no time zone.
    """
    if value.tzinfo is None:
        raise ConfigurationError(
            f"{argument_name} is {value!r}; expected a datetime with a time zone"
        )
    return value


def check_storable_text(argument_name: str, value: object) -> str:
    """Check that a value is text that a database can store, and return it.

    Raises:
        InvalidConfig: The value has another type, or contains a lone surrogate.
    """
    if type(value) is str and value.isascii():
        return value
    if not isinstance(value, str):
        raise InvalidConfig(f"{argument_name} is {value!r:.80}; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidConfig(
            f"{argument_name} is {value!r:.80}; expected valid Unicode text ({exc.reason})"
        ) from exc
    return value
