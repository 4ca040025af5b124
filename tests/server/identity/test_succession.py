"""The replacement of an authority: members trust the next one before it signs, on the word of the present one alone."""

import asyncio
import random

import pytest

from atoll.protocol.identity.certificates import (
    CertificateError,
    Issuer,
    check_issued,
    make_request,
    new_key,
    read_certificates,
    read_key,
    read_leaf,
    read_request,
    to_pem,
    vouched,
)
from atoll.protocol.identity.credential import CredentialError
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.identity.renewal import NotRenewed, renew_once
from atoll.server.identity import authority as module
from atoll.server.identity import succession
from atoll.server.identity.authority import Authority

NORTH = Identity(Role.CLIENT, "north")
LIFE, START = 1000.0, 1_800_000_000.0


class Clock:
    """The time that the authority sees; certificates are valid by it."""

    def __init__(self):
        self.now = START

    def time(self):
        return self.now

    def strftime(self, form):
        return form


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def signer_of(credential, authorities):
    """The authority that has signed a credential: its position."""
    found = []
    for number, one in enumerate(authorities):
        try:
            check_issued(credential.certificate_pem, one, credential.key.public_key())
            found.append(number)
        except CertificateError:
            continue
    return found


def renewed(authority, mine):
    async def renew(request, _consent):
        return authority.issue(request, mine.identity), authority.ca_pem, authority.cross_pem

    return asyncio.run(renew_once(mine, renew))


def test_a_member_that_renews_once_within_a_life_follows_the_whole_way(tmp_path, clock):
    old = Authority.create(tmp_path, "old", LIFE)
    mine = old.credential(NORTH)
    new_pem = old.prepare_next(tmp_path, "new")
    both = [old.ca_pem, new_pem]
    assert Authority.open(tmp_path, LIFE).succession is None, "a command that looks begins nothing"
    seen = []
    for share in (0.0, 0.6, 0.9, 1.0, 1.5, 1.9, 2.0, 2.5):
        clock.now = START + share * LIFE
        mine = renewed(Authority.open(tmp_path, LIFE, begins=True), mine)
        trusted = [both.index(to_pem(each)) for each in read_certificates(mine.ca_pem)]
        seen.append((share, signer_of(mine, both), trusted))
    assert seen == [
        (0.0, [0], [0, 1]),
        (0.6, [0], [0, 1]),
        (0.9, [0], [0, 1]),
        (1.0, [1], [0, 1]),
        (1.5, [1], [0, 1]),
        (1.9, [1], [0, 1]),
        (2.0, [1], [1]),
        (2.5, [1], [1]),
    ]
    assert not (tmp_path / "next").exists()
    assert read_key((tmp_path / "key.pem").read_bytes()).public_key() == read_certificates(new_pem)[0].public_key()
    Authority.open(tmp_path, LIFE).prepare_next(tmp_path, "a third")


def test_a_longer_life_that_was_in_force_at_the_begin_counts(tmp_path, clock):
    Authority.create(tmp_path, "old", LIFE).prepare_next(tmp_path, "new")
    Authority.open(tmp_path, LIFE, begins=True)
    assert Authority.open(tmp_path, 10.0, begins=True).succession.lifetime_s == LIFE
    assert Authority.open(tmp_path, 2 * LIFE, begins=True).succession.lifetime_s == 2 * LIFE


def test_an_authority_for_which_nobody_vouches_is_not_trusted(tmp_path, clock):
    old, foreign = Authority.create(tmp_path, "old", LIFE), Issuer.create("foreign", now=START)
    mine, request = old.credential(NORTH), make_request(new_key())
    its = to_pem(foreign.certificate)
    with pytest.raises(CertificateError, match="not vouched for"):
        vouched(its, b"", mine.ca_pem)
    forged = to_pem(Issuer.create("old", now=START).vouch(foreign.certificate, now=START))
    with pytest.raises(CertificateError, match="not vouched for"):
        vouched(its, forged, mine.ca_pem)
    genuine = Authority.open(tmp_path)._issuer.vouch(Issuer.create("foreign", now=START).certificate, now=START)
    assert vouched(mine.ca_pem + its, to_pem(genuine), mine.ca_pem) == mine.ca_pem, "the name alone is no key"

    async def renew(_request, _consent):
        leaf = foreign.issue(read_request(request), NORTH, now=START)
        return to_pem(leaf), its, b""

    with pytest.raises(NotRenewed, match="not vouched for"):
        asyncio.run(renew_once(mine, renew))


def test_a_second_replacement_waits_for_the_first(tmp_path, clock):
    old = Authority.create(tmp_path, "old", LIFE)
    old.prepare_next(tmp_path, "new")
    with pytest.raises(CredentialError, match="holds a next authority already"):
        old.prepare_next(tmp_path, "newer")


