"""Compute vectors for items that have none.

Vectors are computed for the items of a put that is about to be stored, for items whose embedding
failed when they were put, and for items whose vectors are from an earlier embedding model. Until
its vectors have been computed, a stored item can be found only by keyword search.

If the model is fast enough (`StoreEmbedder.embed_quickly`), searches compute the vectors, and no
vectors are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perdure.effects import Effect
from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import NO_LIMIT, Flow, Row, fetch_rows
from perdure.stores.base import PendingEmbedding, Progress
from perdure.stores.namespaces import decode_namespace_path, prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.puts import Put
from perdure.stores.values import extract_texts
from perdure.stores.vectors import Floats, Model, encode_vectors_by_item

# number of items embedded per batch
BATCH_SIZE = 256
# threshold: if embedding an item has failed more often than this, puts no longer retry the item
_MAX_RETRIED_ATTEMPTS = 3


class MissingEmbeddings:
    """Computes the vectors of a store's items."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._sql, self._runner = parts.sql, parts.runner
        self._embeddings = parts.preparer.embeddings
        # Whether the next put retries items whose embedding failed. Set to True when an embedding
        # fails in this process, and to False when no more items are left to retry.
        self._may_retry = False

    # -- vectors of puts

    async def embed_puts_and_get_model(self, puts: Sequence[Put]) -> Model | None:
        """Compute the vectors of new items.

        If the embedder fails, the error message is recorded in each put that has text to embed, and
        no vectors are stored. If searches compute the vectors, nothing is computed here.

        Returns:
            The model to record in the database, or None if there are no vectors.
        """
        model = self._embeddings.model
        if model is not None and self._embeddings.embed_quickly is not None:
            return model if any(put.text is not None and put.is_searched for put in puts) else None
        if model is None or not any(put.chunks for put in puts):
            return None
        try:
            encoded, model = await self._embed_chunk_groups([put.chunks for put in puts])
        except EmbeddingFailed as exc:
            for put in puts:
                put.embedding_error = str(exc) if put.chunks else None
            self._may_retry = True
            return None
        for put, vectors in zip(puts, encoded, strict=True):
            put.vectors = vectors
        return model

    async def embed_pending_items_after_put(self, put_count: int) -> None:
        """After a put of `put_count` items, retry items whose embedding failed.

        At most `put_count + 16` items are embedded. Items are retried only if an embedding has
        failed in this process and some failed items may remain. Items whose embedding has failed
        more than `_MAX_RETRIED_ATTEMPTS` times are skipped. A new failure raises no error.
        """
        if not self._may_retry:
            return
        limit = put_count + 16
        rows = await self._runner.run_read_flow(
            lambda: self._read_rows_without_vectors(b"", 0, limit, _MAX_RETRIED_ATTEMPTS)
        )
        self._may_retry = len(rows) == limit
        try:
            await self._embed_and_count_rows(rows)
        except EmbeddingFailed:
            self._may_retry = True

    # -- missing vectors

    def read_pending(self, prefix: bytes) -> Flow[list[PendingEmbedding]]:
        """Return all items under a prefix whose embedding failed and has not succeeded since."""
        rows = yield from self._read_rows_without_vectors(prefix, 0, NO_LIMIT)
        root, records = len(self._parts.root), self._parts.records
        return [
            PendingEmbedding(
                decode_namespace_path(row[1][root:]),
                row[2],
                row[11],
                records.decode_text(row[12], ("pending", row[0])),
            )
            for row in rows
        ]

    def _read_rows_without_vectors(
        self, prefix: bytes, after_id: int, limit: int, max_attempts: int = NO_LIMIT
    ) -> Flow[list[Row]]:
        """Return the rows of items that have no vectors because the embedder failed.

        The rows are ordered by version id. Only rows with an id above `after_id` are returned.
        Items with more than `max_attempts` failed attempts are skipped.
        """
        sql = self._sql["pending"]
        return (yield from fetch_rows(sql, after_id, *prefix_range(prefix), max_attempts, limit))

    def count_missing(self) -> Flow[int]:
        """Count the items without vectors from the embedding model recorded in the database."""
        rows = yield self._sql("get_setting", "model")
        model = Model.from_setting(rows[0][0]) if rows else None
        # The database can contain outdated vectors only if the store saves vectors and previously
        # used a different model. Otherwise, the only items without vectors are those whose
        # embedding is still pending.
        if (
            model is None
            or model.number < 2
            or self._embeddings.should_compute_vectors_in_searches(model)
        ):
            rows_of_count = yield self._sql("count_pending")
        else:
            rows_of_count = yield self._sql("count_missing_vectors", model.number)
        return int(rows_of_count[0][0])

    async def embed_missing(self, prefix: bytes) -> int:
        """Embed the items under a prefix whose embedding failed, and return how many succeeded."""
        total = since = 0
        while rows := (
            await self._runner.run_read_flow(
                partial(self._read_rows_without_vectors, prefix, since, BATCH_SIZE)
            )
        ):
            since = rows[-1][0]
            total += await self._embed_and_count_rows(rows)
        return total

    async def _embed_and_count_rows(self, rows: list[Row]) -> int:
        """Embed rows, store their vectors, and return how many rows were embedded.

        If embedding a group of rows fails, the group is repeatedly split in half, down to single
        rows. If a single row fails, the error is recorded in the database for that row.

        Raises:
            EmbeddingFailed: No row could be embedded, so the embedder itself is probably at fault.
        """
        pending_groups, embedded_count = [rows] if rows else [], 0
        last_error: EmbeddingFailed | None = None
        while pending_groups:
            group = pending_groups.pop()
            try:
                encoded, model = await self._embed_chunk_groups(
                    [self._split_row_text_into_chunks(row) for row in group]
                )
                vectors_of_rows = [
                    (row[0], vectors) for row, vectors in zip(group, encoded, strict=True)
                ]
                await self._runner.run_write_flow(
                    partial(self._parts.writer.store_vectors, vectors_of_rows, model)
                )
                embedded_count += len(group)
            except EmbeddingFailed as exc:
                if len(group) > 1:
                    pending_groups += [group[len(group) // 2 :], group[: len(group) // 2]]
                    continue
                await self._runner.run_write_flow(
                    partial(self._parts.writer.record_failure, group[0][0], str(exc))
                )
                # Do not try the remaining rows if two rows have failed and none has succeeded.
                if last_error is not None and not embedded_count:
                    raise
                last_error = exc
        if last_error is not None and not embedded_count:
            raise last_error
        return embedded_count

    async def _embed_chunk_groups(
        self, groups: Sequence[Sequence[str]]
    ) -> tuple[list[bytes | None], Model]:
        """Embed each group of chunks, and return the encoded vectors and their model."""
        model = self._require_model()
        all_chunks = [piece for group in groups for piece in group]
        if not all_chunks:
            return [None] * len(groups), model
        vectors = await self._embed_texts(all_chunks)
        model = model.with_dims(vectors.shape[1])
        return await self._runner.call_in_thread(
            partial(encode_vectors_by_item, vectors, groups, model)
        ), model

    def _embed_texts(self, chunks: Sequence[str]) -> Effect[Floats]:
        """Return the effect of embedding texts."""
        embedder = self._embeddings.embedder
        assert embedder is not None
        # The embedder is slow. It is called outside the batches of `call_in_thread`, so that it
        # does not delay the results of other calls.
        if self._embeddings.in_process:
            embed = partial(embedder.embed, chunks)
            return Effect(embed, lambda: self._parts.database.run_in_thread(embed))
        return Effect(lambda: embedder.embed(chunks), lambda: embedder.aembed(chunks))

    def _split_row_text_into_chunks(self, row: Row) -> list[str]:
        """Return the chunks of the text in a row."""
        fields = self._parts.preparer.parse_fields(row[10])
        return self._embeddings.split_texts(
            extract_texts(self._parts.records.decode_row_value(row), fields)
        )

    # -- vectors of another model

    async def reembed(self, progress: Progress | None) -> int:
        """Embed all items without vectors from the current model, and return how many succeeded.

        If searches compute the vectors, only drop the stored vectors of earlier models, and return
        the number of affected items.
        """
        model = self._require_model()
        if self._embeddings.embed_quickly is not None:
            number = await self._runner.run_write_flow(
                partial(self._parts.writer.register_model, model, replace=True)
            )
            return await self._drop_and_count_vectors_of_earlier_models(number, progress)
        sample = await self._embed_texts(["perdure"])
        model = model.with_dims(sample.shape[1])
        number = await self._runner.run_write_flow(
            partial(self._parts.writer.register_model, model, replace=True)
        )
        embedded_count = since = 0
        total = (
            await self._runner.run_read_flow(
                lambda: fetch_rows(self._sql["count_items_to_embed"], number)
            )
        )[0][0]
        while rows := (
            await self._runner.run_read_flow(
                partial(fetch_rows, self._sql["items_to_embed"], since, number, BATCH_SIZE)
            )
        ):
            since = rows[-1][0]
            embedded_count += await self._embed_and_count_rows(rows)
            if progress is not None:
                progress(embedded_count, total)
        return embedded_count

    async def _drop_and_count_vectors_of_earlier_models(
        self, model_number: int, progress: Progress | None
    ) -> int:
        """Drop stored vectors of earlier models, and the records of failed embeddings.

        New vectors are not stored, because searches compute vectors with the current model on
        demand.

        Returns:
            The number of dropped rows.
        """
        dropped_count = 0
        while rows := (
            await self._runner.run_write_flow(
                partial(fetch_rows, self._sql["drop_vectors"], model_number, BATCH_SIZE)
            )
        ):
            dropped_count += len(rows)
            if progress is not None:
                progress(dropped_count, dropped_count)
        dropped_count += len(
            await self._runner.run_write_flow(partial(fetch_rows, self._sql["drop_all_pending"]))
        )
        await self._runner.run_write_flow(
            partial(fetch_rows, self._sql["increment_setting"], "embedded")
        )
        return dropped_count

    def _require_model(self) -> Model:
        """Return the embedding model of the store.

        If the store has no embedder, raise `ConfigurationError`.
        """
        if self._embeddings.model is None:
            raise ConfigurationError("the store has no embedder; open the store with index=")
        return self._embeddings.model
