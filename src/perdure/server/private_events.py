"""Restrict access to run events that contain prompts, because prompts can contain memories.

The events of the stream mode `events` contain each prompt. If the run uses a person's memories, the
prompt contains the memories that were recalled. Each of these events therefore names the person in
its `LoggedEvent.kind`. The kind is stored with the event, so the limit also holds for readers on
other servers and after a restart.
"""

from __future__ import annotations

from typing import Any

from perdure.server.access import Identity

_MODE, _PERSON = "mode", "person"


def build_event_kind_with_mode_and_person(stream_mode: str, person: str) -> dict[str, str]:
    """Build the kind of an event that may contain memories of a person.

    Args:
        stream_mode: The stream mode of the event.
        person: The person whose memories the run uses, or `""` if it uses nobody's memories.
    """
    return {_MODE: stream_mode, _PERSON: person}


def get_stream_mode(kind: Any) -> Any:
    """Return the stream mode of an event with the given kind."""
    return kind.get(_MODE) if isinstance(kind, dict) else kind


def may_read_event_of_kind(kind: Any, reader: Identity) -> bool:
    """Return whether a user may read an event with the given kind.

    An event that contains memories of a person may be read by that person, and by users who may act
    for the person.
    """
    if isinstance(kind, dict) and _PERSON in kind:
        return reader.may_see_memories_of(kind[_PERSON])
    return True
