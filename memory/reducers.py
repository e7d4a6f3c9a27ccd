"""Re-export the public names that are defined in `memory/short_term/reducers.py`.

Applications should import these names from this module, `perdure.memory.reducers`.
"""

from perdure.memory.short_term.reducers import ChatState as ChatState
from perdure.memory.short_term.reducers import Keep as Keep
from perdure.memory.short_term.reducers import append_new as append_new
from perdure.memory.short_term.reducers import keepable as keepable
from perdure.memory.short_term.reducers import messages as messages
