"""The documented import path of public names in `memory/short_term/tokens.py`."""

from perdure.memory.short_term.tokens import count_tokens as count_tokens
from perdure.memory.short_term.tokens import token_counter as token_counter
