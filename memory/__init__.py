"""Memory for agents: trimming and summaries within a conversation, memories across conversations.

Public names are imported lazily, on first use. Importing only `trim` from this package does not
import the modules for stores and for the job queue.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.checkpointers.records import VIEWS_NAMESPACE as VIEWS_NAMESPACE
    from perdure.memory.context import assemble as assemble
    from perdure.memory.context import use_memories as use_memories
    from perdure.memory.long_term.background import Background as Background
    from perdure.memory.long_term.collection import Collection as Collection
    from perdure.memory.long_term.collection import Quarantine as Quarantine
    from perdure.memory.long_term.collection import aforget as aforget
    from perdure.memory.long_term.collection import amemories as amemories
    from perdure.memory.long_term.collection import aremember as aremember
    from perdure.memory.long_term.collection import forget as forget
    from perdure.memory.long_term.collection import memories as memories
    from perdure.memory.long_term.collection import remember as remember
    from perdure.memory.long_term.extraction import Extraction as Extraction
    from perdure.memory.long_term.extraction import remember_turns as remember_turns
    from perdure.memory.long_term.gate import Gate as Gate
    from perdure.memory.long_term.instructions import Instructions as Instructions
    from perdure.memory.long_term.instructions import update_instructions as update_instructions
    from perdure.memory.long_term.instructions import use_instructions as use_instructions
    from perdure.memory.long_term.model_extractor import ModelExtractor as ModelExtractor
    from perdure.memory.long_term.profile import Profile as Profile
    from perdure.memory.long_term.recall import arecall as arecall
    from perdure.memory.long_term.recall import recall as recall
    from perdure.memory.long_term.records import Memory as Memory
    from perdure.memory.long_term.tools import manage_memory as manage_memory
    from perdure.memory.long_term.tools import quote_memories as quote_memories
    from perdure.memory.long_term.tools import search_memory as search_memory
    from perdure.memory.long_term.update_profile import update_profile as update_profile
    from perdure.memory.middleware import MemoryMiddleware as MemoryMiddleware
    from perdure.memory.nodes import view as view
    from perdure.memory.read_tool_output import read_tool_output as read_tool_output
    from perdure.memory.short_term.reducers import ChatState as ChatState
    from perdure.memory.short_term.reducers import Keep as Keep
    from perdure.memory.short_term.reducers import append_new as append_new
    from perdure.memory.short_term.reducers import messages as messages
    from perdure.memory.short_term.summary import SummaryState as SummaryState
    from perdure.memory.short_term.summary import summarize as summarize
    from perdure.memory.short_term.tokens import token_counter as token_counter
    from perdure.memory.short_term.tool_outputs import aexpand as aexpand
    from perdure.memory.short_term.tool_outputs import clear_tool_outputs as clear_tool_outputs
    from perdure.memory.short_term.tool_outputs import expand as expand
    from perdure.memory.short_term.trim import trim as trim
    from perdure.memory.short_term.views import ModelView as ModelView
    from perdure.memory.short_term.views import aviews as aviews
    from perdure.memory.short_term.views import record_views as record_views
    from perdure.memory.short_term.views import views as views
    from perdure.memory.thread_search import asearch_threads as asearch_threads
    from perdure.memory.thread_search import search_threads as search_threads

_MODULES = {
    "long_term.background": "Background",
    "long_term.collection": (
        "Collection Quarantine aforget amemories aremember forget memories remember"
    ),
    "context": "assemble use_memories",
    "long_term.extraction": "Extraction remember_turns",
    "long_term.gate": "Gate",
    "long_term.instructions": "Instructions update_instructions use_instructions",
    "middleware": "MemoryMiddleware",
    "long_term.model_extractor": "ModelExtractor",
    "nodes": "view",
    "long_term.profile": "Profile",
    "read_tool_output": "read_tool_output",
    "long_term.recall": "arecall recall",
    "long_term.records": "Memory",
    "short_term.reducers": "ChatState Keep append_new messages",
    "short_term.summary": "SummaryState summarize",
    "thread_search": "asearch_threads search_threads",
    "short_term.tokens": "token_counter",
    "short_term.tool_outputs": "aexpand clear_tool_outputs expand",
    "long_term.tools": "manage_memory quote_memories search_memory",
    "short_term.trim": "trim",
    "long_term.update_profile": "update_profile",
    "short_term.views": "VIEWS_NAMESPACE ModelView aviews record_views views",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
# Maps each module with an optional dependency to the package that it requires. If the package is
# not installed, the module's names are left out of `__all__`.
_REQUIRED_PACKAGES = {"long_term.background": "dbos", "middleware": "langchain"}
_UNAVAILABLE = {
    module for module, package in _REQUIRED_PACKAGES.items() if find_spec(package) is None
}
__all__ = sorted(name for name, module in _MODULE_OF.items() if module not in _UNAVAILABLE)


class _Package(ModuleType):
    """The class of the `perdure.memory` module object, which imports public names lazily.

    This class also ensures that `perdure.memory.recall` is always the function `recall`, not the
    submodule with the same name.
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
