"""What is done with a call of a tool, and what the model that made it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import ToolException

from perdure.errors import (
    InvalidNamespace,
    InvalidValue,
    LimitExceeded,
    UnknownMemory,
    VersionConflict,
)
from perdure.memory.collection.changing import (
    Changing,
    Replacement,
    Telling,
    given_of,
)
from perdure.memory.collection.collection import Collection
from perdure.memory.collection.forgetting import unknown
from perdure.memory.collection.resting import Ground
from perdure.memory.collection.shaping import OWN, TEXT
from perdure.memory.effects import Effects
from perdure.memory.gate import texts_in
from perdure.memory.listing import Readable
from perdure.memory.quoting import quoted
from perdure.memory.records import FACT, Memory, Outcome
from perdure.memory.rendering import section
from perdure.stores.namespaces import check_key

Act = Literal["create", "update", "supersede", "delete"]
STRAY: Final = " \t\r\n\"'`<>[](){}.,;"  # what models put around a word
_CHANGES: Final[Mapping[Act, Replacement]] = {"update": "updated", "supersede": "superseded"}
_LONG: Final = 400  # characters of a reason that a model is told


class Work(Protocol):
    """What a tool does with a call."""

    def steps(
        self, arguments: Mapping[str, Any], config: RunnableConfig, ground: Ground
    ) -> Effects[str]:
        """Do what is asked for. Returns what the model is told.

        Args:
            arguments: Those of the call, checked against the tool's schema.
            config: Of the run.
            ground: What was said in it.

        Raises:
            ToolException: The model is told that it is not done, and what to do.
            ConfigurationError: The developer is: no store, or a config without whose memories.
        """


class Managing:
    """What `manage_memory` does."""

    def __init__(self, collection: Collection) -> None:
        self.collection = collection

    def steps(
        self, arguments: Mapping[str, Any], config: RunnableConfig, ground: Ground
    ) -> Effects[str]:
        """See `Work.steps`."""
        changing = self.collection.changing(config)  # what is wrong with that, no model can mend
        call = _Call(arguments["action"], _given(arguments), _id_in(arguments.get("id")))
        call.check()
        try:
            outcome = yield from self._done(changing, call, config, ground)
        except UnknownMemory as exc:
            raise ToolException(
                f"There is no memory with the id {quoted(call.key[:80])}. Search for it, and copy "
                "its id exactly."
            ) from exc
        except VersionConflict as exc:
            raise ToolException(
                "Not done: it was changed by somebody else meanwhile. Search for it again, and "
                "change what it says now."
            ) from exc
        except LimitExceeded as exc:
            raise ToolException(
                "Not kept: there is no room for more. Delete what is no longer needed, or tell the "
                "user."
            ) from exc
        except InvalidValue as exc:
            raise ToolException(
                f"Not kept: {str(exc)[:_LONG]}. Correct it, and try again."
            ) from exc
        return _told_of(outcome, call)

    def _done(
        self, changing: Changing, call: _Call, config: RunnableConfig, ground: Ground
    ) -> Effects[Outcome]:
        if call.action == "delete":
            return (yield from changing.deleting(call.key))
        there = None
        if call.key:
            there = yield from changing.adapter.got(changing.namespace, call.key)
        if call.action == "create":
            if there is not None:
                raise ToolException(
                    f"The memory {call.key} is there already, and 'create' keeps a new one. Call "
                    "this without an id, or with another action."
                )
            said = _texts(changing.shape.value(call.given))
            role, provenance = ground.of(said, config)
            telling = Telling(call.given, provenance, role, by_model=True)
            return (yield from changing.inserting(telling))
        if there is None:
            raise unknown(changing.namespace, call.key)
        said = _texts(changing.shape.value(call.given, there.value))
        role, provenance = ground.of(said, config, _by_user(there))
        telling = Telling(call.given, provenance, role, by_model=True)
        return (yield from changing.replacing(call.key, telling, _CHANGES[call.action]))


@dataclass(frozen=True, slots=True)
class _Call:
    """What a model asks for."""

    action: Act
    given: Any
    key: str

    def check(self) -> None:
        """Answer a call in which something is missing.

        Raises:
            ToolException: It is.
        """
        if self.action != "delete" and not self.given:
            raise ToolException(
                f"'{self.action}' needs what the memory is to say. Call it again with that."
            )
        if self.action != "create" and not self.key:
            raise ToolException(
                f"'{self.action}' needs the id of a memory. Search for it, and call this again "
                "with its id."
            )


class Searching:
    """What `search_memory` does."""

    def __init__(self, memories: Readable, limit: int) -> None:
        self.memories, self.limit = memories, limit

    def steps(
        self, arguments: Mapping[str, Any], config: RunnableConfig, ground: Ground
    ) -> Effects[str]:
        """See `Work.steps`."""
        query = arguments["query"].encode(errors="replace").decode().strip()
        if not query:
            raise ToolException("The query is empty. Say what to look for.")
        limit = arguments.get("limit") or self.limit
        found = yield from self.memories.searching(query, limit=limit, config=config)
        if not found:
            return "Nothing is known about that."
        return section("memories", [line_of(memory) for memory in found])


def _texts(value: Any) -> list[str]:
    return [text for _, text, _ in texts_in(value)]


def _by_user(memory: Memory) -> list[str]:
    """What a memory says, if the user has said it."""
    trusted = memory.provenance is not None and memory.provenance.trust == "user"
    return _texts(given_of(memory)) if trusted else []


def line_of(memory: Memory) -> str:
    """A memory as one line of JSON that can be referred to by its id.

    Beside the text it has the day it was said, the thread, whose words it rests on, and what it
    said before.
    """
    source = memory.provenance
    at = source.at if source is not None and source.at is not None else memory.valid_from
    about = {
        "kind": memory.kind if memory.kind != FACT else None,
        "fields": _fields(memory),
        "on": None if at is None else at.date().isoformat(),
        "thread": source.thread_id if source is not None else None,
        "trust": source.trust if source is not None else None,
        "before": [
            {"memory": former.text, "until": former.until.date().isoformat()}
            for former in memory.previous
            if former.change == "superseded"
        ],
    }
    said = {name: part for name, part in about.items() if part}
    return quoted({"id": memory.key, "memory": memory.text, **said})


def _fields(memory: Memory) -> dict[str, Any]:
    """What is kept beside the text; nothing of a document that is shown whole, or is no memory."""
    if TEXT not in memory.value:
        return {}
    return {name: part for name, part in memory.value.items() if name not in (TEXT, *OWN)}


def _told_of(outcome: Outcome, call: _Call) -> str:
    """What became of it, for the model.

    Raises:
        ToolException: It is not kept.
    """
    reason = outcome.reason[:_LONG].rstrip(".") or "no reason is given"
    but = f" Note: {reason}." if outcome.reason else ""
    match outcome.change:
        case "added":
            return f"Kept. Its id is {outcome.key}.{but}"
        case "updated":
            return f"Corrected: the memory {outcome.key} now says so.{but}"
        case "superseded":
            return (
                f"The memory {outcome.key} now says so; what was true before is kept as its past."
                f"{but}"
            )
        case "deleted":
            return f"Deleted: the memory {outcome.key} is no longer known.{but}"
        case "unchanged" if call.action != "create" and outcome.key != call.key:
            raise ToolException(
                f"Nothing is changed: the memory {outcome.key} says this already, and {call.key} "
                "says what it said before. Delete that one if it does not hold."
            )
        case "unchanged":
            return f"Nothing had to be changed ({reason}). The memory's id is {outcome.key}."
        case "quarantined":
            raise ToolException(
                f"Not kept: somebody has to review it first ({reason}). Do not try again; do not "
                "say that it is remembered."
            )
        case "refused":
            raise ToolException(
                f"Not kept: {reason}. Leave out what is objected to, or do without; do not say "
                "that it is remembered."
            )


def _given(arguments: Mapping[str, Any]) -> Any:
    memory = arguments.get("memory")
    return memory if memory is not None else (arguments.get("text") or "").strip()


def _id_in(given: str | None) -> str:
    """An id as a model gave it, without what it put around.

    Raises:
        ToolException: No store can hold it.
    """
    key = (given or "").strip(STRAY)
    try:
        return check_key(key) if key else ""
    except InvalidNamespace as exc:
        raise ToolException(
            f"{quoted(key[:80])} is no id. Search for the memory, and copy its id exactly."
        ) from exc