@pytest.mark.parametrize("file", ["certificate.pem", "cross.pem", "begun.json"])
def test_a_damaged_next_authority_is_named(tmp_path, clock, file):
    Authority.create(tmp_path, "old", LIFE).prepare_next(tmp_path, "new")
    Authority.open(tmp_path, LIFE, begins=True)
    (tmp_path / "next" / file).write_bytes(b"x")
    if file == "cross.pem":
        (tmp_path / "next" / file).unlink()
    with pytest.raises(CredentialError, match="not a complete authority"):
        Authority.open(tmp_path, LIFE, begins=True)


def test_a_replacement_that_is_cut_while_it_is_prepared_or_settled_is_repeated(tmp_path, clock):
    old = Authority.create(tmp_path, "old", LIFE)
    old.prepare_next(tmp_path, "new")
    (tmp_path / "next" / "key.pem").unlink()
    assert Authority.open(tmp_path, LIFE, begins=True).ca_pem == old.ca_pem
    old.prepare_next(tmp_path, "new")
    Authority.open(tmp_path, LIFE, begins=True)
    clock.now = START + 2 * LIFE
    (tmp_path / "certificate.pem").write_bytes((tmp_path / "next" / "certificate.pem").read_bytes())
    assert read_leaf(Authority.open(tmp_path, LIFE, begins=True).credential(NORTH).certificate_pem).identity == NORTH
    assert not (tmp_path / "next").exists()


def test_a_start_after_a_settlement_that_was_cut_while_it_removed_the_rest(tmp_path, clock, monkeypatch):
    """What was left of `next` had its key and lacked the others: each start was refused."""

    def cut(place):
        for name in ("certificate.pem", "cross.pem", "begun.json"):
            (place / name).unlink(missing_ok=True)
        raise KeyboardInterrupt

    Authority.create(tmp_path, "old", LIFE).prepare_next(tmp_path, "new")
    following = Authority.open(tmp_path, LIFE, begins=True)
    clock.now = START + 2 * LIFE
    with monkeypatch.context() as patched:
        patched.setattr(succession.shutil, "rmtree", cut)
        with pytest.raises(KeyboardInterrupt):
            Authority.open(tmp_path, LIFE, begins=True)
    settled = Authority.open(tmp_path, LIFE, begins=True)
    assert (settled.ca_pem, settled.succession) == (following.ca_pem, None)
    settled.prepare_next(tmp_path, "newer")


def test_a_replacement_does_not_begin_before_it_was_made(tmp_path, clock):
    """A machine that starts with a clock of last year began it then, and it had ended when its clock was set right."""
    old = Authority.create(tmp_path, "old", LIFE)
    old.prepare_next(tmp_path, "new")
    clock.now = START - 3 * LIFE
    behind = Authority.open(tmp_path, LIFE, begins=True)
    clock.now = START + 1
    assert behind.ca_pem == old.ca_pem == Authority.open(tmp_path, LIFE).ca_pem
    begun = Authority.open(tmp_path, LIFE, begins=True).succession
    assert begun.begun_at == START + 1


@pytest.mark.parametrize("seed", range(30))
def test_no_member_with_a_valid_certificate_is_locked_out(tmp_path, clock, seed):
    """Members that renew at random times of the last third of a life, a coordinator that restarts at random times: at
    each moment the certificate of each end is signed by an authority that the other end trusts."""
    rng = random.Random(seed)
    authority = Authority.create(tmp_path, "old", LIFE)
    members = {name: authority.credential(Identity(Role.CLIENT, name)) for name in "abcd"}
    coordinator = authority.credential(Identity(Role.COORDINATOR, "main"))
    due = {name: START + LIFE * rng.uniform(0.6, 0.95) for name in members}
    due_own = START + LIFE * rng.uniform(0.6, 0.7)
    authority.prepare_next(tmp_path, "new")
    begin = START + rng.uniform(0.0, 1.0) * LIFE
    restarts = sorted([begin, *(START + rng.uniform(1.0, 4.0) * LIFE for _ in range(3))])
    while clock.now < START + 4 * LIFE:
        clock.now += LIFE / 50
        if restarts and clock.now >= restarts[0]:
            restarts.pop(0)
            authority = Authority.open(tmp_path, LIFE, begins=True)
            if coordinator.ca_pem != authority.ca_pem:
                due_own = clock.now
        if clock.now >= due_own:
            coordinator = renewed(authority, coordinator)
            due_own = clock.now + LIFE * rng.uniform(0.56, 0.67)
        for name, mine in members.items():
            if clock.now >= due[name]:
                members[name] = renewed(authority, mine)
                due[name] = clock.now + LIFE * rng.uniform(0.56, 0.95)
        for mine in members.values():
            check_issued(coordinator.certificate_pem, mine.ca_pem, coordinator.key.public_key())
            check_issued(mine.certificate_pem, coordinator.ca_pem, mine.key.public_key())
    assert signer_of(coordinator, [authority.ca_pem]) == [0]
    assert Authority.open(tmp_path, LIFE, begins=True).succession is None
