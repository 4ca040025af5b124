"""The messages of a session on the control stream: from their values and back, with the checks of their form."""

from collections.abc import Collection, Iterable, Mapping

from atoll.ground.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.names import NAME_ALLOWED, is_name
from atoll.protocol.secure.messages import (
    BOX_BYTES,
    Agreement,
    Answer,
    Boxes,
    Chain,
    Gone,
    MaskedWords,
    MemberKeys,
    Opening,
    Position,
    Question,
    Reveal,
    Roster,
    SealedShares,
    SiteIdentity,
    Survivors,
    bitmap,
    positions_of,
)
from atoll.protocol.secure.session_size import MEMBERS_MAX
from atoll.protocol.secure.shamir import PRIME, SHARE_BYTES
from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import FailureReason, RoundId, RunId

DIGEST_BYTES = KEY_BYTES = 32
SIGNATURE_BYTES = 64
CERTIFICATE_BYTES_MAX = 16 * 1024
CERTIFICATION_BYTES_MAX = 128
COUNT_MAX = 2**53
"""Largest number of sessions of a site: every peer writes it into its database."""
DETAIL_MAX = 2000
WORD_BYTES = 8
WORDS_BYTES_MAX = WORD_BYTES * 2**16
"""Largest size of the masked words in a message [bytes]."""

_ANSWERS = ("secure_keys", "secure_shares", "secure_masked", "secure_agree", "secure_reveal", "secure_gone")
_QUESTIONS = ("secure_roster", "secure_boxes", "secure_survivors", "secure_opening")


class BadForm(ValueError):
    """Error: a message of a session has another form; the text names the field, its value and what is allowed."""


@value
class SessionName:
    """Name of a session: which attempt at which sum of a round, or of the evaluation of the version `round`."""

    run: RunId
    round: RoundId
    attempt: int
    session: int
    purpose: str = "update"


def kind_of(message: pb.ClientMessage | pb.ServerMessage) -> str:
    """Return the field of a session's message; empty: it is another message."""
    found = message.WhichOneof("message") or ""
    return found if found in _ANSWERS or found in _QUESTIONS else ""


def name_of(message: pb.ClientMessage | pb.ServerMessage) -> SessionName:
    """Return the session that a message belongs to."""
    of = getattr(message, kind_of(message)).of
    return SessionName(RunId(of.run_id), RoundId(of.round_id), of.attempt, of.session, of.purpose or "update")


# ---------------------------------------------------------------- a member's messages


_GONE = (FailureReason.SESSION_LOST, FailureReason.SESSION_REFUSED)
"""The reasons for which a member leaves, before the detail; a failed check has none, and is a refusal."""


def answer_message(of: SessionName, content: MemberKeys | Answer | MaskedWords | Gone) -> pb.ClientMessage:
    """Return a member's message."""
    name = _name(of)
    match content:
        case MemberKeys():
            return pb.ClientMessage(secure_keys=pb.SecureKeys(of=name, keys=_keys(content)))
        case SealedShares(boxes):
            return pb.ClientMessage(secure_shares=pb.SecureShares(of=name, boxes=_boxes(boxes)))
        case MaskedWords(words):
            return pb.ClientMessage(secure_masked=pb.SecureMasked(of=name, words=words))
        case Agreement(signature):
            return pb.ClientMessage(secure_agree=pb.SecureAgree(of=name, signature=signature))
        case Reveal(shares):
            encoded = [share.to_bytes(SHARE_BYTES) for share in shares]
            return pb.ClientMessage(secure_reveal=pb.SecureReveal(of=name, shares=encoded))
        case Gone(reason, refused):
            code, _, detail = reason.partition(": ")
            if code not in _GONE:
                code, detail = FailureReason.SESSION_REFUSED, reason
            gone = pb.SecureGone(of=name, reason=code, detail=detail[:DETAIL_MAX], refused=refused)
            return pb.ClientMessage(secure_gone=gone)


