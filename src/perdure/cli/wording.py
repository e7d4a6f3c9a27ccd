"""Errors in the words of the command line: the library's speak of calls and arguments."""

from __future__ import annotations

import re
from typing import Final

from perdure.errors import PerdureError

_IN_COMMANDS: Final = (
    (r"\bthreads\(\) lists them", "'perdure threads' lists them"),
    (r"\bcheckpoints\(\) lists them", "'perdure show' lists them"),
    (r"\bpass key= or set PERDURE_KEY", "set PERDURE_KEY"),
    (r": open it without one, or make", ": unset PERDURE_KEY, or make"),
    (r"open a new file and call import_from\(\) on it", "take it over with 'perdure import'"),
    (r", or open an existing database with read_only=True", ""),
    (r"; open it once for writing", "; 'perdure chat' or 'perdure import' begins it"),
    (r"\bit begins with b(['\"]).*\1$", "expected a file that perdure made"),
    (r"\bthread_id is empty; pass a non-empty string", "the thread id is empty; give it a name"),
    (r"\bcopy to a new thread_id", "copy to another id"),
    (r"\blimit is (?=-?\d)", "--limit is "),
    (r"\bretention (last|days)(?:=| is )", r"--\1 is "),
    (r"the retention rule is empty; .*", "no rule is given; give --last, --days or --turns"),
    (r"^(ttl|mode|offset|position|budget|minimum|query|database) is ", r"--\1 is "),
    (r"^delay_s is ", "--delay is "),
    (r"^cron='(.*)' with timezone=(\S+) is ", r"--cron '\1' with --timezone \2 is "),
    (r"^max_depth is ", "--max-depth is "),
    (r"\bif_version is ", "--if-version is "),
    (r"(expected (more than zero|1 or more)), or None$", r"\1"),
    (r", like \('memories',\)$", ", like memories"),
    (r"it names no namespace, and none was given", "it names no namespace; give --namespace"),
    (r"\bwhat export\(\) writes", "what 'perdure store export' writes"),
    (
        r"open the store with that embedder, or call reembed\(\) to",
        "use it from Python with that one, search with --mode text, or let 'perdure store reembed'",
    ),
    (
        r"with export\(\) and import_lines\(\), or .*",
        "with 'perdure store export' and 'perdure store import'",
    ),
    (r"open the checkpointer with allow=.*", "read it from Python with allow=[...]"),
)


def worded(error: PerdureError) -> str:
    """What an error says, in commands and options.

    >>> from perdure.errors import UnknownThread
    >>> worded(UnknownThread("there is no thread 'x'; threads() lists them"))
    "there is no thread 'x'; 'perdure threads' lists them"
    """
    text = str(error)
    for python, command in _IN_COMMANDS:
        text = re.sub(python, command, text)
    return text
