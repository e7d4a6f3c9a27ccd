"""The documented import path of public names in `memory/long_term/collection.py`."""

from perdure.memory.long_term.collection import Collection as Collection
from perdure.memory.long_term.collection import Quarantine as Quarantine
