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

RUNS_MAX = 1000
"""Number of runs whose numbers are remembered."""

_numbers: dict[str, int] = {}
_NOTHING: Mapping[str, object] = MappingProxyType({})
_about: ContextVar[Mapping[str, object]] = ContextVar("atoll_log_fields", default=_NOTHING)


@contextmanager
def about(**fields: object) -> Iterator[None]:
    """Add the given fields to all lines logged in the block and by tasks and threads started there; see `FIELDS`."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def context_about(**fields: object) -> Context:
    """Return a copy of the current context, with the given fields for all lines of a task that runs in it."""
    context = copy_context()
    context.run(_about.set, {**_about.get(), **fields})
    return context


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a record that is being logged, without those that have no value."""
    around = _about.get()
    found = {name: record.__dict__.get(name, around.get(name)) for name in FIELDS}
    return {name: value for name, value in found.items() if value not in (None, "")}


def note_run(run_id: str, number: int) -> None:
    """Remember a run's number, from which the ids of its traces follow; 0: it is not known."""
    if number:
        _numbers[run_id] = number
        if len(_numbers) > RUNS_MAX:
            del _numbers[next(iter(_numbers))]


def number_of(run_id: str) -> int:
    """Return the remembered number of a run; 0: it is not known."""
    return _numbers.get(run_id, 0)


def trace_of(fields: Mapping[str, object]) -> dict[str, str]:
    """Return `trace_id` and `span_id` of a line about a round, of a site's part in it if it names one.

    Args:
        fields: the fields of the line, `site` of a site's process included.
    """
    run_id, round_id = str(fields.get("run", "")), fields.get("round")
    if not isinstance(round_id, int) or (number := _numbers.get(run_id)) is None:
        return {}
    from atoll.protocol.trace_ids import (
        INVITATION,
        ROUND,
        span_id,
        trace_id,
    )  # a command that computes nothing has none

    place, client = (number, run_id, round_id), str(fields.get("site", ""))
    span = span_id(*place, INVITATION, client) if client else span_id(*place, ROUND)
    return {"trace_id": f"{trace_id(*place):032x}", "span_id": f"{span:016x}"}
