"""The documented import path of public names in `memory/long_term/model_extractor.py`."""

from perdure.memory.long_term.model_extractor import ModelAnswer as ModelAnswer
from perdure.memory.long_term.model_extractor import ModelExtractor as ModelExtractor
