"""What a recall reaches: the namespaces of a run, without what is said there anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError
from perdure.memory.records import Memory
from perdure.memory.store_adapter import namespace_of
from perdure.memory.templates import Template
from perdure.stores.base import Namespace

NAMESPACES: Final = (("memories", "{user_id}"),)
"""Where memories are, if nobody says."""


class ThreadHistory(NamedTuple):
    """Messages that the model reads anyway.

    Attributes:
        thread_id: Their thread, if it is known.
        message_ids: Their ids.
    """

    thread_id: str | None
    message_ids: frozenset[str]

    def covers(self, memory: Memory) -> bool:
        """Whether a memory rests on nothing but these messages."""
        source = memory.provenance
        if source is None or not source.message_ids:
            return False
        if self.thread_id is not None and source.thread_id not in (None, self.thread_id):
            return False  # another thread may have messages of the same ids
        return self.message_ids.issuperset(source.message_ids)


def templates(namespaces: Sequence[Sequence[str]]) -> list[Template]:
    """The templates of several namespaces.

    Raises:
        ConfigurationError: There is none, or one is no template.
    """
    listed = isinstance(namespaces, list | tuple) and not any(
        isinstance(each, str) for each in namespaces
    )
    if not listed or not namespaces:
        raise ConfigurationError(
            f"namespaces is {namespaces!r:.80}; expected a list of namespaces, like "
            "[('memories', '{user_id}')]"
        )
    return [Template(labels) for labels in namespaces]


def filled(templates: Iterable[Template], config: RunnableConfig | None) -> list[Namespace]:
    """The namespaces of a run, without those that are under another.

    Raises:
        InvalidConfig: The config does not fill one.
        InvalidNamespace: One is where perdure keeps its own notes.
    """
    every = dict.fromkeys(namespace_of(template, config) for template in templates)
    return [
        namespace
        for namespace in every
        if not any(namespace[:length] in every for length in range(1, len(namespace)))
    ]
