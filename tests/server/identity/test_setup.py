"""The authority that a coordinator starts with: its own, or none at all."""

import asyncio
import shutil
from pathlib import Path

import pytest

from atoll.operations import admin
from atoll.operations.faults import CommandError
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.names import COORDINATOR, aggregator
from atoll.protocol.settings import ConfigError
from atoll.server.config.process import CoordinatorConfig
from atoll.server.identity import own_certificates
from atoll.server.identity.authority import Authority
from atoll.server.identity.authority_server import AuthorityServer
from atoll.server.identity.own_certificates import OWNER
from atoll.server.identity.remote_signer import RemoteSigner
from atoll.server.identity.setup import ELSEWHERE, MINE, OWNERS, equip_rank, gate_of, identity_folder
from atoll.server.journal.placement import state_of_rank
from atoll.server.journal.state_directory import StateDirectory
from tests.cli.invoking import refused
from tests.client.fake_coordinator import live


async def started(state: Path, authority: object = "") -> bytes:
    """The authority that a coordinator starts with."""
    config = CoordinatorConfig(state=state, authority=str(authority))
    with StateDirectory.open(state) as opened:
        async with gate_of(config, opened) as gate:
            assert gate.signer is not None
            return gate.signer.ca_pem


def credentials(state: Path) -> list[Credential]:
    return [Credential.load(identity_folder(state) / whose) for whose in (MINE, OWNERS)]


@live
async def test_an_authority_that_is_not_where_it_was_is_never_replaced_by_a_new_one(tmp_path: Path) -> None:
    state, mounted = tmp_path / "state", tmp_path / "volume" / "authority"
    mounted.parent.mkdir()
    ca_pem = await started(state, mounted)
    before, own = credentials(state), identity_folder(state)
    mounted.parent.rename(tmp_path / "away")
    (tmp_path / "empty").mkdir()
    Authority.create(tmp_path / "other", "other")
    for authority, fault in (
        (mounted, f"{mounted} cannot be made, as there is no directory {mounted.parent}: mount it, or make it"),
        (tmp_path / "empty", f"{tmp_path / 'empty'} holds no authority, and {state} belongs to one already"),
        (tmp_path / "typo", f"{tmp_path / 'typo'} holds no authority, and {state} belongs to one already"),
        (tmp_path / "other", f"{tmp_path / 'other'} holds another authority, and {state} belongs to one already"),
        ("", f"{own / 'authority'} holds no authority, and {state} belongs to one already"),
    ):
        with pytest.raises(ConfigError) as refusal:
            await started(state, authority)
        assert str(refusal.value).startswith(f"coordinator.authority: {fault}")
        assert len(refusal.value.faults) == 1
        assert credentials(state) == before
    assert not (own / "authority").exists()
    assert not (tmp_path / "typo").exists()
    assert not mounted.parent.exists()
    (tmp_path / "away").rename(mounted.parent)
    assert await started(state, mounted) == ca_pem
    assert credentials(state) == before


@live
async def test_an_authority_may_be_moved_and_its_key_be_elsewhere(tmp_path: Path) -> None:
    state = tmp_path / "state"
    ca_pem = await started(state)
    before = credentials(state)
    (identity_folder(state) / "authority").rename(tmp_path / "moved")
    assert await started(state, tmp_path / "moved") == ca_pem
    assert await started(state, ELSEWHERE) == ca_pem
    assert credentials(state) == before


async def sign_what_is_asked(signer: RemoteSigner, server: AuthorityServer) -> None:
    stream = signer.connect()
    while (order := await stream.outbox.get()) is not None:
        signer.answered(stream, server.answer(order))


