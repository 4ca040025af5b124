"""What the sides of a secure sum send each other, with valid messages of three members to begin from.

A target reads, and hands what it has read to the machine that gets it: the member or the session in each of its stages.
"""

import base64
import copy
import json
import random
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from atoll.client.policy.promise_store import PromiseStore
from atoll.client.secure import member
from atoll.client.secure.member import KeepPromise, Mask, Member, MemberRules, Send
from atoll.client.secure.promises import Kind, PeerChains, Promises, extended, promise_of
from atoll.client.session.agreed_terms import fault_of_terms
from atoll.client.session.events import Asked, StatisticsRequest
from atoll.client.wire.messages import event_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import read_leaf
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.manifest import parse_update
from atoll.protocol.part_manifest import parse_part
from atoll.protocol.secure import boxes, wire
from atoll.protocol.secure.messages import (
    Boxes,
    Gone,
    MaskedWords,
    MemberKeys,
    Opening,
    Roster,
    SiteIdentity,
    Survivors,
)
from atoll.protocol.secure.shamir import SHARE_BYTES
from atoll.protocol.secure.site_key import check_certified, is_signed
from atoll.protocol.secure.terms import data_digest, ranges_digest, read_terms
from atoll.server.folding.sums import expected_layout, faults_of_words
from atoll.server.rounds.secure_rules import SecureRules
from atoll.server.sessions.session import Session
from atoll.tensors.layout import Piece, Tensor, in_order
from atoll.tensors.masked.whole_numbers import encode_numbers, opened_numbers
from atoll.tensors.secure.exact import decode_exact, encode_exact
from atoll.tensors.secure.masked_layout import MetricShape, exact_of
from atoll.tensors.secure.vector import Fill
from atoll.training.statistics.question import Question, numbers_of, read_question, summed_parts
from tests.fuzz.make_corpus import NOW, PATH
from tests.server.sessions.small_federation import terms_of

TERMS = terms_of(metrics=(("loss", 2),), receivers=(0, 3))
OF = wire.SessionName("digits-1", 1, 1, 0)
NAMES = ("east", "north", "south")
AUTHORITY = base64.b64decode(json.loads(PATH.read_text())["authority"][0])


class _Session:
    """A session of three members whose keys are the same in each process, kept before each question."""

    def __init__(self) -> None:
        draw = random.Random("fuzz")  # what the operating system draws elsewhere
        key = type("Key", (), {"generate": lambda: X25519PrivateKey.from_private_bytes(draw.randbytes(32))})
        with patch("secrets.token_bytes", draw.randbytes), patch("secrets.randbelow", draw.randrange):
            with patch.object(member, "X25519PrivateKey", key):
                self._set_up(draw)

    def _set_up(self, draw: random.Random) -> None:
        keys = [Ed25519PrivateKey.from_private_bytes(draw.randbytes(32)) for _ in NAMES]
        self.members = [_member(name, key) for name, key in zip(NAMES, keys, strict=True)]
        self.answers: list[bytes] = []
        self.questions: list[bytes] = []
        self.stages: list[Member] = []
        self.sessions: list[Session] = []
        self._play()

    def _play(self) -> None:
        sent = [self._said(each.start()) for each in self.members]
        roster = Roster(TERMS.threshold_of(3), tuple(sent))
        session = Session(roster, TERMS.digest)
        session.start()
        sealed = self._asked([roster] * 3)
        opened = [Boxes({at: each.boxes[to] for at, each in enumerate(sealed) if at != to}) for to in range(3)]
        self._keep(session, sealed)
        self._asked(opened)
        for position in range(3):
            session.masked(position)
        agreed = self._asked([Survivors(frozenset(range(3)))] * 3)
        self._keep(session, agreed)
        reveals = self._asked([Opening({at: each.signature for at, each in enumerate(agreed)})] * 3)
        self._keep(session, reveals)
        masked = MaskedWords(bytes(range(64)))
        for answer in (sent[0], sealed[0], masked, agreed[0], reveals[0], Gone("session_lost: it was restarted")):
            self.answers.append(wire.answer_message(OF, answer).SerializeToString())

    def _keep(self, session: Session, answers: list[Any]) -> None:
        self.sessions.append(_copied(session))
        for position, answer in enumerate(answers):
            session.answered(position, answer)

    def _asked(self, questions: list[Any]) -> list[Any]:
        self.stages.append(_copied(self.members[0]))
        self.questions.append(wire.question_message(OF, questions[0], 3).SerializeToString())
        return [self._said(each.ask(asked)) for each, asked in zip(self.members, questions, strict=True)]

    @staticmethod
    def _said(effects: list[Any]) -> Any:
        return next((effect.message for effect in effects if isinstance(effect, Send)), None)


