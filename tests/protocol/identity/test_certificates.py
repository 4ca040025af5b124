import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from atoll.protocol.identity.certificates import (
    SKEW_S,
    USAGES,
    CertificateError,
    Issuer,
    check_issued,
    key_to_pem,
    make_request,
    new_key,
    read_certificates,
    read_key,
    read_leaf,
    read_request,
    server_name,
    to_pem,
)
from atoll.protocol.identity.names import Identity, Role

NOW = 1_900_000_000.25
CA = Issuer.create("Atoll", now=NOW)
NORTH = Identity(Role.CLIENT, "north")


@pytest.mark.parametrize("role", Role)
def test_a_leaf_names_one_identity_and_is_for_what_its_role_needs(role: Role) -> None:
    key, identity = new_key(), Identity(role, "a1")
    certificate = CA.issue(key.public_key(), identity, now=NOW, lifetime_s=60)
    check_issued(to_pem(certificate), to_pem(CA.certificate), key.public_key())
    leaf = read_leaf(to_pem(certificate))
    assert (leaf.identity, leaf.serial) == (identity, certificate.serial_number)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    listens = role in (Role.COORDINATOR, Role.AGGREGATOR)
    assert names.get_values_for_type(x509.DNSName) == ([server_name(identity)] if listens else [])
    assert set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == set(USAGES[role])


@pytest.mark.parametrize("lifetime_s", [2.0, 300.0, 86400.0])
def test_a_life_begins_when_it_is_issued_and_validity_before_that(lifetime_s: float) -> None:
    certificate = CA.issue(new_key().public_key(), NORTH, now=NOW, lifetime_s=lifetime_s)
    leaf = read_leaf(to_pem(certificate))
    assert abs(leaf.issued_at - NOW) < 1
    assert lifetime_s - 1 < leaf.expires_at - NOW < lifetime_s + 1
    assert certificate.not_valid_before_utc.timestamp() == leaf.issued_at - SKEW_S


def test_a_leaf_does_not_outlive_its_authority() -> None:
    short = Issuer.create("Atoll", now=NOW, lifetime_s=10)
    leaf = read_leaf(to_pem(short.issue(new_key().public_key(), NORTH, now=NOW)))
    assert leaf.expires_at <= short.certificate.not_valid_after_utc.timestamp()
    with pytest.raises(CertificateError, match="has expired on"):
        short.issue(new_key().public_key(), NORTH, now=NOW + 11)


@pytest.mark.real
def test_openssl_agrees_that_the_chain_holds(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(to_pem(CA.certificate))
    leaf = CA.issue(new_key().public_key(), Identity(Role.AGGREGATOR, "0"), now=NOW)
    (tmp_path / "leaf.pem").write_bytes(to_pem(leaf))
    what = ["-x509_strict", "-attime", str(int(NOW)), "-CAfile", "ca.pem", "-purpose", "sslserver", "leaf.pem"]
    done = subprocess.run(["openssl", "verify", *what], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "leaf.pem: OK\n", done.stderr


def test_a_request_proves_its_key_and_its_names_mean_nothing() -> None:
    key = new_key()
    assert read_request(make_request(key)) == key.public_key()
    boast = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "owner")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(boast)
    owner = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("atoll://owner/eve")])
    request = builder.add_extension(owner, critical=True).sign(key, hashes.SHA256())
    asked = read_request(request.public_bytes(serialization.Encoding.DER))
    assert read_leaf(to_pem(CA.issue(asked, NORTH, now=NOW))).identity == NORTH


def test_a_request_that_is_signed_by_another_key_is_refused() -> None:
    mine, theirs = make_request(new_key()), new_key().public_key()
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    whole = x509.load_der_x509_csr(mine)
    swapped = mine.replace(whole.public_key().public_bytes(*form), theirs.public_bytes(*form))
    assert swapped != mine
    with pytest.raises(CertificateError, match="not signed by the key"):
        read_request(swapped)


@pytest.mark.parametrize("key", [ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP384R1())])
def test_keys_of_other_kinds_are_refused(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> None:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    with pytest.raises(CertificateError, match="allowed: ECDSA on P-256"):
        read_request(builder.sign(key, digest).public_bytes(serialization.Encoding.DER))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    with pytest.raises(CertificateError, match="allowed: ECDSA on P-256"):
        read_key(key.private_bytes(serialization.Encoding.PEM, *private))


@pytest.mark.parametrize("request_", [b"", b"\x30\x00", b"x" * 5000, make_request(new_key())[:-1]])
def test_what_is_no_request_is_refused(request_: bytes) -> None:
    with pytest.raises(CertificateError):
        read_request(request_)


def test_a_certificate_of_another_authority_or_key_is_refused() -> None:
    key, other = new_key(), Issuer.create("Atoll", now=NOW)
    leaf, authority = to_pem(CA.issue(key.public_key(), NORTH, now=NOW)), to_pem(CA.certificate)
    with pytest.raises(CertificateError, match="not signed by this authority"):
        check_issued(leaf, to_pem(other.certificate), key.public_key())
    check_issued(leaf, to_pem(other.certificate, CA.certificate), key.public_key())  # either is trusted
    with pytest.raises(CertificateError, match="for another key"):
        check_issued(leaf, authority, new_key().public_key())


def _by_hand(uris: list[str], usages: list[x509.ObjectIdentifier]) -> bytes:
    """Make a certificate that our authority signs, in a form that `issue` never makes."""
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    builder = (
        x509.CertificateBuilder(CA.certificate.subject, x509.Name([]), _KEY.public_key(), 7)
        .not_valid_before(datetime.fromtimestamp(NOW, UTC))
        .not_valid_after(datetime.fromtimestamp(NOW + 60, UTC))
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    builder = builder.add_extension(names, critical=True) if uris else builder
    return to_pem(builder.sign(CA.key, hashes.SHA256()))


_KEY = new_key()


@pytest.mark.parametrize("uris", [[], [NORTH.uri, "atoll://owner/eve"], ["atoll://king/north"], ["https://north"]])
def test_a_certificate_names_exactly_one_identity(uris: list[str]) -> None:
    with pytest.raises(CertificateError):
        read_leaf(_by_hand(uris, list(USAGES[Role.CLIENT])))


def test_a_certificate_is_for_exactly_what_its_role_does() -> None:
    wrong = _by_hand([NORTH.uri], list(USAGES[Role.AGGREGATOR]))
    with pytest.raises(CertificateError, match="usages do not fit the role client"):
        check_issued(wrong, to_pem(CA.certificate), _KEY.public_key())


@pytest.mark.parametrize("name", ["North", "a_b", "a.b"])
def test_a_server_has_a_name_that_dns_tells_apart(name: str) -> None:
    with pytest.raises(ValueError, match="allowed are a-z"):
        CA.issue(_KEY.public_key(), Identity(Role.COORDINATOR, name), now=NOW)
    with pytest.raises(ValueError, match="does not listen"):
        server_name(NORTH)


def test_keys_are_read_back_and_others_refused() -> None:
    assert key_to_pem(read_key(key_to_pem(_KEY))) == key_to_pem(_KEY)
    big = rsa.generate_private_key(65537, 2048)
    private = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    for pem in (b"", b"-----BEGIN", big.private_bytes(serialization.Encoding.PEM, *private)):
        with pytest.raises(CertificateError):
            read_key(pem)
    for pem in (b"", b"x" * 70000, to_pem(CA.certificate)[:-50]):
        with pytest.raises(CertificateError):
            read_certificates(pem)
