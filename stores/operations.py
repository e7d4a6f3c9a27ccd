"""The operations of a store as steps, which its doors run in either colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from langgraph.store.base import GetOp, ListNamespacesOp, Op, PutOp, Result, SearchOp

from perdure.errors import ConfigurationError
from perdure.storage.flow import Flow, Row
from perdure.stores.base import TTL, FoundItem, Provenance, PutItem, StoredItem
from perdure.stores.namespaces import check_condition, check_key
from perdure.stores.pending import Lacking
from perdure.stores.preparing import Index
from perdure.stores.reading import Wanted
from perdure.stores.records import micros
from perdure.stores.searching import Query
from perdure.stores.steps import Read, Steps, Write, WritePuts
from perdure.stores.writing import Put

_FEW: Final = 32  # rows that are read, and decoded, in no time


class Operations(Lacking):
    """The part of a store that reads and writes items."""

    # -- many operations

    def _batch(self, ops: Iterable[Op | PutItem]) -> Steps[list[Result]]:
        """Answers in order; what is read is read before anything is written, as in langgraph's."""
        ops = list(ops)
        puts: dict[tuple[bytes, str], PutOp | PutItem] = {}
        preparer = self._preparer
        reads: list[tuple[int, Steps[Any]]] = []
        for number, op in enumerate(ops):
            if isinstance(op, PutOp | PutItem):
                # the last counts
                puts[preparer.place(op.namespace, op.key)] = op
            else:
                reads.append((number, self._read_op(op)))
        prepared = [self._put_op(place, op) for place, op in puts.items()]
        results: list[Result] = [None] * len(ops)
        for number, steps in reads:
            results[number] = yield from steps
        if prepared:
            yield from self._write(prepared)
        return results

    def _put_op(self, place: tuple[bytes, str], op: PutOp | PutItem) -> Put:
        extra = (op.if_version, op.provenance) if isinstance(op, PutItem) else ()
        return self._preparer.put(place, op.value, op.index, self._minutes(op.ttl), *extra)

    def _read_op(self, op: Op) -> Steps[Any]:
        match op:
            case GetOp():
                return self._get(op.namespace, op.key, refresh=self._op_refreshes(op))
            case SearchOp():
                wanted = self._wanted(op.namespace_prefix, op.filter)
                query = self._query(op.query, "hybrid", True, False)
                page = self._page(op.limit, op.offset)
                return self._search(wanted, query, *page, refresh=self._op_refreshes(op))
            case ListNamespacesOp():
                return self._list(op, None)
            case _:
                raise ConfigurationError(
                    f"a store has no operation {op!r}; expected GetOp, PutOp, PutItem, SearchOp or "
                    "ListNamespacesOp"
                )

    def _op_refreshes(self, op: GetOp | SearchOp) -> bool:
        # true is also what an operation says by default
        return op.refresh_ttl and self._refreshes(None)

    # -- one operation

    def _put(
        self,
        namespace: Any,
        key: Any,
        value: Any,
        index: Index = None,
        ttl: TTL = None,
        if_version: int | None = None,
        provenance: Provenance | None = None,
    ) -> Steps[None]:
        place = self._preparer.place(namespace, key)
        extra = if_version, provenance
        put = self._preparer.put(place, value, index, self._minutes(ttl), *extra)
        yield from self._write([put])

    def _write(self, puts: Sequence[Put]) -> Steps[None]:
        model = yield from self._preparer.embedded(puts)
        yield WritePuts(puts, self._now(), model)
        if model is None:
            self._lacking = self._lacking or any(put.lacking is not None for put in puts)
        elif self._lacking:
            self._lacking = False
            yield from self._embed_some(len(puts) + 16)

    def _get(
        self, namespace: Any, key: Any, *, refresh: bool, as_of: Any = None
    ) -> Steps[StoredItem | None]:
        path, text = self._path(namespace), check_key(key)
        when = None if as_of is None else micros(as_of)
        return self._got(path, text, refresh, when)

    def _got(
        self, path: bytes, key: str, refresh: bool, as_of: int | None
    ) -> Steps[StoredItem | None]:
        row = yield Read(self._reader.get(path, key, self._now(), as_of), snapshot=False)
        if row is None:
            return None
        if refresh and as_of is None:
            yield from self._touch([row])
        return self._records.item(row)

    def _touch(self, rows: Sequence[Row]) -> Steps[None]:
        """Let items that expire live on, now that they were read."""
        mortal = [row[0] for row in rows if row[7] is not None]
        if mortal and not self.database.read_only:
            yield Write(partial(self._writer.touch, mortal, self._now))

    def _search(
        self, wanted: Wanted, query: Query | None, limit: int, offset: int, *, refresh: bool
    ) -> Steps[list[FoundItem]]:
        if query is None:
            pairs = yield Read(self._reader.search(wanted, limit, offset))
            if refresh and wanted.as_of is None:
                yield from self._touch([row for row, _ in pairs])
            return [FoundItem(item) for _, item in pairs]
        found: list[FoundItem] = yield from self._searcher.search(wanted, query, limit, offset)
        if refresh and wanted.as_of is None and any(item.expires_at for item in found):
            keys = [(self._path(item.namespace), item.key) for item in found if item.expires_at]
            yield from self._touch((yield Read(self._rows(keys))))
        return found

    def _rows(self, keys: Sequence[tuple[bytes, str]]) -> Flow[list[Row]]:
        out = []
        for path, key in keys:
            row = yield from self._reader.get(path, key, self._now(), None)
            if row is not None:
                out.append(row)
        return out

    def _list(self, op: ListNamespacesOp, as_of: Any) -> Steps[list[tuple[str, ...]]]:
        conditions = tuple(op.match_conditions or ())
        for condition in conditions:
            check_condition(condition)
        depth = op.max_depth
        if depth is not None and (type(depth) is not int or depth < 1):
            raise ConfigurationError(f"max_depth is {depth!r}; expected 1 or more, or None")
        limit, offset = self._page(op.limit, op.offset)
        when = None if as_of is None else micros(as_of)
        return _one(
            self._reader.namespaces(self._root, conditions, depth, limit, offset, self._now(), when)
        )


def _one(flow: Flow[Any]) -> Steps[Any]:
    return (yield Read(flow))