def _trusted(keys: MemberKeys) -> None:
    if keys.name not in NAMES:
        raise NotTrusted(f"{keys.name} is not pinned")


def _member(name: str, key: Ed25519PrivateKey) -> Member:
    site = SiteIdentity(key.public_key().public_bytes_raw(), b"certificate", b"certification")
    state = {"promises": Promises(2), "peers": PeerChains(), "trust": _trusted}
    return Member(name, TERMS, MemberRules(2, 0), key=key, site=site, **state)


def _copied(machine: Any) -> Any:
    """Return a machine whose own collections are copies."""
    made = copy.copy(machine)
    for name, value in vars(machine).items():
        if isinstance(value, dict | set | list):
            setattr(made, name, value.copy())
    return made


PLAYED = _Session()


def answer(data: bytes) -> None:
    """Read a member's message, as the coordinator does, and hand it to the session in each stage."""
    message = pb.ClientMessage.FromString(data)
    if not wire.kind_of(message):
        raise wire.BadForm("another message")
    wire.name_of(message)
    read = wire.answer_of(message)
    assert wire.answer_from(wire.encoded(message)) == read
    for kept in PLAYED.sessions:
        session = _copied(kept)
        if isinstance(read, Gone):
            session.left(0, read.reason)
        elif isinstance(read, MaskedWords):
            session.masked(0)
        elif not isinstance(read, MemberKeys):
            session.answered(0, read)


def question(data: bytes) -> None:
    """Read the coordinator's message, as a member does, and ask the member in each stage."""
    message = pb.ServerMessage.FromString(data)
    wire.name_of(message) if wire.kind_of(message) else None
    for kept in PLAYED.stages:
        asked = _copied(kept)
        effects = asked.ask(wire.question_of(message, asked.num_members))
        assert all(isinstance(effect, Send | Mask | KeepPromise) for effect in effects)


# ---------------------------------------------------------------- boxes, counts, promises

_BOX_KEY = bytes(range(32))


def sealed(content: bytes) -> bytes:
    """Return the sealed box of a content that may be anything."""
    return AESGCM(_BOX_KEY).encrypt(boxes._NONCE, content, boxes._associated(bytes(32), 0, 1))


def box(data: bytes) -> None:
    """Open a box."""
    boxes.unseal(_BOX_KEY, data, bytes(32), 0, 1)


BOX_CONTENT = (5).to_bytes(SHARE_BYTES) + (2**256).to_bytes(SHARE_BYTES)

LAYOUT = in_order((Tensor("bias", "F32", (3,)), Tensor("steps", "I64", ()), Tensor("weight", "F32", (2, 3))))
_PLACES = exact_of(LAYOUT, (MetricShape("loss", 2),))


def counts(data: bytes) -> None:
    """Read the exact words of an opened sum of one member."""
    words = np.zeros(_PLACES.size, np.uint64)
    given = data[: words.nbytes]
    words.view(np.uint8)[: len(given)] = np.frombuffer(given, np.uint8)
    decode_exact(words, _PLACES, 1)


COUNTS = encode_exact(
    _PLACES,
    weight=2**50,
    is_within=True,
    fills=[Fill(1, 0.5), Fill(0, 0.25)],
    integers={"steps": np.array([7], np.int64)},
    statistics={"loss": (1.5, 2.0)},
).tobytes()


def keys(data: bytes) -> None:
    """Read a client's keys, and check whose they are, as the coordinator and each peer do."""
    read_leaf.cache_clear()
    message = pb.ClientMessage(secure_keys=pb.SecureKeys(keys=pb.MemberKeys.FromString(data)))
    read = wire.answer_of(message)
    assert isinstance(read, MemberKeys)
    if not is_signed(read.site.key, read.statement(), read.signature):
        raise NotTrusted("not signed")
    check_certified(read.site, read.name, AUTHORITY, NOW)


class BrokenChain(ValueError):
    """Promises that allow nothing."""


class _Rows:
    """The tables of a site's records with these rows of promises, of the types that a STRICT table allows."""

    path = "policy.db"

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self._rows = rows

    @contextmanager
    def faults(self) -> Any:
        yield

    def execute(self, statement: str) -> Any:
        rows = self._rows if " promises" in statement else [(bytes(32),)] if " site_key" in statement else []
        return _Cursor(rows)


class _Cursor(list):  # type: ignore[type-arg]
    def fetchone(self) -> Any:
        return self[0] if self else None

    def fetchall(self) -> Any:
        return self


def promises(data: bytes) -> None:
    """Read the rows of a site's promises, as its start does."""
    rows = [_row(each) for each in json.loads(data)]
    store = PromiseStore(_Rows(rows))  # type: ignore[arg-type]
    if store.fault:
        assert "nothing is allowed" in store.fault
        raise BrokenChain(store.fault)


