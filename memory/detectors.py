"""The documented import path of public names in `memory/long_term/detectors.py`."""

from perdure.memory.long_term.detectors import DETECTORS as DETECTORS
from perdure.memory.long_term.detectors import phone_numbers as phone_numbers