@pytest.mark.real
@live
async def test_an_owner_that_was_made_by_hand_is_renewed_though_the_authority_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the owner's renewal, without which revocation would end after a month."""
    monkeypatch.setattr(own_certificates, "LOOK_S", 0.05)
    Authority.create(tmp_path / "ca", "elsewhere")
    authority, state = Authority.open(tmp_path / "ca", lifetime_s=5), tmp_path / "state"
    authority.credential(COORDINATOR).store(identity_folder(state) / MINE)
    config = CoordinatorConfig(state=state, authority=ELSEWHERE)
    with StateDirectory.open(state) as opened:
        async with gate_of(config, opened) as gate:
            assert isinstance(gate.signer, RemoteSigner)
            signing = asyncio.create_task(sign_what_is_asked(gate.signer, AuthorityServer(authority, tmp_path / "ca")))
            for first in (authority.credential(OWNER), authority.credential(OWNER)):  # again: as after a loss
                first.store(identity_folder(state) / OWNERS)
                while (now := credentials(state)[1]) == first:
                    await asyncio.sleep(0.05)
                assert now.identity == OWNER
                assert now.leaf.expires_at > first.leaf.expires_at
            signing.cancel()


def test_an_owner_whose_certificate_has_run_out_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "running_coordinator", lambda state: None)
    Authority.create(tmp_path / "ca", "elsewhere")
    own = Authority.open(tmp_path / "ca", lifetime_s=1).credential(OWNER)
    own.store(folder := identity_folder(tmp_path) / OWNERS)
    monkeypatch.setattr("time.time", lambda: own.leaf.expires_at)
    with pytest.raises(CommandError, match="has expired, and the coordinator has not renewed it") as refusal:
        admin.dialer(tmp_path)
    way_out = f"with the authority on another machine, begin with `atoll authority request {folder} --out"
    assert way_out in str(refusal.value)


@live
async def test_a_rank_gets_a_new_certificate_when_its_own_has_expired_unless_it_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the credential of a rank of this machine while its coordinator runs on: after a sleep of months."""
    config = CoordinatorConfig(state=tmp_path / "state", aggregators=1)
    folder = identity_folder(state_of_rank(config.state, 0, 1))
    with StateDirectory.open(config.state) as opened:
        async with gate_of(config, opened) as gate:
            assert gate.members is not None

            async def equipped(now: float | None = None) -> Credential:
                with monkeypatch.context() as patch:
                    if now is not None:
                        patch.setattr("time.time", lambda: now)
                    await equip_rank(gate, config, 0)
                return Credential.load(folder)

            first = await equipped()
            assert first.identity == aggregator(0)
            assert await equipped() == first, "it is valid"
            newer = await equipped(first.leaf.expires_at)
            assert newer.leaf.expires_at > first.leaf.expires_at
            await gate.members.enrolments.revoke(aggregator(0))
            assert await equipped(newer.leaf.expires_at) == newer, "it needs a new join code"


@live
async def test_whoever_moves_the_identity_away_begins_anew(tmp_path: Path) -> None:
    """Start after the identity was moved away, as after `atoll restore` of a backup without keys."""
    state = tmp_path / "state"
    ca_pem = await started(state)
    shutil.rmtree(identity_folder(state))
    newer = await started(state)
    assert newer != ca_pem
    assert [credential.ca_pem for credential in credentials(state)] == [newer, newer]


@live
async def test_an_authority_that_was_cut_while_it_was_made_is_made_anew(tmp_path: Path) -> None:
    """No certificate of this coordinator is from it."""
    folder = identity_folder(tmp_path / "state") / "authority"
    Authority.create(folder, "cut")
    (folder / "key.pem").unlink()
    assert await started(tmp_path / "state") == (folder / "certificate.pem").read_bytes()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("light.py", "light.py is not a directory; allowed: an authority's directory"),
        ("dangling", "dangling is not a directory; allowed: an authority's directory"),
        ("no/such/place", "no/such/place cannot be made, as there is no directory no/such: mount it, or make it"),
    ],
)
def test_what_cannot_be_an_authoritys_directory_is_refused_by_the_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("light.py").touch()
    Path("dangling").symlink_to("nowhere")
    command = ("coordinator", "--state", "state", "--set=coordinator.listen=127.0.0.1:0")
    assert refused(*command, f"--set=coordinator.authority={name}") == [f"coordinator.authority: {fault}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "light.py"]
