"""Re-export the public names that are defined in `memory/long_term/extraction.py`.

Applications should import these names from this module, `perdure.memory.extraction`.
"""

from perdure.memory.long_term.extraction import Extraction as Extraction
from perdure.memory.long_term.extraction import Pace as Pace
from perdure.memory.long_term.extraction import remember_turns as remember_turns
