"""Missing vectors, as effects: of puts, of failed embeddings, and of another model.

An item whose embedder failed is found by text until it gets its vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perdure.effects import Effect
from perdure.errors import ConfigurationError, EmbeddingFailed
from perdure.storage.flow import NO_LIMIT, Flow, Row, fetch_rows
from perdure.stores.base import Pending, Progress
from perdure.stores.namespaces import decode_path, prefix_range
from perdure.stores.parts import StoreParts
from perdure.stores.puts import Put
from perdure.stores.values import extract_texts
from perdure.stores.vectors import Floats, Model, encode_groups

BATCH = 256  # items embedded at a time
_BY_THE_WAY = 3  # failed attempts after which an item is no longer tried together with a put


class MissingEmbeddings:
    """Makes the vectors of a store."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._sql, self._runner = parts.sql, parts.runner
        self._embeddings = parts.preparer.embeddings
        self._some = False  # something was put here whose vectors could not be made

    # -- of puts

    async def make(self, puts: Sequence[Put]) -> Model | None:
        """Give puts their vectors, or mark them as missing. Returns the vectors' model."""
        model = self._embeddings.model
        if model is not None and self._embeddings.quick is not None:
            return model if any(put.text is not None and put.searched for put in puts) else None
        if model is None or not any(put.pieces for put in puts):
            return None
        try:
            bodies, model = await self._embedded([put.pieces for put in puts])
        except EmbeddingFailed as exc:
            for put in puts:
                put.missing = str(exc) if put.pieces else None
            self._some = True
            return None
        for put, body in zip(puts, bodies, strict=True):
            put.vectors = body
        return model

    async def make_some(self, puts: int) -> None:
        """After so many puts got theirs, try some that wait; not those that failed often."""
        if not self._some:
            return
        limit = puts + 16
        rows = await self._runner.read(lambda: self._pending(b"", 0, limit, _BY_THE_WAY))
        self._some = len(rows) == limit
        try:
            await self._give_each(rows)
        except EmbeddingFailed:
            self._some = True

    # -- that are missing

    def pending(self, prefix: bytes) -> Flow[list[Pending]]:
        """Items under a prefix whose vectors could not be made yet."""
        rows = yield from self._pending(prefix, 0, NO_LIMIT)
        root, records = len(self._parts.root), self._parts.records
        return [
            Pending(
                decode_path(row[1][root:]),
                row[2],
                row[11],
                records.text(row[12], ("pending", row[0])),
            )
            for row in rows
        ]

    def _pending(
        self, prefix: bytes, since: int, limit: int, attempts: int = NO_LIMIT
    ) -> Flow[list[Row]]:
        sql = self._sql["pending"]
        return (yield from fetch_rows(sql, since, *prefix_range(prefix), attempts, limit))

    def count(self) -> Flow[int]:
        """The number of items without vectors of the file's model."""
        rows = yield self._sql("get_setting", "model")
        model = Model.from_setting(rows[0][0]) if rows else None
        # the first model replaced none, and one that is quick needs none stored
        if model is None or model.number < 2 or self._embeddings.derives(model):
            counted = yield self._sql("pending_count")
        else:
            counted = yield self._sql("missing_count", model.number)
        return int(counted[0][0])

    async def embed_all(self, prefix: bytes) -> int:
        """Make those under a prefix. Returns how many items got theirs."""
        total = since = 0
        while rows := (await self._runner.read(partial(self._pending, prefix, since, BATCH))):
            since = rows[-1][0]
            total += await self._give_each(rows)
        return total

    async def _give_each(self, rows: list[Row]) -> int:
        """Give vectors to as many as get them: a group that fails is halved, down to one item."""
        groups, done = [rows] if rows else [], 0
        failed: EmbeddingFailed | None = None
        while groups:
            group = groups.pop()
            try:
                bodies, model = await self._embedded([self._pieces_of(row) for row in group])
                given = [(row[0], body) for row, body in zip(group, bodies, strict=True)]
                await self._runner.write(partial(self._parts.writer.give_vectors, given, model))
                done += len(group)
            except EmbeddingFailed as exc:
                if len(group) > 1:
                    groups += [group[len(group) // 2 :], group[: len(group) // 2]]
                    continue
                await self._runner.write(
                    partial(self._parts.writer.still_missing, group[0][0], str(exc))
                )
                if failed is not None and not done:  # the second in a row: it is not the texts
                    raise
                failed = exc
        if failed is not None and not done:
            raise failed
        return done

    async def _embedded(self, groups: Sequence[Sequence[str]]) -> tuple[list[bytes | None], Model]:
        """The vectors of each group of pieces as they are stored, and what they come from."""
        model = self._model()
        every = [piece for group in groups for piece in group]
        if not every:
            return [None] * len(groups), model
        vectors = await self._vectors(every)
        model = model.with_dims(vectors.shape[1])
        return await self._runner.called(partial(encode_groups, vectors, groups, model)), model

    def _vectors(self, pieces: Sequence[str]) -> Effect[Floats]:
        embedder = self._embeddings.embedder
        assert embedder is not None
        if self._embeddings.in_process:  # slow: no read waits for it
            embed = partial(embedder.embed, pieces)
            return Effect(embed, lambda: self._parts.database.run_in_thread(embed))
        return Effect(lambda: embedder.embed(pieces), lambda: embedder.aembed(pieces))

    def _pieces_of(self, row: Row) -> list[str]:
        fields = self._parts.preparer.fields_of(row[10])
        return self._embeddings.pieces(extract_texts(self._parts.records.value(row), fields))

    # -- of another model

    async def reembed(self, progress: Progress | None) -> int:
        """Make all vectors anew. Returns how many items got new ones."""
        model = self._model()
        if self._embeddings.quick is not None:
            number = await self._runner.write(
                partial(self._parts.writer.enrol, model, replace=True)
            )
            return await self._drop(number, progress)
        probe = await self._vectors(["perdure"])
        model = model.with_dims(probe.shape[1])
        number = await self._runner.write(partial(self._parts.writer.enrol, model, replace=True))
        done = since = 0
        of = (await self._runner.read(lambda: fetch_rows(self._sql["to_embed_count"], number)))[0][
            0
        ]
        while rows := (
            await self._runner.read(
                partial(fetch_rows, self._sql["to_embed"], since, number, BATCH)
            )
        ):
            since = rows[-1][0]
            done += await self._give_each(rows)
            if progress is not None:
                progress(done, of)
        return done

    async def _drop(self, number: int, progress: Progress | None) -> int:
        """Drop the vectors of models before one whose vectors the search makes."""
        done = 0
        while rows := (
            await self._runner.write(partial(fetch_rows, self._sql["drop_vectors"], number, BATCH))
        ):
            done += len(rows)
            if progress is not None:
                progress(done, done)
        done += len(await self._runner.write(partial(fetch_rows, self._sql["drop_all_pending"])))
        await self._runner.write(partial(fetch_rows, self._sql["bump_setting"], "embedded"))
        return done

    def _model(self) -> Model:
        if self._embeddings.model is None:
            raise ConfigurationError("the store has no embedder; open it with index=")
        return self._embeddings.model
