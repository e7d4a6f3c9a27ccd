"""Taking turns: changes of one namespace that were judged at the same time are not both written.

Two that say the same, each judged while the other was not there yet, would both be new. So each
change counts on a note of the namespace, under the condition that nobody else has counted since it
was judged. A store without versions cannot tell, and nothing is noted in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from perdure.memory.drivers import Steps
from perdure.memory.longterm.backing import RESERVED, Backing, put_of
from perdure.stores.base import Namespace, PutItem

CHANGED: Final = "changed"
_KEY: Final = "memories"


def taking_turns(backing: Backing, namespace: Namespace) -> Steps[list[PutItem]]:
    """What is to be written with a change that is judged after this.

    It makes the write a `VersionConflict` if another change came between: judge again then.
    """
    if not backing.versioned:
        return []
    place = (RESERVED, CHANGED, *namespace)
    note = yield from backing.got(place, _KEY)
    number = 0 if note is None else note.value["number"]
    version = 0 if note is None else note.version
    put = put_of(place, _KEY, {"number": number + 1}, if_version=version, searched=False)
    return [replace(put, ttl=None)]  # whatever the store's default, the count goes on
