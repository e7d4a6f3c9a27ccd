"""Re-export public names that are defined in `server/http/keys.py`.

The module path `perdure.server.keys` is the public import path of these names.
"""

from perdure.server.http.keys import KeysFileAccess as KeysFileAccess
