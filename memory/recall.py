"""The documented import path of public names in `memory/long_term/recall.py`."""

from perdure.memory.long_term.recall import check_recall as check_recall
from perdure.memory.long_term.recall import recall as recall
