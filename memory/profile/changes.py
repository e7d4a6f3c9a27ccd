"""Changes of a profile: worked out on a copy, checked against the schema, written as one or not.

A change of what another run has changed meanwhile is worked out anew on what holds then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, Final, Generic

from perdure.errors import ConfigurationError, InvalidPatch, VersionConflict
from perdure.memory.effects import Effects
from perdure.memory.gate import Gate
from perdure.memory.profile.documents import (
    Document,
    Edit,
    check_size,
    differences,
    merged,
    plain,
    same,
)
from perdure.memory.profile.items import Kept, ProfilePlace, kept, puts_of, written
from perdure.memory.profile.patching import Operation, patched
from perdure.memory.profile.schema import M, Shape
from perdure.memory.profile.screening import Screen, changed, names_in, sourced
from perdure.stores.base import PutItem

_MOST_EDITS: Final = 100  # that are noted of one change


@dataclass(frozen=True, slots=True)
class Standing(Generic[M]):
    """A profile as it stands.

    Attributes:
        kept: What the store holds of it.
        document: What a change starts from: what is kept, with the schema's defaults for the rest.
        profile: The same as an instance of the schema; None: it is none yet, or no more.
        fault: Why not; "" if it is one.
    """

    kept: Kept
    document: Document
    profile: M | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Plan(Generic[M]):
    """A change that is worked out and accepted, but not written.

    Attributes:
        puts: What is to be written, all or none, for which `StoreAdapter.written` is made; empty:
            nothing changes. Another run that has written meanwhile makes it a `VersionConflict`.
        profile: What the profile is then.
        edits: What it does.
    """

    puts: list[PutItem]
    profile: M
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A change, whatever the document is that it is applied to.

    Attributes:
        name: `"patch"`, `"merge"` or `"set"`.
        becoming: What a document becomes by it.
        edits: What it does; None: what differs then.
    """

    name: str
    becoming: Callable[[Document], Document]
    edits: tuple[Edit, ...] | None = None


class Changes(Generic[M]):
    """Reads profiles and works out changes of them.

    Args:
        shape: Their schema.
        sections: Whether each of their fields is an item of its own.
        max_bytes: Of a document's JSON.
        gate: Judges what changes set.
    """

    def __init__(self, shape: Shape[M], *, sections: bool, max_bytes: int, gate: Gate) -> None:
        self.shape, self.sections, self.max_bytes = shape, sections, max_bytes
        self._screen = Screen(gate)

    def reading(self, place: ProfilePlace, as_of: datetime | None = None) -> Effects[Standing[M]]:
        """Read a profile, or what is instead of one.

        Raises:
            ConfigurationError: The item is something else, or the store has no past.
        """
        found = yield from kept(place, as_of)
        if found.document is None:
            default = self.shape.default()
            asks = f"{self.shape.name} has fields that must be given" if default is None else ""
            return Standing(found, self.shape.blank(), default, asks)
        try:
            profile, document = self.shape.filled(found.document)
        except InvalidPatch as exc:
            return Standing(found, found.document, None, str(exc))
        return Standing(found, document, profile)

    def planned(
        self, place: ProfilePlace, standing: Standing[M], change: Change
    ) -> Effects[Plan[M]]:
        """A change of a profile as it stands.

        Raises:
            InvalidPatch: It cannot be applied, the gate does not let pass what it sets, or the
                schema refuses what is left.
        """
        former = standing.document
        # what is not to be kept is refused before a message about something else quotes it
        edits = self._screen.noted(change.edits or (), former, place)
        new = change.becoming(former)
        check_size(new, self.max_bytes)
        self._screen.check_names(names_in(new), former, place)
        leaves = changed(former, new)
        new = yield from self._screen.passed(leaves, new, place)
        profile, document = self.shape.filled(new)
        check_size(document, self.max_bytes)
        unwritten = standing.kept.document is None and change.name == "set"
        if same(document, former) and not unwritten:
            return Plan([], profile, ())
        if change.edits is None:
            edits = tuple(islice(differences(former, document), _MOST_EDITS))
        puts = puts_of(
            replace(place, provenance=sourced(leaves, place)),
            standing.kept,
            document,
            change=change.name,
            edits=edits,
            sections=self.sections,
        )
        return Plan(puts, profile, edits)

    def changing(self, place: ProfilePlace, change: Change) -> Effects[M]:
        """Make a change. Returns what the profile is then.

        Raises:
            InvalidPatch: See `planned`; nothing is written.
        """
        while True:  # each turn that fails is one in which somebody else succeeded
            standing = yield from self.reading(place)
            plan = yield from self.planned(place, standing, change)
            try:
                yield from written(place, standing.kept, plan.puts)
            except VersionConflict:
                continue
            return plan.profile

    # -- kinds of change

    def patch(self, operations: Sequence[Operation], *, keep_fields: bool) -> Change:
        """A patch; see `patching.patched`."""

        def becoming(document: Document) -> Document:
            return patched(document, operations, max_bytes=self.max_bytes, keep_fields=keep_fields)

        edits = tuple(each.edit for each in operations if each.op != "test")
        return Change("patch", becoming, edits)

    def merge(self, partial: Any) -> Change:
        """A merge; see `documents.merged`."""
        merged({}, partial)  # what is no object is refused before anything is read
        return Change("merge", lambda document: merged(document, partial))

    def set(self, document: Any) -> Change:
        """A document, or a profile, in the place of whatever there is.

        Raises:
            InvalidPatch: It is neither.
        """
        if isinstance(document, self.shape.schema):
            document = self.shape.dumped(document)
        if not isinstance(document, Mapping):
            raise InvalidPatch(
                f"the document is {document!r:.80}, a {type(document).__name__}; expected a "
                f"{self.shape.name} or a dict of its fields"
            )
        whole: Document = plain(dict(document), "the document")
        return Change("set", lambda _: whole)


def profile_of(standing: Standing[M], place: ProfilePlace) -> M:
    """The profile that stands.

    Raises:
        ConfigurationError: There is none: nothing is kept and the schema has no defaults for all,
            or what is kept is not as it asks for.
    """
    if standing.profile is not None:
        return standing.profile
    where = f"the profile {place.key!r} in {place.namespace!r}"
    if standing.kept.document is None:
        raise ConfigurationError(
            f"{where} is not there yet, and {standing.fault}; set() it, or give the schema "
            "defaults, or Profile(…, default=…)"
        )
    raise ConfigurationError(
        f"{where} does not fit the schema any more: {standing.fault}; raw() gives it as it is, and "
        "patch() or set() mends it"
    )
