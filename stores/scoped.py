"""A store that ends at a prefix: nothing outside it can be seen or named through it."""

from __future__ import annotations

from dataclasses import replace

from perdure.errors import ConfigurationError, InvalidNamespace
from perdure.stores.base import Namespace
from perdure.stores.core import Parts
from perdure.stores.doors import Doors
from perdure.stores.namespaces import check_prefix
from perdure.stores.writing import Limit


class ScopedStore(Doors):
    """What is under a prefix of a store, as a store of its own; `()` is the prefix itself.

    Args:
        parts: What the store that it is part of is made of.
        prefix: The path at which this one ends.
        limits: What may be held under it.

    Raises:
        InvalidNamespace: The prefix is empty.
    """

    def __init__(self, parts: Parts, prefix: bytes, limits: tuple[Limit, ...]) -> None:
        if not prefix:
            raise InvalidNamespace("the prefix is empty; give at least one label")
        records = replace(parts.reader.records, root=len(prefix))
        reader = replace(parts.reader, records=records)
        writer = replace(parts.writer, records=records)  # its messages leave the prefix out
        self._bind(
            replace(
                parts,
                reader=reader,
                writer=writer,
                driver=replace(parts.driver, writer=writer),
                searcher=replace(parts.searcher, reader=reader),
                preparer=replace(
                    parts.preparer, root=prefix, limits=(*parts.preparer.limits, *limits), _paths={}
                ),
                root=prefix,
            )
        )

    def scoped(
        self, prefix: Namespace, *, max_items: int | None = None, max_bytes: int | None = None
    ) -> ScopedStore:
        """A store within this one; the limits of both hold."""
        path = self._root + check_prefix(prefix)
        return ScopedStore(self._parts, path, limits_of(path, max_items, max_bytes))


def limits_of(prefix: bytes, max_items: int | None, max_bytes: int | None) -> tuple[Limit, ...]:
    """What may be held under a prefix; nothing if there is no limit.

    Raises:
        ConfigurationError: A limit is no whole number, or negative.
    """
    for name, limit in (("max_items", max_items), ("max_bytes", max_bytes)):
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise ConfigurationError(f"{name} is {limit!r}; expected a whole number, or None")
    if max_items is None and max_bytes is None:
        return ()
    return (Limit(prefix, max_items, max_bytes),)
