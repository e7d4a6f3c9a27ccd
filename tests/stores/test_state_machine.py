"""Random puts, deletes, reads, sweeps and clock changes, compared with a plain dictionary."""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perdure.errors import VersionConflict
from perdure.stores import Provenance, SQLiteStore, StoredItem, VersionRetention
from tests.backends import KEY
from tests.rounds import rounds
from tests.store_backends import Clock, list_item_keys, open_store
from tests.stores.model import TICK, Key, Version

DAY = 86_400.0
WORDS = ["zorbax", "quimbo", "vexnor", "hadlup"]  # words without synonyms

spaces = st.sampled_from([("a",), ("a", "b"), ("ab",), ("a", "b", "c"), ("b", "a")])
prefixes = st.sampled_from([(), ("a",), ("a", "b"), ("ab",), ("b",), ("c",)])
names = st.sampled_from(["k0", "k1", "k2"])
lives = st.sampled_from([None, None, 1.0, 30.0])
words = st.sampled_from(WORDS)
Place = tuple[tuple[str, ...], str]


def to_microseconds(moment: datetime) -> int:
    return round(moment.timestamp() * TICK)


def describe_item(item: StoredItem | Any) -> Any:
    actor = item.provenance.actor if item.provenance else None
    times = to_microseconds(item.created_at), to_microseconds(item.valid_from)
    return item.version, item.value, *times, actor