def _row(row: list[Any]) -> tuple[Any, ...]:
    number, kind, run, purpose, *numbers, base, survivors, hash_ = row
    texts = [str(each) for each in (kind, run, purpose, base, survivors)]
    placed = [number, *numbers]
    if len(placed) != 4 or not all(type(each) is int and -(2**63) <= each < 2**63 for each in placed):
        raise ValueError("a STRICT table has no such row")
    return (placed[0], *texts[:3], *placed[1:], *texts[3:], bytes.fromhex(str(hash_)))


def _promised() -> bytes:
    made, rows = Promises(9), []
    for number, kind in enumerate((Kind.JOINED, Kind.SIGNED, Kind.JOINED), 1):
        promise = promise_of(kind, terms_of(round=number), "ab" * 32 if kind is Kind.SIGNED else "")
        end = extended(made.chain, promise)
        made.add(promise)
        where = [promise.run, promise.purpose, promise.round, promise.attempt, promise.session]
        rows.append([number, str(kind), *where, promise.base, promise.survivors, end.hash.hex()])
    return json.dumps(rows).encode()


PROMISES = _promised()

# ---------------------------------------------------------------- statistics

QUESTION = Question(
    ("train", "test"),
    labels=(("target", 3),),
    targets=(("dose", (-1.0, 0.5)),),
    features=(("age", (0.0, 40.0, 120.0)), ("income", (9e8, 1.1e9))),
    seed=2**63,
)
"""Layout of statistics that has each kind of part."""

_STATISTICS = terms_of(
    **{"run": "digits-statistics", "round": 5, "purpose": "statistics", "base": 0, "model": data_digest("t:task")},
    **{"task": "t:task", "algorithm": "", "layout": QUESTION.digest, "bits": 64, "ranges": ranges_digest(())},
)
_COLUMN = (1, 7, 1, 2, -(1 << 100), 1 << 110)
_OF_SPLIT = (1, 30, 1, 0, 5, 6, 7, 12, *_COLUMN, 1, 0, 7, *_COLUMN, 1, 0, 3, 4, *_COLUMN, 1, 2, 5)


class OtherTerms(ValueError):
    """Terms that are not those of their request."""


def layout(data: bytes) -> None:
    """Read a layout of statistics, and derive what a site and a coordinator derive from it."""
    read = read_question(data)
    assert read.text.encode() == data
    assert read.num_numbers == len(numbers_of({}, read))
    assert len(read.in_words()) < 10_000


def request(data: bytes) -> None:
    """Read a request for statistics, and hold its layout against its terms, as an agent does."""
    event = event_of(pb.ServerMessage(ask_statistics=pb.AskStatistics.FromString(data)))
    assert isinstance(event, Asked)
    assert isinstance(event.request, StatisticsRequest)
    if event.request.secure is not None and (fault := fault_of_terms(event.request, event.request.secure)):
        raise OtherTerms(fault)


REQUEST = pb.AskStatistics(
    **{"run_id": "digits-statistics", "number": 5, "task": "t:task", "time_left_s": 60.0, "local": _STATISTICS.local},
    **{"model_seed": QUESTION.seed, "question": QUESTION.text, "secure": pb.SecureTerms(terms=_STATISTICS.canonical())},
).SerializeToString()


def statistics(data: bytes) -> None:
    """Read the opened words of one member's statistics."""
    words = data[: len(STATISTICS)].ljust(len(STATISTICS), bytes(1))
    summed_parts(opened_numbers([words], (), QUESTION.num_numbers), QUESTION, 1)


STATISTICS = encode_numbers(_OF_SPLIT * len(QUESTION.splits))

# ---------------------------------------------------------------- terms, manifests


def canonical(data: bytes) -> bytes:
    """Return the one form of some JSON, if it is JSON."""
    try:
        return json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return data


def terms(data: bytes) -> None:
    """Read the terms of an invitation, and derive what is derived from them."""
    read = read_terms(data)
    assert read.canonical() == data
    assert len(read.digest) == len(read.approved) == 32
    assert read.threshold_of(read.members_max) >= 1


class WrongWords(ValueError):
    """Pieces that are no masked update."""


_EXPECTED = expected_layout(LAYOUT, SecureRules(1.0))
_SHA = "0" * 64


def masked(data: bytes) -> None:
    """Read the manifest of a masked update, or of a part of one, and compare it with the layout."""
    pieces = parse_update(data).pieces if b'"kind":"update"' in data else parse_part(data).pieces
    if faults := faults_of_words(_EXPECTED, pieces):
        raise WrongWords(faults[0])


def masked_pieces() -> tuple[Piece, ...]:
    """Return the pieces of a masked update."""
    return tuple(Piece(t.name, t.dtype, (0,) * len(t.shape), t.shape, _SHA) for t in _EXPECTED)
