"""Memory of agents: what to show the model, what to keep in the state, what to know next time.

Each name is imported when it is first asked for: `trim` loads neither a store nor a queue.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.memory.background import Background
    from perdure.memory.collection import (
        Collection,
        aforget,
        amemories,
        aremember,
        forget,
        memories,
        remember,
    )
    from perdure.memory.context import assemble
    from perdure.memory.due import Pace
    from perdure.memory.examples import Example, ExampleSelector
    from perdure.memory.extraction import Extraction, remember_turns
    from perdure.memory.gate import Gate
    from perdure.memory.instructions import Instructions, use_instructions
    from perdure.memory.middleware import MemoryMiddleware
    from perdure.memory.model_call import ModelCall
    from perdure.memory.model_extractor import ModelExtractor
    from perdure.memory.nodes import view
    from perdure.memory.profile import Profile
    from perdure.memory.quarantine import Quarantine
    from perdure.memory.recall import arecall, recall
    from perdure.memory.recall_check import acheck_recall, check_recall
    from perdure.memory.records import Candidate, Memory, Outcome, Verdict
    from perdure.memory.reducers import ChatState, Keep, keepable, messages
    from perdure.memory.summary import SummaryState, summarize
    from perdure.memory.tokens import context_window, count_tokens, token_counter
    from perdure.memory.tool_outputs import aexpand, clear_tool_outputs, expand
    from perdure.memory.tools import manage_memory, search_memory
    from perdure.memory.trim import trim
    from perdure.memory.turns import TurnExtractor
    from perdure.memory.update_instructions import update_instructions
    from perdure.memory.update_profile import update_profile
    from perdure.memory.use_memories import use_memories

__all__ = [
    "Background",
    "Candidate",
    "ChatState",
    "Collection",
    "Example",
    "ExampleSelector",
    "Extraction",
    "Gate",
    "Instructions",
    "Keep",
    "Memory",
    "MemoryMiddleware",
    "ModelCall",
    "ModelExtractor",
    "Outcome",
    "Pace",
    "Profile",
    "Quarantine",
    "SummaryState",
    "TurnExtractor",
    "Verdict",
    "acheck_recall",
    "aexpand",
    "aforget",
    "amemories",
    "arecall",
    "aremember",
    "assemble",
    "check_recall",
    "clear_tool_outputs",
    "context_window",
    "count_tokens",
    "expand",
    "forget",
    "keepable",
    "manage_memory",
    "memories",
    "messages",
    "recall",
    "remember",
    "remember_turns",
    "search_memory",
    "summarize",
    "token_counter",
    "trim",
    "update_instructions",
    "update_profile",
    "use_instructions",
    "use_memories",
    "view",
]

_MODULES = {
    "background": "Background",
    "collection": "Collection aforget amemories aremember forget memories remember",
    "context": "assemble",
    "due": "Pace",
    "examples": "Example ExampleSelector",
    "extraction": "Extraction remember_turns",
    "gate": "Gate",
    "instructions": "Instructions use_instructions",
    "middleware": "MemoryMiddleware",
    "model_call": "ModelCall",
    "model_extractor": "ModelExtractor",
    "nodes": "view",
    "profile": "Profile",
    "quarantine": "Quarantine",
    "recall": "arecall recall",
    "recall_check": "acheck_recall check_recall",
    "records": "Candidate Memory Outcome Verdict",
    "reducers": "ChatState Keep keepable messages",
    "summary": "SummaryState summarize",
    "tokens": "context_window count_tokens token_counter",
    "tool_outputs": "aexpand clear_tool_outputs expand",
    "tools": "manage_memory search_memory",
    "trim": "trim",
    "turns": "TurnExtractor",
    "update_instructions": "update_instructions",
    "update_profile": "update_profile",
    "use_memories": "use_memories",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}


class _Package(ModuleType):
    """A package in which `recall` is the function, although a module of it has that name."""

    def __getattr__(self, name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module 'perdure.memory' has no attribute {name!r}")
        found = getattr(import_module(f"perdure.memory.{_PLACES[name]}"), name)
        super().__setattr__(name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # the import system sets each module that is imported
        if not (name in _PLACES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Package
