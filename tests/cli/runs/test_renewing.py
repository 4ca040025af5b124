"""Commands on a machine without a coordinator renew their person's certificate, and renew it once."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest

from atoll.operations import admin
from atoll.operations.faults import CommandError
from atoll.protocol.identity import handshake_fault
from atoll.protocol.identity.certificates import Issuer, key_to_pem, new_key, to_pem
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.enrolling import Place
from atoll.protocol.identity.names import Identity, Role

OLGA = Identity(Role.OPERATOR, "olga")
CA = Issuer.create("one", now=time.time())


def credential(age_s: float) -> Credential:
    """Return a credential for a day that was issued `age_s` seconds ago."""
    key = new_key()
    certificate = CA.issue(key.public_key(), OLGA, now=time.time() - age_s, lifetime_s=86400.0)
    return Credential(key_to_pem(key), to_pem(certificate), to_pem(CA.certificate))


@pytest.fixture
def olga(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of her credential, whose renewal is due."""
    credential(age_s=80000.0).store(tmp_path / "olga")
    Place("127.0.0.1:7070", "127.0.0.1:7072", "00").store(tmp_path / "olga")
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "olga"))
    return tmp_path / "olga"


@pytest.mark.real
def test_concurrent_commands_renew_the_certificate_once(olga: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer, renewals = Credential.load(olga), credential(age_s=0.0), []

    async def renew_once(mine: Credential, renew: Any) -> Credential:
        renewals.append(mine)
        await asyncio.sleep(0.3)
        return newer

    monkeypatch.setattr(admin, "renew_once", renew_once)
    with ThreadPoolExecutor(8) as commands:
        for found in [commands.submit(admin.elsewhere) for _ in range(8)]:
            found.result()
    assert renewals == [older]
    assert Credential.load(olga) == newer


def test_what_another_command_has_renewed_meanwhile_is_not_renewed_again(
    olga: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer, through = credential(age_s=0.0), admin.through_proxy

    def through_proxy(*arguments: Any) -> Any:  # the other command ends between our look and our turn
        newer.store(olga)
        return through(*arguments)

    async def renew_once(mine: Credential, renew: Any) -> Credential:
        raise AssertionError("it is renewed twice")

    monkeypatch.setattr(admin, "through_proxy", through_proxy)
    monkeypatch.setattr(admin, "renew_once", renew_once)
    admin.elsewhere()
    assert Credential.load(olga) == newer


class Unavailable(grpc.RpcError):
    """A call that found no connection, with the library's text."""

    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._details


NOTHING_THERE = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7072: Connection refused"
NOT_TRUSTED = "Tls handshake failed (TSI_PROTOCOL_FAILURE): CERTIFICATE_VERIFY_FAILED: certificate has expired"


@pytest.mark.real
@pytest.mark.parametrize(("details", "is_the_address"), [(NOTHING_THERE, True), (NOT_TRUSTED, False)])
def test_an_address_is_doubted_only_if_nothing_trusted_could_answer_there(
    olga: Path, monkeypatch: pytest.MonkeyPatch, details: str, is_the_address: bool
) -> None:
    credential(age_s=0.0).store(olga)

    def fails(_: Any) -> Any:
        raise Unavailable(details)

    monkeypatch.setattr(admin, "CONNECT_S", 0.0)
    monkeypatch.setattr(handshake_fault, "certificate_at", AsyncMock(side_effect=OSError))
    with pytest.raises(CommandError) as refused:
        admin.ask(Path("nowhere"), fails)
    hints = [fault for fault in refused.value.faults if fault.startswith("if its address has changed")]
    assert bool(hints) == is_the_address
    assert ("clock" in str(refused.value)) != is_the_address
