"""The items that a follower of a run yields, and their JSON form. Pure values."""

from typing import Any

from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import RoundId, RunId, RunState, Version
from atoll.server.exchanges.events import Event as EventOfMessages
from atoll.server.rounds.events import Event, UpdateReceived

Document = dict[str, Any]


@value
class Standing:
    """State of a run: what `atoll run show` prints first."""

    run: RunId
    state: RunState
    cause: str
    version: Version
    rounds: int
    next_round: RoundId
    open_round: RoundId | None
    exchanges: int | None = None
    """Number of exchanges so far in a run of messages, which has these instead of rounds."""


@value
class Began:
    """Position at which following begins, or continues after a jump: the run after the entry `seq`."""

    seq: int
    at: float
    run: Standing


@value
class Happened:
    """Event of the run, with everything that an operator may want to know. Its number is the reader's cursor."""

    seq: int
    at: float
    event: Event | EventOfMessages
    lines: tuple[str, ...]
    """The lines of the coordinator's log."""
    records: tuple[Document, ...]
    """Record of each round that the event has ended, or amended after its end."""
    run: Standing | None
    """The state of the run, if the event has changed it."""


@value
class OpenRound:
    """Record of the open round or exchange after the entry `seq`. Only the newest one of each counts."""

    seq: int
    at: float
    record: Document


@value
class Jumped:
    """Entries missing in the journal: after the entry `after`, the items continue with the state after `seq`."""

    after: int
    seq: int
    why: str


@value
class Waiting:
    """Reason why no entry can arrive now; empty: it has passed."""

    why: str


Item = Began | Happened | OpenRound | Jumped | Waiting

KINDS = {Began: "began", Happened: "event", OpenRound: "record", Jumped: "jumped", Waiting: "waiting"}
"""Values of `kind` in JSON."""


def document_of(item: Item) -> Document:
    """Return an item as an object of JSON types; for an event its name, and the client, round and version it names.

    The sums of metrics in an event are omitted: a site's policy decides about these.
    """
    found: Document = {"kind": KINDS[type(item)]}
    for name in type(item).__dataclass_fields__:
        part = getattr(item, name)
        if isinstance(item, Happened) and name == "event":
            found |= _document_of_event(item.event)
        else:
            found[name] = _plain(part)
    return found


def _plain(part: Any) -> Any:
    if isinstance(part, Standing):
        return {name: getattr(part, name) for name in Standing.__dataclass_fields__}
    return list(part) if isinstance(part, tuple) else part


def _document_of_event(event: Event | EventOfMessages) -> Document:
    about = event.update if isinstance(event, UpdateReceived) else event
    names = {"client": "client_id", "round": "round_id", "version": "version"}
    known = {key: getattr(about, name) for key, name in names.items() if hasattr(about, name)}
    return {"event": type(event).__name__, **known}