def answer_of(message: pb.ClientMessage) -> MemberKeys | Answer | MaskedWords | Gone:
    """Read a member's message.

    Raises:
        BadForm: it has another form.
    """
    match kind_of(message):
        case "secure_keys":
            return _read_keys(message.secure_keys.keys)
        case "secure_shares":
            return SealedShares(_read_boxes(message.secure_shares.boxes))
        case "secure_masked":
            return MaskedWords(_read_words(message.secure_masked.words))
        case "secure_agree":
            return Agreement(_sized(message.secure_agree.signature, "signature", SIGNATURE_BYTES))
        case "secure_reveal":
            return Reveal(_read_shares(message.secure_reveal.shares))
        case "secure_gone":
            gone = message.secure_gone
            reason = gone.reason if gone.reason in _GONE else FailureReason.SESSION_REFUSED
            return Gone(f"{reason}: {gone.detail[:DETAIL_MAX]}", _read_refused(gone.refused))
    raise BadForm("it is no message of a session")


def encoded(message: pb.ClientMessage) -> bytes:
    """Return a member's message as bytes, for the journal."""
    return message.SerializeToString(deterministic=True)


def answer_from(content: bytes) -> MemberKeys | Answer | MaskedWords | Gone:
    """Read a member's message from `encoded` bytes; raises the errors of `answer_of`."""
    message = pb.ClientMessage()
    message.ParseFromString(content)
    return answer_of(message)


# ---------------------------------------------------------------- the coordinator's messages


def question_message(of: SessionName, content: Question, members: int) -> pb.ServerMessage:
    """Return the coordinator's message to a member of a session of `members` members."""
    name = _name(of)
    match content:
        case Roster(threshold, keys):
            roster = pb.SecureRoster(of=name, threshold=threshold, members=[_keys(each) for each in keys])
            return pb.ServerMessage(secure_roster=roster)
        case Boxes(boxes):
            return pb.ServerMessage(secure_boxes=pb.SecureBoxes(of=name, boxes=_boxes(boxes)))
        case Survivors(positions):
            survivors = pb.SecureSurvivors(of=name, members=bitmap(positions, members))
            return pb.ServerMessage(secure_survivors=survivors)
        case Opening(signatures):
            signed = [pb.SecureSigned(position=at, signature=each) for at, each in sorted(signatures.items())]
            return pb.ServerMessage(secure_opening=pb.SecureOpening(of=name, signed=signed))


def question_of(message: pb.ServerMessage, members: int) -> Question:
    """Read the coordinator's message to a member of a session of `members` members; 0: not known before the roster.

    Raises:
        BadForm: it has another form.
    """
    match kind_of(message):
        case "secure_roster":
            roster = message.secure_roster
            if not 1 <= len(roster.members) <= MEMBERS_MAX:
                raise BadForm(f"members: {len(roster.members)}; allowed: 1 to {MEMBERS_MAX}")
            return Roster(roster.threshold, tuple(_read_keys(each) for each in roster.members))
        case "secure_boxes":
            return Boxes(_read_boxes(message.secure_boxes.boxes))
        case "secure_survivors":
            try:
                return Survivors(positions_of(message.secure_survivors.members, members))
            except ValueError as error:
                raise BadForm(f"members: {error}") from None
        case "secure_opening":
            return Opening(_read_signed(message.secure_opening.signed))
    raise BadForm("it is no message of a session")


# ---------------------------------------------------------------- parts


def _name(of: SessionName) -> pb.SecureSession:
    purpose = "" if of.purpose == "update" else of.purpose
    return pb.SecureSession(run_id=of.run, round_id=of.round, attempt=of.attempt, session=of.session, purpose=purpose)


