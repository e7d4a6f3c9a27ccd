"""Vectors that are lacking: an item whose embedder failed is found by text until it gets them."""

from __future__ import annotations

import asyncio
from functools import partial

from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import Flow, Row, Statement, rows_of
from perdure.stores.base import Namespace, Pending
from perdure.stores.core import Core
from perdure.stores.embeddings import divided
from perdure.stores.models import Model
from perdure.stores.namespaces import labels, span
from perdure.stores.steps import EmbedAll, Read, Steps, Write
from perdure.stores.values import texts

BATCH = 256  # items embedded at a time
_ON_THE_WAY = 3  # failed attempts after which an item is no longer tried by the way
_ANY = 1 << 62


class Lacking(Core):
    """The part of a store that makes the vectors that are lacking."""

    def pending_embeddings(self, namespace_prefix: Namespace = ()) -> list[Pending]:
        """Items whose vectors could not be made yet; text search finds them."""
        wanted = self._wanted(namespace_prefix)
        rows = self.database.read(self._pending(wanted.prefix, 0, _ANY))
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

    def _pending(
        self, prefix: bytes, since: int, limit: int, attempts: int = _ANY
    ) -> Flow[list[Row]]:
        sql = self._sql["pending"]
        return (yield from rows_of(sql, since, *span(prefix), attempts, limit))

    def _lacking_vectors(self) -> Flow[int]:
        """How many items should have vectors of the file's model, and do not."""
        rows = yield Statement(self._sql["get_setting"], ("model",))
        number = Model.parsed(rows[0][0]).number if rows else 0
        # the first model replaced none, so that the index need not be read
        lacking = "pending_count" if number < 2 else "lacking_count"
        count: int = (yield Statement(self._sql[lacking], (number,) * (number > 1)))[0][0]
        return count

    def embed_pending(self, namespace_prefix: Namespace = ()) -> int:
        """Make the vectors that are lacking; returns how many items got theirs.

        An item whose text the embedder refuses goes on waiting; the others get theirs.

        Raises:
            EmbeddingFailed: The embedder fails for all.
        """
        return self._driver.run(self._embed_all(self._wanted(namespace_prefix).prefix))

    async def aembed_pending(self, namespace_prefix: Namespace = ()) -> int:
        """See `embed_pending`."""
        return await self._driver.arun(self._embed_all(self._wanted(namespace_prefix).prefix))

    def _embed_all(self, prefix: bytes) -> Steps[int]:
        total = since = 0
        while rows := (yield Read(self._pending(prefix, since, BATCH))):
            since = rows[-1][0]
            total += yield from self._give_each(rows)
        return total

    def _embed_some(self, limit: int) -> Steps[None]:
        """Some of those that wait, on the way; those that failed often are passed over."""
        rows = yield Read(self._pending(b"", 0, limit, _ON_THE_WAY))
        try:
            if rows:
                yield from self._give_each(rows)
        except EmbeddingFailed:
            self._lacking = True
        else:
            self._lacking = len(rows) == limit

    def _give_each(self, rows: list[Row]) -> Steps[int]:
        """Give vectors to as many as get them: a group that fails is halved, down to who fails."""
        groups, done = [rows], 0
        failed: EmbeddingFailed | None = None
        while groups:
            group = groups.pop()
            try:
                done += yield from self._give_vectors(group)
            except EmbeddingFailed as exc:
                if len(group) > 1:
                    groups += [group[len(group) // 2 :], group[: len(group) // 2]]
                    continue
                yield Write(partial(self._writer.still_lacking, group[0][0], str(exc)))
                if failed is not None and not done:  # the second in a row: it is not the texts
                    raise
                failed = exc
        if failed is not None and not done:
            raise failed
        return done

    def _give_vectors(self, rows: list[Row]) -> Steps[int]:
        model = self._preparer.embeddings.model
        if model is None:
            raise ConfigurationError("the store has no embedder; open it with index=")
        groups = [self._pieces_of(row) for row in rows]
        bodies: list[bytes | None] = [None] * len(rows)
        every = [piece for group in groups for piece in group]
        if every:
            vectors = yield EmbedAll(every)
            model = model.of(vectors.shape[1])
            bodies = divided(vectors, groups, model)
        given = [(row[0], body) for row, body in zip(rows, bodies, strict=True)]
        yield Write(partial(self._writer.give_vectors, given, model))
        return len(rows)

    def _pieces_of(self, row: Row) -> list[str]:
        fields = self._preparer.fields_of(row[10])
        return self._preparer.embeddings.pieces(texts(self._records.value(row), fields))
