"""Vectors that are lacking: an item whose embedder failed is found by text until it gets them."""

from __future__ import annotations

import asyncio

from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import Flow, Row, Statement
from perdure.stores.base import Namespace, Pending
from perdure.stores.core import Core
from perdure.stores.namespaces import labels, span
from perdure.stores.steps import EmbedAll, Read, Steps, Write
from perdure.stores.values import texts
from perdure.stores.vectors import stored

BATCH = 256  # items embedded at a time


class Lacking(Core):
    """The part of a store that makes the vectors that are lacking."""

    def pending_embeddings(self, namespace_prefix: Namespace = ()) -> list[Pending]:
        """Items whose vectors could not be made yet; text search finds them."""
        wanted = self._wanted(namespace_prefix)
        rows = self.database.read(self._pending(wanted.prefix, 1 << 62))
        return [
            Pending(
                labels(row[1][len(self._root) :]),
                row[2],
                row[11],
                self._records.text(row[12], ("pending", row[0])),
            )
            for row in rows
        ]

    async def apending_embeddings(self, namespace_prefix: Namespace = ()) -> list[Pending]:
        """See `pending_embeddings`."""
        return await asyncio.to_thread(self.pending_embeddings, namespace_prefix)

    def _pending(self, prefix: bytes, limit: int) -> Flow[list[Row]]:
        return (yield Statement(self._sql["pending"], (0, *span(prefix), limit)))

    def embed_pending(self, namespace_prefix: Namespace = ()) -> int:
        """Make the vectors that are lacking; returns how many items got theirs.

        Raises:
            EmbeddingFailed: The embedder still fails.
        """
        return self._driver.run(self._embed_all(self._wanted(namespace_prefix).prefix))

    async def aembed_pending(self, namespace_prefix: Namespace = ()) -> int:
        """See `embed_pending`."""
        return await self._driver.arun(self._embed_all(self._wanted(namespace_prefix).prefix))

    def _embed_all(self, prefix: bytes) -> Steps[int]:
        total = 0
        while rows := (yield Read(self._pending(prefix, BATCH))):
            total += yield from self._give_vectors(rows)
        return total

    def _embed_pending(self, prefix: bytes, limit: int) -> Steps[int]:
        """Some of those that wait, on the way; a failure leaves them waiting."""
        rows = yield Read(self._pending(prefix, limit))
        try:
            done = (yield from self._give_vectors(rows)) if rows else 0
        except EmbeddingFailed:
            done = 0
        self._lacking = len(rows) == limit or done < len(rows)
        return done

    def _give_vectors(self, rows: list[Row]) -> Steps[int]:
        model = self._preparer.model
        if model is None:
            raise ConfigurationError("the store has no embedder; open it with index=")
        pieces = [self._pieces_of(row) for row in rows]
        vectors = yield EmbedAll([piece for group in pieces for piece in group])
        model = model.of(vectors.shape[1])
        given, begin = [], 0
        for row, group in zip(rows, pieces, strict=True):
            part = vectors[begin : begin + len(group)]
            begin += len(group)
            given.append((row[0], stored(part, model.kind)))
        yield Write(self._writer.give_vectors(given, model))
        return len(rows)

    def _pieces_of(self, row: Row) -> list[str]:
        fields = self._preparer.fields_of(row[10])
        return self._preparer.pieces(texts(self._records.value(row), fields))
