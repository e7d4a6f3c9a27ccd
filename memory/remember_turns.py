"""The node that remembers the turns of a run at its end, so that any thread finds them at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.checkpointers.address import check_thread_id
from perdure.errors import ConfigurationError, InvalidConfig, InvalidNamespace
from perdure.memory.conversation import Messages, role
from perdure.memory.effects import Effects, in_thread
from perdure.memory.extraction import ExtractionReport, Pipeline
from perdure.memory.gate import Gate
from perdure.memory.learner import Learner
from perdure.memory.options import instance
from perdure.memory.proposals import Scope
from perdure.memory.run_config import source
from perdure.memory.store_adapter import StoreAdapter, adapter_of, namespace_of
from perdure.memory.templates import Template
from perdure.memory.thread_messages import ThreadHistory, history_of_state
from perdure.memory.turns import TurnExtractor
from perdure.memory.watermarks import Watermark

_LOG = logging.getLogger("perdure")
_BATCH: Final = 200  # messages in one transaction


class RememberTurns(Learner):
    """A node that remembers the messages of a run, at the end of a graph or in MemoryMiddleware.

    Each message becomes a memory, without a model, in about a millisecond. They are written in one
    transaction with the thread's watermark, so nothing is remembered twice. If the store fails,
    the error is logged, and the next run or a background extraction remembers the messages. Put
    the node before nodes that remove messages from the state.

    Args:
        store: Where memories are kept; None: the store of the graph.
        namespace: Labels; see `Template`.
        gate: Decides what is kept; None: `Gate()`.
        messages_key: The channel of the messages.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        *,
        namespace: Sequence[str] = ("memories", "{user_id}"),
        gate: Gate | None = None,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        self._adapter = None if store is None else StoreAdapter(store)
        self.namespace = Template(namespace)
        self.gate: Gate = instance("gate", gate or Gate(), Gate, "a Gate")

    def learning(
        self, messages: Messages, state: object, config: RunnableConfig | None
    ) -> Effects[ExtractionReport | None]:
        """Remember messages; None: that failed, and is logged.

        Raises:
            InvalidConfig: The config names no thread, or does not fill in the namespace.
            ConfigurationError: There is no store.
        """
        thread_id, checkpoint_id = source(config)
        if not thread_id:
            raise InvalidConfig(
                "the run has no thread_id, so its turns cannot be remembered; pass "
                'config={"configurable": {"thread_id": "…"}}'
            )
        history = history_of_state(check_thread_id(thread_id), checkpoint_id, messages)
        # messages since the user's newest are of this moment; the times of earlier ones are unknown
        humans = [i for i, each in enumerate(history.messages) if role(each.message) == "human"]
        history = history.timed(datetime.now(UTC), humans[-1] if humans else 0)
        adapter = self._adapter or adapter_of(None)
        scope = Scope(adapter, namespace_of(self.namespace, config), config)
        pipeline = Pipeline(TurnExtractor(), self.gate, _BATCH, scope)

        def reads(mark: Watermark) -> Effects[ThreadHistory]:
            yield from ()
            return history

        try:
            return (yield from in_thread(pipeline.extracting(thread_id, reads)))
        except (ConfigurationError, InvalidNamespace):
            raise
        except Exception as exc:
            _LOG.warning("the turns of %r are not remembered yet: %s", thread_id, exc)
            return None


remember_turns = RememberTurns
"""Makes the node: `remember_turns()`, `remember_turns(store, namespace=("memories",))`."""
