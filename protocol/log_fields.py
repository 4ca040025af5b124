"""The run, the round and the site that lines of the log are about, for programs that read it.

A line has the fields of the work that logs it, and those that it names itself (`logging`'s `extra`), which come first.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from types import MappingProxyType

FIELDS = ("site", "run", "round")
"""The fields, in the order in which a line has them."""

_NOTHING: Mapping[str, object] = MappingProxyType({})
_about: ContextVar[Mapping[str, object]] = ContextVar("atoll_log_fields", default=_NOTHING)


@contextmanager
def about(**fields: object) -> Iterator[None]:
    """Give all lines that the block logs, and the tasks and threads that it begins, these fields; see `FIELDS`."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def context_about(**fields: object) -> Context:
    """Return a copy of the present context for a task all of whose lines have these fields."""
    context = copy_context()
    context.run(_about.set, {**_about.get(), **fields})
    return context


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a record that is logged at this moment; those without a value are left out."""
    around = _about.get()
    found = {name: record.__dict__.get(name, around.get(name)) for name in FIELDS}
    return {name: value for name, value in found.items() if value not in (None, "")}
