from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from atoll.ground.durable import DiskFull
from atoll.protocol.identity.certificates import Issuer, Leaf, new_key, read_leaf, to_pem
from atoll.protocol.identity.names import Identity, Role
from atoll.server.identity.register import (
    CERTIFICATES,
    CERTIFICATES_MAX,
    WRONG_TRIES_MAX,
    Invitation,
    Refused,
    Register,
    Standing,
)
from atoll.server.journal.state_directory import StateDirectory

NOW = 1_900_000_000.0
NORTH, SOUTH, EVE = (Identity(Role.CLIENT, name) for name in ("north", "south", "eve"))
CA = Issuer.create("Atoll", now=NOW)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    with StateDirectory.open(tmp_path) as state:
        yield state


@pytest.fixture
def register(state: StateDirectory) -> Register:
    return Register(state.database)


def certificate(identity: Identity, lifetime_s: float = 100.0) -> tuple[Leaf, bytes]:
    pem = to_pem(CA.issue(new_key().public_key(), identity, now=NOW, lifetime_s=lifetime_s))
    return read_leaf(pem), pem


def invite(register: Register, identity: Identity = NORTH) -> Invitation:
    return register.invite(identity, now=NOW, lifetime_s=60)


def enrol(register: Register, identity: Identity, key: str) -> Leaf:
    invitation = invite(register, identity)
    assert register.redeem(invitation.id, invitation.secret, key, now=NOW) == identity
    leaf, pem = certificate(identity)
    assert register.enrolled(invitation.id, leaf, key, pem, now=NOW) == pem
    return leaf


def test_an_invitation_is_good_for_one_key_until_it_expires(register: Register) -> None:
    invitation = invite(register)
    for _ in range(2):  # the first answer may have been lost
        assert register.redeem(invitation.id, invitation.secret, "key", now=NOW + 59) == NORTH
    with pytest.raises(Refused, match="used, by another key"):
        register.redeem(invitation.id, invitation.secret, "other", now=NOW + 59)
    with pytest.raises(Refused, match="expired"):
        register.redeem(invitation.id, invitation.secret, "key", now=NOW + 61)


def test_five_wrong_tries_void_an_invitation_also_for_whoever_has_the_secret(register: Register) -> None:
    invitation = invite(register)
    for _ in range(WRONG_TRIES_MAX):
        assert [member.standing for member in register.members(now=NOW)] == [Standing.INVITED]
        with pytest.raises(Refused, match="secret is wrong"):
            register.redeem(invitation.id, bytes(16), "key", now=NOW)
    with pytest.raises(Refused, match="void after 5 wrong tries"):
        register.redeem(invitation.id, invitation.secret, "key", now=NOW)
    assert [member.standing for member in register.members(now=NOW)] == [Standing.VOID]
    invite(register)
    assert [member.standing for member in register.members(now=NOW)] == [Standing.INVITED]


def test_wrong_tries_at_what_was_never_issued_leave_no_trace(register: Register) -> None:
    with pytest.raises(Refused, match="no such invitation"):
        register.redeem(b"12345678", bytes(16), "key", now=NOW)
    assert register.members(now=NOW) == []


def test_the_secret_is_not_in_the_database(register: Register, tmp_path: Path) -> None:
    invitation = invite(register)
    for path in tmp_path.glob("state.db*"):
        content = path.read_bytes()
        assert invitation.secret not in content
        assert invitation.secret.hex().encode() not in content


def test_a_newer_invitation_voids_an_older_one(register: Register) -> None:
    older, newer = invite(register), invite(register)
    with pytest.raises(Refused, match="replaced by a newer one"):
        register.redeem(older.id, older.secret, "key", now=NOW)
    assert register.redeem(newer.id, newer.secret, "key", now=NOW) == NORTH


def test_an_enrolment_that_is_repeated_with_its_key_gives_the_same_certificate(register: Register) -> None:
    invitation = invite(register)
    register.redeem(invitation.id, invitation.secret, "key", now=NOW)
    (first, first_pem), (second, second_pem) = certificate(NORTH), certificate(NORTH)
    assert register.enrolled(invitation.id, first, "key", first_pem, now=NOW) == first_pem
    assert register.enrolled(invitation.id, second, "key", second_pem, now=NOW) == first_pem
    assert register.issued_to(NORTH, "key", now=NOW) == first_pem
    assert register.issued_to(NORTH, "key", now=NOW + 101) is None
    assert register.issued_to(NORTH, "other", now=NOW) is None


def test_whoever_enrols_anew_takes_the_name(register: Register) -> None:
    older = enrol(register, NORTH, "old key")
    assert not register.revocations.is_refused(older)
    newer = enrol(register, NORTH, "new key")
    assert register.revocations.is_refused(older)
    assert not register.revocations.is_refused(newer)


def test_revoked_are_all_certificates_and_invitations_of_a_name_also_unknown_ones(register: Register) -> None:
    enrolled, elsewhere = enrol(register, NORTH, "key"), certificate(NORTH)[0]
    open_one, other = invite(register), enrol(register, SOUTH, "its")
    register.revoke(NORTH, now=NOW)
    assert register.revocations.is_refused(enrolled)
    assert register.revocations.is_refused(elsewhere)
    assert not register.revocations.is_refused(other)
    with pytest.raises(Refused):
        register.redeem(open_one.id, open_one.secret, "key", now=NOW)
    again = enrol(register, NORTH, "third")
    assert not register.revocations.is_refused(again)
    assert register.revocations.is_refused(enrolled)
    assert register.revocations.is_refused(elsewhere)


