"""The command line: thin commands over the calls that users make from Python."""

from __future__ import annotations

import sys

from perdure.cli import (  # noqa: F401 - they add their commands
    chat,
    checking,
    forgetting,
    memories,
    quarantine,
    recalling,
    remembering,
    store_items,
    store_removing,
    store_transfer,
    store_upkeep,
    store_why,
    surgery,
    threads,
    transfer,
    working,
)
from perdure.cli.app import app
from perdure.cli.wording import worded
from perdure.errors import PerdureError


def main() -> None:
    """Run a command. An error of perdure's is one line on stderr and exit code 2."""
    try:
        app()
    except PerdureError as exc:
        print(f"perdure: {worded(exc)}", file=sys.stderr)
        raise SystemExit(2) from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
