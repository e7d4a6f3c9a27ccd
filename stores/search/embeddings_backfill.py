"""Compute vectors for items that have none.

Vectors are computed for three kinds of items: new items before they are stored, items whose
embedding failed earlier, and items whose vectors come from an earlier embedding model. Until its
vectors have been computed, a stored item can be found only by keyword search.

If the model is fast enough (`StoreEmbedder.embed_quickly`), searches compute the vectors, and no
vectors are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from perdure.effects import Effect
from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import NO_LIMIT, Flow, Row, fetch_rows
from perdure.stores.base import PendingEmbedding, Progress
from perdure.stores.item_writer import Put
from perdure.stores.namespaces import decode_namespace_path, prefix_range
from perdure.stores.search.vectors import Floats, Model, encode_vectors_by_item
from perdure.stores.store_parts import StoreParts
from perdure.stores.values import extract_texts

# number of items embedded per batch
BATCH_SIZE = 256
# Put operations retry the embedding of an item if at most this number of attempts have failed.
# After more failed attempts, put operations no longer retry the item.
_MAX_RETRIED_ATTEMPTS = 3


class MissingEmbeddings:
    """Computes the vectors of a store's items."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._sql, self._runner = parts.sql, parts.runner
        self._embeddings = parts.preparer.embeddings
        # Whether the next put retries items whose embedding failed. The flag is set when an
        # embedding fails in this process, and cleared when no more items are left to retry.
        self.may_retry = False

    # -- vectors of puts

    async def embed_puts_and_get_model(self, puts: Sequence[Put]) -> Model | None:
        """Compute the vectors of new items.

        If the embedder fails, the error message is recorded in each put that has text to embed, and
        no vectors are stored. If the store computes vectors at search time,
        `embed_puts_and_get_model` computes no vectors.

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
            self.may_retry = True
            return None
        for put, vectors in zip(puts, encoded, strict=True):
            put.vectors = vectors
        return model

    async def embed_pending_items_after_put(self, put_count: int) -> None:
        """After storing `put_count` items, try again to embed items whose embedding failed.

        In one call of `embed_pending_items_after_put`, at most `put_count + 16` items are embedded.
        Callers call the method only if `may_retry` is true. A process starts to retry failed
        embeddings only after one of its own embeddings has failed. From then on, the process also
        retries embeddings that failed in earlier processes. One call looks for at most `put_count +
        16` failed items. If a call finds fewer failed items than this maximum, no others are left,
        and the retries stop after this call. As an exception, the retries continue if the embedder
        failed for all items of the call. After the retries have stopped, the next failed embedding
        starts them again. Items whose embedding has failed more than `_MAX_RETRIED_ATTEMPTS` times
        are not retried. A new failure raises no error.
        """
        limit = put_count + 16
        rows = await self._runner.run_read_flow(
            lambda: self._read_rows_without_vectors(b"", 0, limit, _MAX_RETRIED_ATTEMPTS)
        )
        self.may_retry = len(rows) == limit
        try:
            await self._embed_and_count_rows(rows)
        except EmbeddingFailed:
            self.may_retry = True

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
        Items whose embedding has failed more than `max_attempts` times are not returned.
        """
        sql = self._sql["pending"]
        return (yield from fetch_rows(sql, after_id, *prefix_range(prefix), max_attempts, limit))

    def count_missing(self) -> Flow[int]:
        """Count the items that have no vectors from the database's embedding model.

        The name of the embedding model is stored in the database's settings.
        """
        rows = yield self._sql("get_setting", "model")
        model = Model.from_setting(rows[0][0]) if rows else None
        # Items can lack vectors because the embedder failed, or because their vectors come from an
        # earlier model. If the database has used only one embedding model so far, or if searches
        # compute the vectors, items lack vectors only because the embedder failed. Count the items
        # whose embedding failed.
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
        """Retry all failed embeddings under a prefix, and return the number of items embedded."""
        return await self._embed_and_count_pages(
            lambda after_id: self._read_rows_without_vectors(prefix, after_id, BATCH_SIZE)
        )

    async def _embed_and_count_pages(
        self,
        read_page: Callable[[int], Flow[list[Row]]],
        report_count: Callable[[int], None] | None = None,
    ) -> int:
        """Embed all rows of a paginated query, and return the number of rows that were embedded.

        Args:
            read_page: Returns a flow that reads the next rows after a version id, in ascending
                order of their ids. The last page is empty.
            report_count: Called after each page with the number of rows embedded so far, or None.
        """
        embedded_count = after_id = 0
        while rows := await self._runner.run_read_flow(partial(read_page, after_id)):
            after_id = rows[-1][0]
            embedded_count += await self._embed_and_count_rows(rows)
            if report_count is not None:
                report_count(embedded_count)
        return embedded_count

    async def _embed_and_count_rows(self, rows: list[Row]) -> int:
        """Embed rows, store their vectors, and return how many rows were embedded.

        If embedding a group of rows fails, the group is repeatedly split in half, down to single
        rows. If embedding a single row fails, the error is recorded in the database for that row.

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
                # Stop after two failed rows if no row has been embedded, because the embedder
                # probably fails for every row.
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
        return await self._runner.build_read_effect(
            partial(encode_vectors_by_item, vectors, groups, model)
        ), model

    def _embed_texts(self, chunks: Sequence[str]) -> Effect[Floats]:
        """Return the effect of embedding texts."""
        embedder = self._embeddings.embedder
        assert embedder is not None
        # The embedder is slow, so it is not called in the batches of `build_read_effect`, where it
        # would delay the results of other calls.
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
        """Embed all items that have no vectors from the current model, and return their number.

        If the model is fast enough to compute vectors during each search, the store keeps no
        vectors, so this method embeds no items. Instead, the stored vectors of earlier models and
        the records of failed embeddings are deleted, and the number of affected rows is returned.
        """
        model = self._require_model()
        is_quick = self._embeddings.embed_quickly is not None
        if not is_quick:
            sample = await self._embed_texts(["perdure"])
            model = model.with_dims(sample.shape[1])
        number = await self._runner.run_write_flow(
            partial(self._parts.writer.register_model, model, replace=True)
        )
        if is_quick:
            return await self._drop_and_count_vectors_of_earlier_models(number, progress)
        ((total,),) = await self._runner.run_read_flow(
            lambda: fetch_rows(self._sql["count_items_to_embed"], number)
        )
        return await self._embed_and_count_pages(
            lambda after_id: fetch_rows(self._sql["items_to_embed"], after_id, number, BATCH_SIZE),
            None if progress is None else lambda count: progress(count, total),
        )

    async def _drop_and_count_vectors_of_earlier_models(
        self, model_number: int, progress: Progress | None
    ) -> int:
        """Delete stored vectors of earlier models, and the records of failed embeddings.

        Vectors of the current model are not stored, because searches compute them on demand.

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
