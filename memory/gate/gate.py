"""The gate in front of all memories: what may become one, what waits for review, what is refused.

What is formed of conversations unasked is judged more strictly than what somebody asks for. A text
is never refused for what it tells its reader to do: it is data, and is shown as such.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from perdure.errors import ConfigurationError
from perdure.memory.effects import Effects
from perdure.memory.gate.detectors import DETECTORS, Detector
from perdure.memory.gate.echoes import Echoes
from perdure.memory.gate.flood import Rates, Room
from perdure.memory.gate.hearing import Check, Hearing, JudgesDurability, Rule
from perdure.memory.gate.sensitive import WAYS, Sensitive, Way
from perdure.memory.gate.sight import Sight
from perdure.memory.options import choice, number, whole
from perdure.memory.records import Candidate, Verdict
from perdure.memory.store_adapter import StoreAdapter
from perdure.stores.base import Namespace


class Gate:
    """Judges what may become a memory.

    Refused are: what has no words or, of turns, only a greeting, thanks or a nod; what is too
    large; what a system message says; what an assistant says after what it was shown; facts that
    pass, or that a memory states already; what was deleted before, unless somebody asks for it; and
    floods of a model. Into quarantine goes what holds a secret, what a tool or an assistant says as
    an order to the assistant, unless your code asks for it, and what a check of yours failed on.
    One object serves any number of namespaces and threads.

    Args:
        checks: Your own, asked in order about what would be kept otherwise. The first verdict that
            is not to keep decides; one that keeps may give another `text`. What a check raises on
            goes into quarantine.
        max_chars: Characters of a memory's text; turns and episodes may have more.
        max_value_chars: Characters of the text and all fields together.
        secrets: What is done about passwords, keys and the like, and kinds of your detectors:
            `"keep"`, `"redact"`, `"quarantine"` or `"refuse"`.
        cards: About numbers of payment cards and bank accounts.
        contacts: About e-mail addresses and telephone numbers; `"redact"` keeps them as they are
            where somebody asks for the memory.
        durability: Whether facts that are formed unasked must be true next month still, by the rule
            of `durability.passing`; or another rule, sync or async, or `durable_by(model)`.
        novelty: Whether a fact must say something new.
        near: From what `likeness.alike` on two texts say the same.
        per_minute: How many different memories a model may ask for by tools, within a minute in a
            namespace; counted in this process. What your code keeps is not counted.
        max_items: About how many items a namespace may hold, with those below it.
        detectors: What finds secrets and contacts.
        clock: Tells the seconds of a minute.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        checks: Sequence[Check] | None = None,
        *,
        max_chars: int = 2_000,
        max_value_chars: int = 100_000,
        secrets: Way = "quarantine",
        cards: Way = "quarantine",
        contacts: Way = "redact",
        durability: bool | Rule | JudgesDurability = True,
        novelty: bool = True,
        near: float = 0.9,
        per_minute: int = 60,
        max_items: int = 100_000,
        detectors: Sequence[Detector] = DETECTORS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, way in (("secrets", secrets), ("cards", cards), ("contacts", contacts)):
            choice(name, way, WAYS)
        self.checks: Sequence[Check] = _callables("checks", checks or ())
        self.sensitive = Sensitive(secrets, cards, contacts, _callables("detectors", detectors))
        self._sight = Sight(
            whole("max_chars", max_chars, 1),
            whole("max_value_chars", max_value_chars, 1),
            self.sensitive,
            durability is True,
        )
        self._durable = _judge_of(durability)
        self._novelty, self._near = bool(novelty), number("near", near, 0, 1)
        self._rates = Rates(whole("per_minute", per_minute, 0), clock)
        self._room = Room(whole("max_items", max_items, 0))

    def judge(
        self,
        candidates: Sequence[Candidate],
        adapter: StoreAdapter,
        namespace: Namespace,
        *,
        keys: Sequence[str | None] | None = None,
    ) -> Effects[list[Verdict]]:
        """A verdict on each candidate, in order.

        Args:
            candidates: They; many at once cost less.
            adapter: The store they would be kept in.
            namespace: Where.
            keys: The key that each would be kept under. What another of the same call says already
                can then be `same_as`, and a memory may be put in other words.

        Raises:
            ConfigurationError: There is not a key, or None, for each.
            StorageError: The store cannot be read.
        """
        keys = [None] * len(candidates) if keys is None else keys
        if len(keys) != len(candidates):
            raise ConfigurationError(
                f"there are {len(candidates)} candidates and {len(keys)} keys; expected a key, or "
                "None, for each"
            )
        echoes = Echoes()
        verdicts = [self._at_sight(each, namespace, echoes) for each in candidates]
        hearing = Hearing(candidates, verdicts, adapter, namespace, keys)
        yield from hearing.exhuming()
        if self._novelty:
            yield from hearing.comparing(self._near)
        if self._durable is not None:
            yield from hearing.weighing(self._durable)
        yield from hearing.examining(self.checks, self.sensitive)
        if self._novelty:
            hearing.joining(self._near)
        yield from hearing.making_room(self._room)
        return hearing.verdicts

    def _at_sight(self, candidate: Candidate, namespace: Namespace, echoes: Echoes) -> Verdict:
        if candidate.by_model and not self._rates.allows(namespace, candidate.text):
            most = self._rates.per_minute
            reason = f"there are too many at once: per_minute is {most:,}; wait a minute"
            return Verdict("refuse", reason, "flood")
        return self._sight.judged(candidate, echoes)


def _callables(name: str, given: Any) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(map(callable, given)):
        raise ConfigurationError(f"{name} is {given!r:.80}; expected a list of functions")
    return tuple(given)


def _judge_of(durability: Any) -> Rule | JudgesDurability | None:
    if isinstance(durability, bool):
        return None
    judge: Rule | JudgesDurability = durability
    if not isinstance(judge, JudgesDurability) and not callable(judge):
        raise ConfigurationError(
            f"durability is {durability!r:.80}; expected True, False, a function of a text, or "
            "durable_by(model)"
        )
    return judge
