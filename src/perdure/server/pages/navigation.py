"""Compute the navigation of the pages: the entries that the caller may open, and the footer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from starlette.requests import Request

from perdure.run_tables.thread_list import ThreadQuery
from perdure.server.http.access import Action, Refused
from perdure.server.http.call import Call, CurrentCall
from perdure.server.http.reply import wants_json

# Maximum number of waiting threads whose questions are counted for the navigation. Counting is
# limited because each page reads the heads of these threads.
_MAX_COUNTED_THREADS: Final = 50
_LOGGER: Final = logging.getLogger(__name__)


class NavigationEntry(NamedTuple):
    """A link in the navigation of the pages.

    Attributes:
        name: The text of the link.
        section: The last segment of the path of the section's first page, such as `threads`.
        badge: The number that is shown beside the text, such as `"4"`, or `""` for no number.
    """

    name: str
    section: str
    badge: str = ""


class _Section(NamedTuple):
    """A section of the pages, and the action that its first page requires."""

    name: str
    section: str
    action: Action
    arguments: Mapping[str, Any]


def _list_sections(call: Call) -> list[_Section]:
    """Return the sections of the pages, with the arguments that their first pages authorize."""
    metadata: dict[str, Any] = {"metadata": {}}
    return [
        _Section("Threads", "threads", "threads:search", metadata),
        _Section("Waiting", "waiting", "threads:search", metadata),
        _Section("Runs", "runs", "threads:search", metadata),
        _Section("Memories", "memories", "store:search", {"namespace": call.memories}),
        _Section("Store", "store", "store:list_namespaces", {"namespace": ()}),
        _Section("Storage", "storage", "admin", {}),
        _Section("Jobs", "jobs", "admin", {}),
    ]


@dataclass(frozen=True, slots=True)
class Navigation:
    """The navigation of a page for one caller.

    Attributes:
        entries: The sections that the caller may open, in the order in which they are shown.
    """

    entries: list[NavigationEntry]


async def load_navigation(request: Request, call: CurrentCall) -> None:
    """Store the navigation of an HTML page in `request.state.navigation`.

    This is a FastAPI dependency of all pages. A section is left out if the caller is not permitted
    to open its first page. Requests for JSON, and requests of htmx for a part of a page, have no
    navigation.
    """
    if wants_json(request) or "hx-request" in request.headers:
        return
    sections = _list_sections(call)
    permissions = await asyncio.gather(*(_is_section_permitted(call, row) for row in sections))
    counts = {"waiting": await _count_waiting_questions(call)}
    request.state.navigation = Navigation(
        [
            NavigationEntry(section.name, section.section, counts.get(section.section, ""))
            for section, is_permitted in zip(sections, permissions, strict=True)
            if is_permitted
        ]
    )


async def _is_section_permitted(call: Call, section: _Section) -> bool:
    """Return whether the caller may open the first page of a section."""
    try:
        await call.with_action(section.action).authorize_action_arguments(section.arguments)
    except Refused:
        return False
    except Exception as exc:  # A handler of an Auth file can raise any exception.
        # Hide the section, because its page would fail, too. Log only the type of the error,
        # because the error message may contain users' content.
        _LOGGER.warning(
            "the section %s is hidden, because its authorization failed (%s)",
            section.section,
            type(exc).__name__,
        )
        return False
    return True


async def _count_waiting_questions(call: Call) -> str:
    """Count the questions that wait for an answer on the threads of the caller.

    Returns:
        The number, such as `"4"`, or `"50+"` if more threads wait than are counted. The text is
            empty if no question waits or the caller may not search threads.
    """
    search_call = call.with_action("threads:search")
    try:
        permitted = await search_call.authorize_action_arguments({"metadata": {}})
    except Exception:  # see `_is_section_permitted`
        return ""
    query = ThreadQuery(metadata=permitted["metadata"])
    waiting = await search_call.threads.search_waiting(query, _MAX_COUNTED_THREADS + 1)
    question_count = sum(len(row.questions) for row in waiting[:_MAX_COUNTED_THREADS])
    if not question_count:
        return ""
    return f"{question_count}{'+' if len(waiting) > _MAX_COUNTED_THREADS else ''}"
