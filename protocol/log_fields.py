"""The run, the round and the site that log lines are about, for programs that read the log.

A line has the fields of the work that logs it; the line's `extra` (see `logging`) takes precedence.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from types import MappingProxyType

FIELDS = ("site", "run", "round")
"""Names of the fields, in the order in which a line has them."""

_NOTHING: Mapping[str, object] = MappingProxyType({})
_about: ContextVar[Mapping[str, object]] = ContextVar("atoll_log_fields", default=_NOTHING)


@contextmanager
def about(**fields: object) -> Iterator[None]:
    """Give these fields to all lines logged in the block and by the tasks and threads started there; see `FIELDS`."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def context_about(**fields: object) -> Context:
    """Return a copy of the current context for a task whose lines all have these fields."""
    context = copy_context()
    context.run(_about.set, {**_about.get(), **fields})
    return context


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a record that is being logged, without those that have no value."""
    around = _about.get()
    found = {name: record.__dict__.get(name, around.get(name)) for name in FIELDS}
    return {name: value for name, value in found.items() if value not in (None, "")}