def test_a_revocation_between_asking_and_signing_wins(register: Register) -> None:
    older = enrol(register, NORTH, "key")
    invitation = invite(register)
    register.redeem(invitation.id, invitation.secret, "key 2", now=NOW)
    register.revoke(NORTH, now=NOW)
    leaf, pem = certificate(NORTH)
    with pytest.raises(Refused, match="has been revoked"):
        register.renewed(older.serial, leaf, "key 3", pem, now=NOW)
    with pytest.raises(Refused, match="invitation is void"):
        register.enrolled(invitation.id, leaf, "key 2", pem, now=NOW)
    assert register.revocations.is_refused(leaf)


def test_what_found_no_room_on_the_disk_counts_neither_there_nor_in_memory(
    register: Register, state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, invitation = enrol(register, NORTH, "key"), invite(register)
    register.redeem(invitation.id, invitation.secret, "new key", now=NOW)
    newer, pem = certificate(NORTH)
    transaction = state.database.transaction

    @contextmanager
    def full() -> Iterator[Connection]:
        with transaction() as connection:
            yield connection
            raise DiskFull("no room")  # at the commit: it is rolled back

    with monkeypatch.context() as patch:
        patch.setattr(state.database, "transaction", full)
        with pytest.raises(DiskFull):
            register.revoke(NORTH, now=NOW)
        with pytest.raises(DiskFull):
            register.enrolled(invitation.id, newer, "new key", pem, now=NOW)
    for one in (register, Register(state.database)):
        assert not one.revocations.is_refused(older)
    assert register.enrolled(invitation.id, newer, "new key", pem, now=NOW) == pem  # again, and there is room
    for one in (register, Register(state.database)):
        assert one.revocations.is_refused(older)
        assert not one.revocations.is_refused(newer)


def test_a_renewed_certificate_counts_beside_the_older_one(register: Register) -> None:
    enrol(register, NORTH, "before")
    older = enrol(register, NORTH, "key")  # a name that once was revoked
    leaf, pem = certificate(NORTH, lifetime_s=200)
    register.renewed(older.serial, leaf, "next", pem, now=NOW)
    assert not register.revocations.is_refused(older)
    assert not register.revocations.is_refused(leaf)
    assert [member.expires_at for member in register.members(now=NOW)] == [leaf.expires_at]


@pytest.mark.slow
@pytest.mark.parametrize("was_revoked", [False, True])
def test_whoever_renews_without_end_fills_neither_the_disk_nor_memory(
    register: Register, state: StateDirectory, was_revoked: bool
) -> None:
    if was_revoked:
        enrol(register, NORTH, "before")
    south, first = enrol(register, SOUTH, "south"), enrol(register, NORTH, "key")
    leaves = [first]
    for number in range(2 * CERTIFICATES_MAX):  # each answer is lost: it shows the first one again
        leaf, pem = certificate(NORTH, lifetime_s=200 + number)
        register.renewed(first.serial, leaf, f"key {number}", pem, now=NOW)
        leaves.append(leaf)
    with state.database.transaction() as connection:
        serials = set(connection.scalars(select(CERTIFICATES.c.serial).where(CERTIFICATES.c.name == "north")))
    kept = [first, *leaves[1 - CERTIFICATES_MAX :]]
    assert serials == {f"{leaf.serial:x}" for leaf in kept}
    for one in (register, Register(state.database)):
        assert [leaf for leaf in leaves if not one.revocations.is_refused(leaf)] == (kept if was_revoked else leaves)
        assert not one.revocations.is_refused(south)
        assert sum(map(len, one.revocations.standing().values())) == (CERTIFICATES_MAX if was_revoked else 0)


def test_what_is_revoked_stays_so_in_the_next_process(state: StateDirectory) -> None:
    register = Register(state.database)
    first, second = enrol(register, NORTH, "1"), enrol(register, NORTH, "2")
    gone, fine = enrol(register, EVE, "3"), enrol(register, SOUTH, "4")
    register.revoke(EVE, now=NOW)
    later = Register(state.database)
    assert [later.revocations.is_refused(leaf) for leaf in (first, second, gone, fine)] == [True, False, True, False]
    assert later.revocations.standing() == register.revocations.standing()


def test_members_are_listed_with_what_they_are(register: Register) -> None:
    invite(register, NORTH)
    enrol(register, SOUTH, "key")
    register.revoke(EVE, now=NOW)
    register.revoke(Identity(Role.AUDITOR, "ann"), now=NOW)
    enrol(register, Identity(Role.OPERATOR, "olga"), "its")
    standings = [(str(member.identity), member.standing) for member in register.members(now=NOW)]
    assert standings == [
        ("auditor ann", Standing.REVOKED),
        ("client eve", Standing.REVOKED),
        ("client north", Standing.INVITED),
        ("client south", Standing.MEMBER),
        ("operator olga", Standing.MEMBER),
    ]
    assert [m.standing for m in register.members(now=NOW + 1000) if m.identity == SOUTH] == [Standing.LAPSED]
    assert NORTH not in [member.identity for member in register.members(now=NOW + 1000)]  # its invitation has expired
