"""Errors of the server's own."""

from perdure.errors import AlreadyLocked, PerdureError


class UnknownGraph(PerdureError):
    """No graph that is served has this name or assistant_id: HTTP 404."""


class UnknownRun(PerdureError):
    """The thread has no such run, or the server has forgotten it: HTTP 404."""


class ThreadBusy(AlreadyLocked):
    """A run is under way on the thread, and the request does not wait for it: HTTP 409."""
