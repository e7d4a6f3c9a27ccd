"""The documented import path of public names in `memory/long_term/extractors.py`."""

from perdure.memory.long_term.extractors import Extractor as Extractor
from perdure.memory.long_term.extractors import TurnExtractor as TurnExtractor
