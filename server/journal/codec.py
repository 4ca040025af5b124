"""The machines' values <-> JSON, for the journal, the snapshots and the records. Pure.

Exact: floats (also NaN and infinities), tuples, enums and integer keys come back as they were. Strict: a body with a
missing or unknown key, or a value of another type, is not read at all. A field with a default may be added to a value
without a new schema version; nothing else may change.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, SchemaSerializer

from atoll.protocol.manifest import parse_update
from atoll.protocol.vocabulary import ClientId
from atoll.server.errors import StoreCorrupted
from atoll.server.rounds.events import Event
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.member import Member
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.update_intake import RunRules

Value = TypeVar("Value")

_CONFIG = ConfigDict(ser_json_inf_nan="constants", extra="forbid", strict=True)
_PAGE: TypeAdapter[dict[ClientId, Member]] = TypeAdapter(dict[ClientId, Member], config=_CONFIG)
_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def encode_event(event: Event) -> tuple[str, str]:
    """The event's kind and its body."""
    return type(event).__name__, encode(event)


def decode_event(kind: str, body: str, *, where: str) -> Event:
    """Read an event back.

    Args:
        kind: as `encode_event` gave it.
        body: as `encode_event` gave it.
        where: what the error calls it, such as `run r, entry 7`.

    Raises:
        StoreCorrupted: no such kind, or the body is not one of that kind.
    """
    if kind not in _EVENTS:
        raise StoreCorrupted(f"{where}: unknown kind {kind!r}; known: {', '.join(sorted(_EVENTS))}")
    event: Event = decode(_EVENTS[kind], body, where)
    return event


def encode_ledger(ledger: Ledger) -> str:
    """The body of a snapshot."""
    return encode(ledger)


def decode_ledger(body: str, *, where: str) -> Ledger:
    """Read a ledger back; raises as `decode_event`."""
    return decode(Ledger, body, where)


def encode_ledger_without_members(ledger: Ledger) -> str:
    """The body of a snapshot whose members are on pages of their own."""
    return encode(replace(ledger, membership=replace(ledger.membership, members={})))


def encode_page(members: Mapping[ClientId, Member], names: Iterable[ClientId]) -> str:
    """A page of members; what a field is by default is left out."""
    return _PAGE.dump_json({name: members[name] for name in names}, exclude_defaults=True).decode()


def decode_page(body: str, *, where: str) -> dict[ClientId, Member]:
    """Read a page back; raises as `decode_event`."""
    try:
        return _PAGE.validate_json(body)
    except ValidationError as error:
        raise StoreCorrupted(f"{where}: not a page of members: {_first_fault(error, skipped=0)}") from error


def encode_record(record: RoundRecord) -> str:
    """The record as it is stored."""
    return encode(record)


def decode_record(body: str, *, where: str) -> RoundRecord:
    """Read a record back; raises as `decode_event`."""
    return decode(RoundRecord, body, where)


def encode_rules(rules: RunRules) -> str:
    """The rules as they are stored beside their run, so that its journal can be replayed by anyone."""
    return encode(rules)


def decode_rules(body: str, *, where: str) -> RunRules:
    """Read rules back; raises as `decode_event`."""
    return decode(RunRules, body, where)


@dataclass(frozen=True, slots=True)
class StoredUpdateMeta:
    """What is known of an accepted update besides its bytes."""

    manifest: bytes
    """Canonical, so ASCII: its SHA-256 is the update's digest."""
    magnitudes: Mapping[str, float | int]
    """Largest |element| of each tensor."""
    squared_norms: Mapping[str, float]
    """Sum of the squared elements of each tensor."""
    rank: int = 0
    """Of the aggregation, at which its bytes lie."""

    @property
    def steps(self) -> tuple[float, float]:
        """FedNova's normalizer and effective steps, as the manifest claims them."""
        manifest = parse_update(self.manifest)
        return manifest.normalizer, manifest.effective_steps

    @property
    def norm(self) -> float:
        """Euclidean norm of the whole update."""
        return math.sqrt(math.fsum(self.squared_norms.values()))


def encode_meta(meta: StoredUpdateMeta) -> str:
    """As it is stored."""
    return encode(meta)


def decode_meta(body: str, *, where: str) -> StoredUpdateMeta:
    """Read it back; raises as `decode_event`."""
    return decode(StoredUpdateMeta, body, where)


def lies_at(meta: str, rank: int) -> bool:
    """Whether what is stored of an update says that its bytes lie at this rank: its last field, read alone."""
    return meta.endswith(f'"rank":{rank}}}')


@cache
def _adapter(kind: Any) -> TypeAdapter[tuple[Any]]:
    """For a tuple of one: pydantic takes a config for that, and not for a bare dataclass."""
    one: Any = tuple[kind]
    return TypeAdapter(one, config=_CONFIG)


@cache
def _serializer(kind: Any) -> SchemaSerializer:
    """What the adapter would call, after it had looked at ten options."""
    return _adapter(kind).serializer


def encode(value: Any) -> str:
    """The JSON of a dataclass; ValueError when it holds what cannot be written down."""
    try:
        kind: Any = type(value)
        return _serializer(kind).to_json((value,))[1:-1].decode()
    except PydanticSerializationError as error:  # a lone surrogate: no text that came over the wire has one
        raise ValueError(f"{type(value).__name__} cannot be written down: {error}") from error


def decode(kind: type[Value], body: str, where: str) -> Value:
    """Read a dataclass of that kind back; raises as `decode_event`."""
    try:
        adapter = _adapter(cast(Any, kind))
        value: Value = adapter.validate_json(f"[{body}]")[0]
        return value
    except ValidationError as error:
        raise StoreCorrupted(f"{where}: not a {kind.__name__}: {_first_fault(error, skipped=1)}") from error


def _first_fault(error: ValidationError, *, skipped: int) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"][skipped:])
    return f"{path}: {first['msg']}" if path else first["msg"]
