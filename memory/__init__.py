"""Memory of agents: what to show the model, what to keep in the state, what to know next time."""

from perdure.memory.assembling import Assembly, assemble, assembled
from perdure.memory.background import Background
from perdure.memory.clearing import clear_tool_outputs
from perdure.memory.collection.collection import Collection
from perdure.memory.collection.episodes import Example, as_section
from perdure.memory.collection.examples import Examples
from perdure.memory.collection.selector import ExampleSelector
from perdure.memory.collection.tools import manage_memory, search_memory
from perdure.memory.counting import context_window, count_tokens, token_counter
from perdure.memory.due import Job, Pace
from perdure.memory.expanding import aexpand, expand
from perdure.memory.extraction import Extraction, ExtractionReport
from perdure.memory.gate import Gate
from perdure.memory.instructions import Instructions, InstructionsVersion, use_instructions
from perdure.memory.model_extractor import ModelExtractor
from perdure.memory.packing import PartReport
from perdure.memory.profile import Profile, ProfileVersion
from perdure.memory.proposals import Usage
from perdure.memory.quarantine import Quarantine
from perdure.memory.recollection.check_reports import CheckReport
from perdure.memory.recollection.checks import acheck, any_of, check
from perdure.memory.recollection.recall import Recollection, arecall, recall
from perdure.memory.recollection.recalling import use_memories
from perdure.memory.records import Candidate, Memory, Outcome, Previous, Verdict
from perdure.memory.reducers import ChatState, Keep, keepable, message_reducer, messages
from perdure.memory.remember_turns import remember_turns
from perdure.memory.summary import Summary, SummaryState, summarize
from perdure.memory.tokens import TokenCounter
from perdure.memory.trim import trim
from perdure.memory.turns import TurnExtractor
from perdure.memory.update_instructions import update_instructions
from perdure.memory.update_profile import ProfileUpdate, update_profile
from perdure.memory.view import view

__all__ = [
    "Assembly",
    "Background",
    "Candidate",
    "ChatState",
    "CheckReport",
    "Collection",
    "Example",
    "ExampleSelector",
    "Examples",
    "Extraction",
    "ExtractionReport",
    "Gate",
    "Instructions",
    "InstructionsVersion",
    "Job",
    "Keep",
    "Memory",
    "ModelExtractor",
    "Outcome",
    "Pace",
    "PartReport",
    "Previous",
    "Profile",
    "ProfileUpdate",
    "ProfileVersion",
    "Quarantine",
    "Recollection",
    "Summary",
    "SummaryState",
    "TokenCounter",
    "TurnExtractor",
    "Usage",
    "Verdict",
    "acheck",
    "aexpand",
    "any_of",
    "arecall",
    "as_section",
    "assemble",
    "assembled",
    "check",
    "clear_tool_outputs",
    "context_window",
    "count_tokens",
    "expand",
    "keepable",
    "manage_memory",
    "message_reducer",
    "messages",
    "recall",
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