def _keys(keys: MemberKeys) -> pb.MemberKeys:
    return pb.MemberKeys(
        name=keys.name,
        terms=keys.terms,
        mask_key=keys.mask_key,
        box_key=keys.box_key,
        commitment=keys.commitment,
        chain_count=keys.chain.count,
        chain_hash=keys.chain.hash,
        site_key=keys.site.key,
        certificate=keys.site.certificate,
        certification=keys.site.certification,
        signature=keys.signature,
    )


def _read_keys(keys: pb.MemberKeys) -> MemberKeys:
    if not is_name(keys.name):
        raise BadForm(f"name: {keys.name[:80]!a}; allowed: {NAME_ALLOWED}")
    if keys.chain_count > COUNT_MAX:
        raise BadForm(f"chain_count: {keys.chain_count}; allowed: at most {COUNT_MAX}")
    for field in ("certificate", "certification"):
        most = CERTIFICATE_BYTES_MAX if field == "certificate" else CERTIFICATION_BYTES_MAX
        if (size := len(getattr(keys, field))) > most:
            raise BadForm(f"{field}: {count_of(size, 'byte')}; allowed: at most {most}")
    return MemberKeys(
        name=keys.name,
        terms=_sized(keys.terms, "terms", DIGEST_BYTES),
        mask_key=_sized(keys.mask_key, "mask_key", KEY_BYTES),
        box_key=_sized(keys.box_key, "box_key", KEY_BYTES),
        commitment=_sized(keys.commitment, "commitment", DIGEST_BYTES),
        chain=Chain(keys.chain_count, _sized(keys.chain_hash, "chain_hash", DIGEST_BYTES)),
        site=SiteIdentity(_sized(keys.site_key, "site_key", KEY_BYTES), keys.certificate, keys.certification),
        signature=_sized(keys.signature, "signature", SIGNATURE_BYTES),
    )


def _read_refused(names: Collection[str]) -> tuple[str, ...]:
    if len(names) > MEMBERS_MAX or not all(map(is_name, names)):
        raise BadForm(f"refused: {count_of(len(names), 'name')}; allowed: at most {MEMBERS_MAX}, each {NAME_ALLOWED}")
    return tuple(names)


def _boxes(boxes: Mapping[Position, bytes]) -> list[pb.SecureBox]:
    return [pb.SecureBox(position=position, box=box) for position, box in sorted(boxes.items())]


def _read_boxes(boxes: Iterable[pb.SecureBox]) -> dict[Position, bytes]:
    return _by_position(((each.position, _sized(each.box, "box", BOX_BYTES)) for each in boxes), "boxes")


def _read_signed(signed: Iterable[pb.SecureSigned]) -> dict[Position, bytes]:
    return _by_position(
        ((each.position, _sized(each.signature, "signature", SIGNATURE_BYTES)) for each in signed), "signed"
    )


def _by_position(items: Iterable[tuple[Position, bytes]], field: str) -> dict[Position, bytes]:
    found: dict[Position, bytes] = {}
    for position, content in items:
        if position >= MEMBERS_MAX or position in found:
            raise BadForm(f"{field}: position {position}; allowed: 0 to {MEMBERS_MAX - 1}, each once")
        found[position] = content
    return found


def _read_shares(shares: Iterable[bytes]) -> tuple[int, ...]:
    found = tuple(int.from_bytes(_sized(share, "share", SHARE_BYTES)) for share in shares)
    if len(found) > MEMBERS_MAX or any(share >= PRIME for share in found):
        raise BadForm(
            f"shares: {len(found)} of which one may be no share; allowed: at most {MEMBERS_MAX}, each below p"
        )
    return found


def _read_words(words: bytes) -> bytes:
    if len(words) % WORD_BYTES or len(words) > WORDS_BYTES_MAX:
        raise BadForm(f"words: {count_of(len(words), 'byte')}; allowed: a multiple of 8, at most {WORDS_BYTES_MAX}")
    return words


def _sized(content: bytes, field: str, size: int) -> bytes:
    if len(content) != size:
        raise BadForm(f"{field}: {count_of(len(content), 'byte')}; allowed: {size}")
    return content
