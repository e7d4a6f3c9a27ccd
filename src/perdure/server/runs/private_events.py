"""Restrict access to run events that contain prompts, because prompts can contain memories.

In the stream mode `events`, run events contain the full prompts. If the run uses a person's
memories, the prompt contains the memories that were recalled. If an event contains a prompt, the
event's attribute `LoggedEvent.kind` is a dict with the keys `mode` and `person`. The key `mode`
contains the stream mode, and the key `person` contains the user whose memories the run uses. The
server sends the event only to readers who are allowed to see this user's memories. An event's
attribute `kind` determines who may read the event. The attribute is stored in the database, so that
other servers and restarted servers make the same access check.
"""

from __future__ import annotations

from typing import Any

from perdure.server.http.access import Identity

_MODE, _PERSON = "mode", "person"


def build_event_kind_dict_of_mode_and_person(stream_mode: str, person: str) -> dict[str, str]:
    """Build the `LoggedEvent.kind` dict for an event whose content may include a user's memories.

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

    An event that contains a person's memories may be read only by that person and by users who may
    act on that person's behalf.
    """
    if isinstance(kind, dict) and _PERSON in kind:
        return reader.may_see_memories_of(kind[_PERSON])
    return True
