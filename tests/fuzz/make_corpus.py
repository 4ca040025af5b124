"""Writes `corpus.json` anew: certificates have keys that nobody can draw again, and the same seed must give the same
inputs: `python -m tests.fuzz.make_corpus`."""

import base64
import json
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import Issuer, key_to_pem, make_request, new_key, to_pem
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.identity.statement import statement
from atoll.protocol.secure.messages import Chain, MemberKeys
from atoll.protocol.secure.site_key import certify as site_key_of
from atoll.protocol.secure.terms import Terms, ranges_digest
from atoll.protocol.secure.wire import SessionName, answer_message
from atoll.protocol.vocabulary import RoundId, RunId
from atoll.server.identity.signing import certify

PATH = Path(__file__).with_name("corpus.json")
NOW = 1_777_896_000.0


def corpus() -> dict[str, list[bytes]]:
    """Valid certificates (DER), requests, a publisher's statement and signed messages, of one authority."""
    issuer, signer = Issuer.create("fuzz", now=NOW), Ed25519PrivateKey.generate()
    certificates = [issuer.certificate]
    for identity in (Identity(Role.CLIENT, "north"), Identity(Role.OPERATOR, "ann"), Identity(Role.AGGREGATOR, "3")):
        certificates.append(issuer.issue(new_key().public_key(), identity, now=NOW))
    key = new_key()
    own = issuer.issue(key.public_key(), Identity(Role.COORDINATOR, "main"), now=NOW)
    publisher = certify(signer, Credential(key_to_pem(key), to_pem(own), to_pem(issuer.certificate)), NOW)
    return {
        "certificates": [certificate.public_bytes(Encoding.DER) for certificate in (own, *certificates)],
        "requests": [make_request(new_key()) for _ in range(3)],
        "publishers": [publisher.SerializeToString()],
        "authority": [to_pem(issuer.certificate)],
        "publisher_key": [signer.public_key().public_bytes_raw()],
        "members": [_member(issuer).SerializeToString()],
        "messages": [_signed(message, signer).SerializeToString() for message in _messages()],
    }


def _member(issuer: Issuer) -> pb.MemberKeys:
    """Return the keys of a member of a secure sum, signed by its site key, which its certificate certifies."""
    key, site_key, end = new_key(), Ed25519PrivateKey.generate(), Chain(3, bytes(range(32)))
    certificate = to_pem(issuer.issue(key.public_key(), Identity(Role.CLIENT, "north"), now=NOW))
    site = site_key_of("north", site_key.public_key().public_bytes_raw(), key, certificate)
    keys = MemberKeys("north", bytes(32), bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32, end, site)
    signed = replace(keys, signature=site_key.sign(keys.statement()))
    return answer_message(SessionName(RunId("r-1"), RoundId(3), 1, 0), signed).secure_keys.keys


def _messages() -> list[pb.ServerMessage]:
    digest, local, secure = "0" * 64, '{"lr": 0.1}', pb.SecureTerms(terms=_terms().canonical(), ranges=[0, -3])
    invite = pb.Invite(run_id="r-1", round_id=3, task="t:task", base_version=2, model_digest=digest, time_left_s=60.0)
    invite.local, invite.codec, invite.seed = local, "topk:0.01", 2**63
    evaluate = pb.Evaluate(run_id="r-1", task="t:task", version=2, model_digest=digest, time_left_s=5.0, local=local)
    summed = pb.Invite(**{field.name: value for field, value in invite.ListFields()}, secure=secure)
    return [
        pb.ServerMessage(invite=invite),
        pb.ServerMessage(invite=summed),
        pb.ServerMessage(evaluate=evaluate),
        pb.ServerMessage(release=pb.Release(run_id="r-1", round_id=3, reason="round_closed", submit=True)),
        pb.ServerMessage(run_ended=pb.RunEnded(run_id="r-1", state="finished", cause="3 rounds are committed")),
        pb.ServerMessage(ranks=pb.Ranks(addresses=["127.0.0.1:7071", ""])),
    ]


def _terms() -> Terms:
    digest = "ab" * 32
    at = ("r-1", 3, 1, 0, "update", 2, digest, "", "t:task", "fedavg", '{"lr": 0.1}', digest)
    return Terms(*at, 32, 1.0, 0, ranges_digest([0, -3]), 64, "two_thirds", "", (0, 2), (("loss", 2),))


def _signed(message: pb.ServerMessage, key: Ed25519PrivateKey) -> pb.ServerMessage:
    message.signature.issued_us = int(NOW * 1e6)
    message.signature.ed25519 = key.sign(statement(message, "north", message.signature.issued_us))
    return message


if __name__ == "__main__":
    encoded = {name: [base64.b64encode(data).decode() for data in found] for name, found in corpus().items()}
    PATH.write_text(json.dumps(encoded, indent=1) + "\n")
