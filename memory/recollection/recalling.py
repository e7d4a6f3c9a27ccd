"""UseMemories as a part of what the model is shown: memories that answer what was just said.

The query is the newest human message. What is found stands in the system message, quoted, and only
there: nothing is written to the state, so no memory is taken for something that was said.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Final, Literal

from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import EmbeddingFailed, PerdureError, StorageError
from perdure.memory.clock import Clock, clock_of
from perdure.memory.conversation import Turn
from perdure.memory.effects import Effects, arun, run
from perdure.memory.nodes import MessagesNode, Shown
from perdure.memory.options import choice, whole
from perdure.memory.recollection.reach import NAMESPACES, ThreadHistory
from perdure.memory.recollection.recall import Recall, Recollection, Waiting
from perdure.memory.recollection.unformed import Tails
from perdure.memory.run_config import source
from perdure.memory.store_adapter import StoreAdapter
from perdure.memory.tokens import Countable
from perdure.stores.text import STOP_WORDS, query_tokens

_LOG = logging.getLogger("perdure")
_MARK: Final = "perdure_memories"  # in additional_kwargs, which no provider is sent
_FOLLOWS: Final = re.compile(r"(?:and|but|or|also|then|what about|how about)\b", re.IGNORECASE)
_FEW: Final = 2  # words
_LONGEST: Final = 2_000  # characters of a query: what is longer is cut in its middle
_FAILURES: Final = ("skip", "raise")


def use_memories(
    store: BaseStore | None = None,
    *,
    namespaces: Sequence[Sequence[str]] = NAMESPACES,
    budget: int | None = 1_000,
    limit: int = 20,
    kinds: Sequence[str] | None = None,
    tails: Tails | Waiting | None = None,
    recent: int = 10,
    now: Clock | str | None = None,
    as_of: Clock | str | None = None,
    counter: Countable | None = None,
    on_failure: Literal["skip", "raise"] = "skip",
    messages_key: str = "messages",
) -> UseMemories:
    """A node that shows the model what is remembered: `recall`, before each call.

    `view(use_memories(store), trim(max_tokens=4_000))`: it comes before the part that cuts, whose
    budget then counts the memories, and after `use_instructions`, which would replace them; adds a
    section `<memories>` to the system message; the state stays as it is.

    The query is the newest human message, with the one before it where it says little by itself,
    like "and then?".

    Args:
        store: Any; None: the one that the graph was compiled with.
        namespaces: As of `recall`; so are budget, limit, kinds, tails and counter.
        budget: Tokens.
        limit: How many memories at most.
        kinds: Only these.
        tails: Knows what is not yet formed.
        recent: The model reads the newest turns anyway: memories that rest on nothing but so many
            of them are left out. Of older ones nobody knows here whether they will be cut.
        now: Gives the moment of the query in the user's time zone, of the run's config; None: the
            present in the local one. Time cues like "last week" go by it.
        as_of: Gives the moment at which to remember, of the run's config; None, or where that
            gives None: the present.
        counter: What counts tokens.
        on_failure: If the store or its embedder fails, `"skip"`: a warning, and the turn goes on
            without memories; `"raise"`.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: An option is wrong.
    """
    return UseMemories(
        Recall(namespaces, budget, limit, kinds, counter, tails),
        None if store is None else StoreAdapter(store).store,
        recent=whole("recent", recent, 0),
        skips=choice("on_failure", on_failure, _FAILURES) == "skip",
        now=clock_of("now", now),
        as_of=clock_of("as_of", as_of),
        messages_key=messages_key,
    )


class UseMemories(MessagesNode):
    """See `recalling`, which makes it."""

    def __init__(
        self,
        asks: Recall,
        store: BaseStore | None,
        *,
        recent: int,
        skips: bool,
        now: Clock,
        as_of: Clock,
        messages_key: str,
    ) -> None:
        super().__init__(messages_key)
        self._asks, self._store = asks, store
        self._recent, self._skips = recent, skips
        self._now, self._as_of = now, as_of

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """The same, with what is remembered in the system message."""
        turns = list(islice(shown.turns, max(self._recent, 2)))
        text = run(self._text(turns, config))
        return _with_section(replace(shown, turns=chain(turns, shown.turns)), text)

    async def athrough(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """See `through`."""
        turns = list(islice(shown.turns, max(self._recent, 2)))
        text = await arun(self._text(turns, config))
        return _with_section(replace(shown, turns=chain(turns, shown.turns)), text)

    def _text(self, turns: Sequence[Turn], config: RunnableConfig | None) -> Effects[str]:
        """The section; "" for none."""
        query = query_of(turns)
        if not query:
            return ""
        try:
            found = yield from self._found(query, turns, config)
        except (StorageError, EmbeddingFailed) as exc:
            return self._failed(exc)
        except PerdureError:
            raise  # something is set up wrongly: no later turn would fare better
        except Exception as exc:  # whatever the driver of another store raises
            return self._failed(exc)
        return str(found)

    def _found(
        self, query: str, turns: Sequence[Turn], config: RunnableConfig | None
    ) -> Effects[Recollection]:
        ids = {message.id for turn in turns[: self._recent] for message in turn.messages}
        said = ThreadHistory(source(config)[0], frozenset(id for id in ids if id is not None))
        as_of, now = self._as_of(config), self._now(config)
        return self._asks.use_memories(query, self._store, config, as_of, now, said)

    def _failed(self, exc: Exception) -> str:
        if not self._skips:
            raise exc
        _LOG.warning("nothing is recalled in this turn: %s", exc, exc_info=exc)
        return ""


def query_of(turns: Sequence[Turn]) -> str:
    """What to ask memory, given the newest turns, newest first; "": there is no text."""
    asked = [turn.messages[0].text.strip() for turn in turns[:2]]
    if not asked or not asked[0]:
        return ""
    text = "\n".join(reversed(asked)) if _is_elliptic(asked[0]) else asked[0]
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n{text[-half:]}"


def _is_elliptic(text: str) -> bool:
    """Whether a message is understood only from the one before: "and then?", "Bruges?"."""
    telling = [word for word in query_tokens(text) if word not in STOP_WORDS]
    short = len(text.split()) <= _FEW or _FOLLOWS.match(text) is not None
    return not telling or (short and len(telling) < _FEW)


def _with_section(shown: Shown, text: str) -> Shown:
    """What is shown, with a section at the end of the system message; one there is replaced."""
    system = None if shown.system is None else _without_section(shown.system)
    if not text:
        return replace(shown, system=system)
    mark = {_MARK: text}
    if system is None:
        return replace(shown, system=SystemMessage(text, additional_kwargs=mark))
    content: Any = system.content
    if isinstance(content, str):
        joined: Any = f"{content}\n\n{text}" if content else text
    else:  # the blocks before stay as they are, so that a provider's cache of them holds
        joined = [*content, {"type": "text", "text": text}]
    kwargs = {**system.additional_kwargs, **mark}
    update = {"content": joined, "additional_kwargs": kwargs}
    return replace(shown, system=system.model_copy(update=update))


def _without_section(system: BaseMessage) -> BaseMessage | None:
    """A system message without the section that it was given; None: there is nothing else in it."""
    text = system.additional_kwargs.get(_MARK)
    if text is None:
        return system
    content: Any = system.content
    if isinstance(content, str):
        left: Any = content.replace(f"\n\n{text}", "", 1) if content != text else ""
    else:
        left = [block for block in content if block != {"type": "text", "text": text}]
    if not left:
        return None
    kwargs = {key: value for key, value in system.additional_kwargs.items() if key != _MARK}
    return system.model_copy(update={"content": left, "additional_kwargs": kwargs})
