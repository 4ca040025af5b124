"""Writes `corpus.json` anew: certificates have keys that nobody can draw again, and the same seed must give the same
inputs: `python -m tests.fuzz.make_corpus`."""

import base64
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import Issuer, key_to_pem, make_request, new_key, to_pem
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.identity.statement import statement
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
        "messages": [_signed(message, signer).SerializeToString() for message in _messages()],
    }


def _messages() -> list[pb.ServerMessage]:
    digest, local = "0" * 64, '{"lr": 0.1}'
    invite = pb.Invite(run_id="r-1", round_id=3, task="t:task", base_version=2, model_digest=digest, time_left_s=60.0)
    invite.local, invite.codec, invite.seed = local, "topk:0.01", 2**63
    evaluate = pb.Evaluate(run_id="r-1", task="t:task", version=2, model_digest=digest, time_left_s=5.0, local=local)
    return [
        pb.ServerMessage(invite=invite),
        pb.ServerMessage(evaluate=evaluate),
        pb.ServerMessage(release=pb.Release(run_id="r-1", round_id=3, reason="round_closed", submit=True)),
        pb.ServerMessage(run_ended=pb.RunEnded(run_id="r-1", state="finished", cause="3 rounds are committed")),
        pb.ServerMessage(ranks=pb.Ranks(addresses=["127.0.0.1:7071", ""])),
    ]


def _signed(message: pb.ServerMessage, key: Ed25519PrivateKey) -> pb.ServerMessage:
    message.signature.issued_us = int(NOW * 1e6)
    message.signature.ed25519 = key.sign(statement(message, "north", message.signature.issued_us))
    return message


if __name__ == "__main__":
    encoded = {name: [base64.b64encode(data).decode() for data in found] for name, found in corpus().items()}
    PATH.write_text(json.dumps(encoded, indent=1) + "\n")
