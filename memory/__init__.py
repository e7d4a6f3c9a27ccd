"""Memory for agents: trimming and summaries within a conversation, memories across conversations.

Public names are imported lazily, on first use. A program that imports only `trim` from this package
loads neither a store nor a queue.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.checkpointers.records import VIEWS_NAMESPACE as VIEWS_NAMESPACE
    from perdure.memory.background import Background as Background
    from perdure.memory.collection import Collection as Collection
    from perdure.memory.collection import Quarantine as Quarantine
    from perdure.memory.collection import aforget as aforget
    from perdure.memory.collection import amemories as amemories
    from perdure.memory.collection import aremember as aremember
    from perdure.memory.collection import forget as forget
    from perdure.memory.collection import memories as memories
    from perdure.memory.collection import remember as remember
    from perdure.memory.context import assemble as assemble
    from perdure.memory.context import use_memories as use_memories
    from perdure.memory.extraction import Extraction as Extraction
    from perdure.memory.extraction import remember_turns as remember_turns
    from perdure.memory.gate import Gate as Gate
    from perdure.memory.instructions import Instructions as Instructions
    from perdure.memory.instructions import update_instructions as update_instructions
    from perdure.memory.instructions import use_instructions as use_instructions
    from perdure.memory.middleware import MemoryMiddleware as MemoryMiddleware
    from perdure.memory.model_extractor import ModelExtractor as ModelExtractor
    from perdure.memory.nodes import view as view
    from perdure.memory.profile import Profile as Profile
    from perdure.memory.read_tool_output import read_tool_output as read_tool_output
    from perdure.memory.recall import arecall as arecall
    from perdure.memory.recall import recall as recall
    from perdure.memory.records import Memory as Memory
    from perdure.memory.reducers import ChatState as ChatState
    from perdure.memory.reducers import Keep as Keep
    from perdure.memory.reducers import append_new as append_new
    from perdure.memory.reducers import messages as messages
    from perdure.memory.summary import SummaryState as SummaryState
    from perdure.memory.summary import summarize as summarize
    from perdure.memory.thread_search import asearch_threads as asearch_threads
    from perdure.memory.thread_search import search_threads as search_threads
    from perdure.memory.tokens import token_counter as token_counter
    from perdure.memory.tool_outputs import aexpand as aexpand
    from perdure.memory.tool_outputs import clear_tool_outputs as clear_tool_outputs
    from perdure.memory.tool_outputs import expand as expand
    from perdure.memory.tools import manage_memory as manage_memory
    from perdure.memory.tools import quote_memories as quote_memories
    from perdure.memory.tools import search_memory as search_memory
    from perdure.memory.trim import trim as trim
    from perdure.memory.update_profile import update_profile as update_profile
    from perdure.memory.views import ModelView as ModelView
    from perdure.memory.views import aviews as aviews
    from perdure.memory.views import record_views as record_views
    from perdure.memory.views import views as views

_MODULES = {
    "background": "Background",
    "collection": "Collection Quarantine aforget amemories aremember forget memories remember",
    "context": "assemble use_memories",
    "extraction": "Extraction remember_turns",
    "gate": "Gate",
    "instructions": "Instructions update_instructions use_instructions",
    "middleware": "MemoryMiddleware",
    "model_extractor": "ModelExtractor",
    "nodes": "view",
    "profile": "Profile",
    "read_tool_output": "read_tool_output",
    "recall": "arecall recall",
    "records": "Memory",
    "reducers": "ChatState Keep append_new messages",
    "summary": "SummaryState summarize",
    "thread_search": "asearch_threads search_threads",
    "tokens": "token_counter",
    "tool_outputs": "aexpand clear_tool_outputs expand",
    "tools": "manage_memory quote_memories search_memory",
    "trim": "trim",
    "update_profile": "update_profile",
    "views": "VIEWS_NAMESPACE ModelView aviews record_views views",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
# Maps each module with an optional dependency to the package that it requires. If the package is
# not installed, the module's names are left out of `__all__`.
_REQUIRED_PACKAGES = {"background": "dbos", "middleware": "langchain"}
_UNAVAILABLE = {
    module for module, package in _REQUIRED_PACKAGES.items() if find_spec(package) is None
}
__all__ = sorted(name for name, module in _MODULE_OF.items() if module not in _UNAVAILABLE)


class _Package(ModuleType):
    """The class of the `perdure.memory` module object, which imports public names lazily.

    It also ensures that `perdure.memory.recall` is always the function `recall`, not the submodule
    with the same name.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'perdure.memory' has no attribute {name!r}")
        value = getattr(import_module(f"perdure.memory.{_MODULE_OF[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # When a submodule is imported, Python sets it as an attribute of its package. Ignore the
        # assignment if the submodule would hide a function with the same name.
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Package