class StoreRules(RuleBasedStateMachine):
    """The rules of the state machine. `key` is the encryption key of the file."""

    key: ClassVar[bytes | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.folder = tempfile.TemporaryDirectory()
        self.keys: dict[Place, Key] = {}
        self.moments: list[int] = []
        self.store = self.open()

    def open(self) -> SQLiteStore:
        path = Path(self.folder.name) / "memories.db"
        return open_store(path, index=None, key=self.key, clock=self.clock, synchronous="normal")

    def teardown(self) -> None:
        try:
            self.compare_histories()
        finally:
            self.store.close()
            self.folder.cleanup()

    @property
    def now(self) -> int:
        return int(self.clock.now * TICK)

    def key_model(self, space: Any, name: str) -> Key:
        return self.keys.setdefault((space, name), Key())

    def present_versions(self, prefix: Any = ()) -> dict[Place, Version]:
        """Return the present versions under a prefix."""
        return {
            place: key.present
            for place, key in self.keys.items()
            if place[0][: len(prefix)] == prefix and key.present and key.present.is_alive(self.now)
        }

    def versions_at(self, when: int, prefix: Any = ()) -> dict[Place, Version]:
        """Return the versions that were valid under a prefix at a moment."""
        return {
            place: version
            for place, key in self.keys.items()
            if place[0][: len(prefix)] == prefix
            for version in key.versions
            if version.is_valid_at(when)
        }

    # -- writing

    @rule(space=spaces, name=names, word=words, n=st.integers(0, 3), ttl=lives, index=st.booleans())
    def put(self, space: Any, name: str, word: str, n: int, ttl: float | None, index: bool) -> None:
        """Put an item, searchable or not, with a TTL or without."""
        value, actor = {"text": f"the {word}", "n": n}, f"actor {n}" if n else None
        provenance = Provenance(actor=actor) if actor else None
        self.store.put(space, name, value, None if index else False, ttl=ttl, provenance=provenance)
        life = None if ttl is None else int(ttl * 60 * TICK)
        self.key_model(space, name).put(
            Version(0, value, 0, 0, ttl=life, actor=actor, index=index), self.now
        )

    @rule(space=spaces, name=names, version=st.integers(0, 4), gone=st.booleans())
    def swap(self, space: Any, name: str, version: int, gone: bool) -> None:
        """Put or delete with if_version, which must succeed at that version only."""
        key = self.key_model(space, name)
        present = key.present if key.present and key.present.is_alive(self.now) else None
        value = {"text": "swapped", "n": version}
        try:
            if gone:
                self.store.delete(space, name, if_version=version)
            else:
                self.store.put(space, name, value, if_version=version)
        except VersionConflict:
            assert version != (present.number if present else 0)
            return
        assert version == (present.number if present else 0)
        key.put(None if gone else Version(0, value, 0, 0), self.now)

    @rule(space=spaces, name=names)
    def delete(self, space: Any, name: str) -> None:
        """Delete an item that may not exist."""
        self.store.delete(space, name)
        self.key_model(space, name).put(None, self.now)

    @rule()
    def sweep(self) -> None:
        """Sweep expired items, which closes each at the time it expired."""
        due = [
            key.present
            for key in self.keys.values()
            if key.present and not key.present.is_alive(self.now)
        ]
        for version in due:
            version.until = version.expires

        assert len(due) == self.store.sweep_ttl()

    @rule(last=st.none() | st.integers(0, 2), days=st.none() | st.sampled_from([0.0, 0.5, 3.0]))
    def retain(self, last: int | None, days: float | None) -> None:
        """Drop old versions; the model forgets them as well."""
        if last is None and days is None:
            return
        since = self.now - int((days or 0) * DAY * TICK)
        dropped = 0
        for key in self.keys.values():
            closed = [version for version in key.versions if version.until is not None]
            for age, version in enumerate(reversed(closed)):
                kept = (last is not None and age < last) or (
                    days is not None and (version.until or 0) >= since
                )
                if not kept:
                    key.versions.remove(version)
                    dropped += 1

        assert dropped == self.store.retain(VersionRetention(last=last, days=days))

    @rule(prefix=prefixes, word=st.none() | words, n=st.none() | st.integers(0, 3))
    def forget(self, prefix: Any, word: str | None, n: int | None) -> None:
        """Erase keys with all their versions, if one version matches."""
        gone = {
            place: key
            for place, key in self.keys.items()
            if place[0][: len(prefix)] == prefix
            and any(
                (word is None or word in version.value["text"])
                and (n is None or n == version.value["n"])
                for version in key.versions
            )
        }
        present = sum(key.present is not None for key in gone.values())
        versions = sum(len(key.versions) for key in gone.values()) - present
        for place in gone:
            del self.keys[place]

        receipt = self.store.forget(prefix, query=word, filter=None if n is None else {"n": n})
        assert (present, versions, tuple(sorted(gone))) == (
            receipt.items,
            receipt.versions,
            receipt.keys,
        )
        for place in gone:
            assert self.store.history(*place) == []

    # -- time

    @rule(seconds=st.sampled_from([1.0, 59.0, 60.0, 1800.0, DAY, -1.0, -3600.0, 0.000001]))
    def step_clock(self, seconds: float) -> None:
        """Move the clock forwards or backwards."""
        self.moments = [*self.moments, self.now][-6:]
        self.clock.now = round(self.clock.now + seconds, 6)

    @rule()
    def reopen(self) -> None:
        """Close the store and open it again."""
        self.store.close()
        self.store = self.open()

    # -- reading

    @rule(space=spaces, name=names, refresh=st.booleans())
    def get(self, space: Any, name: str, refresh: bool) -> None:
        """Read the present version, with or without refreshing its TTL."""
        version = self.present_versions(space).get((space, name))
        item = self.store.get(space, name, refresh_ttl=refresh)
        assert (version.describe() if version else None) == (describe_item(item) if item else None)
        if version and version.ttl is not None and refresh:
            version.expires = self.now + version.ttl

    @rule(prefix=prefixes, n=st.none() | st.integers(0, 3))
    def search(self, prefix: Any, n: int | None) -> None:
        """Search all items under a prefix, with or without a filter."""
        results = self.store.search(
            prefix, filter=None if n is None else {"n": n}, limit=100, refresh_ttl=False
        )
        wanted = {
            place: version.describe()
            for place, version in self.present_versions(prefix).items()
            if n is None or version.value["n"] == n
        }
        assert wanted == {(item.namespace, item.key): describe_item(item) for item in results}
        assert [item.namespace for item in results] == sorted(item.namespace for item in results)

    @rule(prefix=prefixes, word=words)
    def query(self, prefix: Any, word: str) -> None:
        """Search for a word, which finds searchable items with that word."""
        results = self.store.search(prefix, query=word, limit=100, refresh_ttl=False)
        wanted = [
            place
            for place, version in self.present_versions(prefix).items()
            if version.index and word in version.value["text"]
        ]
        assert sorted(wanted) == sorted((item.namespace, item.key) for item in results)

    @rule(prefix=prefixes, ago=st.integers(0, 5), word=words)
    def look_back(self, prefix: Any, ago: int, word: str) -> None:
        """Compare reads, searches and listings of a past moment with the model."""
        if ago >= len(self.moments):
            return
        when = self.moments[ago]
        moment = Clock(when / TICK).at()
        then = self.versions_at(when, prefix)
        results = self.store.search(prefix, as_of=moment, limit=100)
        asked = self.store.search(prefix, query=word, as_of=moment, limit=100)
        assert {place: version.describe() for place, version in then.items()} == {
            (item.namespace, item.key): describe_item(item) for item in results
        }
        assert sorted(k for (_, k), v in then.items() if v.index and word in v.value["text"]) == (
            sorted(list_item_keys(asked))
        )
        assert sorted({space for space, _ in then}) == self.store.list_namespaces(
            prefix=prefix, as_of=moment
        )
        for space, name in self.keys:
            item = self.store.get(space, name, as_of=moment)
            version = self.versions_at(when).get((space, name))
            assert (version.describe() if version else None) == (
                describe_item(item) if item else None
            )

    @invariant()
    def compare_namespaces_and_counts(self) -> None:
        """Compare namespaces and counts with the model after every step."""
        assert (
            sorted({space for space, _ in self.present_versions()}) == self.store.list_namespaces()
        )
        present = [key.present for key in self.keys.values() if key.present]
        stats = self.store.stats()
        assert (len(present), sum(len(key.versions) for key in self.keys.values())) == (
            stats.items,
            stats.items + stats.versions,
        )

    def compare_histories(self) -> None:
        for (space, name), key in self.keys.items():
            history = self.store.history(space, name)
            assert [version.describe() for version in key.versions] == list(
                map(describe_item, history)
            )


class SealedStoreRules(StoreRules):
    """The same rules in an encrypted file."""

    key = KEY


TestMemories = StoreRules.TestCase
TestMemories.settings = settings(max_examples=rounds(30), stateful_step_count=30)
TestSealedMemories = SealedStoreRules.TestCase
TestSealedMemories.settings = settings(max_examples=rounds(10), stateful_step_count=30)
