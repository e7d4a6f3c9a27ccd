"""Memory of agents: what to show the model, what to keep in the state, what to know next time."""

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
from perdure.memory.due import Job, Pace
from perdure.memory.examples import Example, ExampleSelector
from perdure.memory.extraction import Extraction, ExtractionReport
from perdure.memory.forming.answers import Episode
from perdure.memory.gate import Gate
from perdure.memory.instructions import Instructions, InstructionsVersion, use_instructions
from perdure.memory.model_call import ModelCall
from perdure.memory.model_extractor import ModelExtractor
from perdure.memory.profile.past import ProfileVersion
from perdure.memory.profile.profile import Profile
from perdure.memory.profile.update_profile import ProfileUpdate, update_profile
from perdure.memory.proposals import Usage
from perdure.memory.quarantine import Quarantine
from perdure.memory.recall import RecallResult, arecall, recall
from perdure.memory.recall_check import RecallReport, acheck_recall, check_recall
from perdure.memory.records import Candidate, Memory, Outcome, Previous, Verdict
from perdure.memory.reducers import ChatState, Keep, keepable, messages
from perdure.memory.remember_turns import remember_turns
from perdure.memory.summary import Summary, SummaryState, summarize
from perdure.memory.tokens import TokenCounter, context_window, count_tokens, token_counter
from perdure.memory.tool_outputs import aexpand, clear_tool_outputs, expand
from perdure.memory.tools import manage_memory, search_memory
from perdure.memory.trim import trim
from perdure.memory.turns import TurnExtractor
from perdure.memory.update_instructions import update_instructions
from perdure.memory.use_memories import use_memories
from perdure.memory.view import view

__all__ = [
    "Background",
    "Candidate",
    "ChatState",
    "Collection",
    "Episode",
    "Example",
    "ExampleSelector",
    "Extraction",
    "ExtractionReport",
    "Gate",
    "Instructions",
    "InstructionsVersion",
    "Job",
    "Keep",
    "Memory",
    "ModelCall",
    "ModelExtractor",
    "Outcome",
    "Pace",
    "Previous",
    "Profile",
    "ProfileUpdate",
    "ProfileVersion",
    "Quarantine",
    "RecallReport",
    "RecallResult",
    "Summary",
    "SummaryState",
    "TokenCounter",
    "TurnExtractor",
    "Usage",
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
