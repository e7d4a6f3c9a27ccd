"""Short-term memory: what to show the model, what to keep in the state."""

from perdure.memory.assembling import Assembly, assemble, assembled
from perdure.memory.clearing import clear_tool_outputs
from perdure.memory.counting import context_window, count_tokens, token_counter
from perdure.memory.expanding import aexpand, expand
from perdure.memory.instructions import Instructions, InstructionsVersion
from perdure.memory.packing import PartReport
from perdure.memory.presenting import Summary
from perdure.memory.reducers import ChatState, Keep, keepable, message_reducer, messages
from perdure.memory.summarize import SummaryState, summarize
from perdure.memory.tokens import TokenCounter
from perdure.memory.trim import trim
from perdure.memory.update_instructions import update_instructions
from perdure.memory.use_instructions import use_instructions
from perdure.memory.view import view

__all__ = [
    "Assembly",
    "ChatState",
    "Instructions",
    "InstructionsVersion",
    "Keep",
    "PartReport",
    "Summary",
    "SummaryState",
    "TokenCounter",
    "aexpand",
    "assemble",
    "assembled",
    "clear_tool_outputs",
    "context_window",
    "count_tokens",
    "expand",
    "keepable",
    "message_reducer",
    "messages",
    "summarize",
    "token_counter",
    "trim",
    "update_instructions",
    "use_instructions",
    "view",
]
