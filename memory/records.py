"""The documented import path of public names in `memory/long_term/records.py`."""

from perdure.memory.long_term.records import Candidate as Candidate
from perdure.memory.long_term.records import Memory as Memory
from perdure.memory.long_term.records import Verdict as Verdict
