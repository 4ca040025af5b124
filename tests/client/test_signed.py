"""The agent against a coordinator that signs: the messages that it accepts, those that it refuses, and its log."""

import time
from contextlib import asynccontextmanager

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import Issuer
from atoll.protocol.identity.names import Identity, Role
from atoll.server.identity.signing import Signer
from tests.client.fake_coordinator import Instant, Version, agent, lagoon, live, model, until
from tests.server.identity.secure import MAIN, Member

OWN = Member(MAIN).credential


def signer(key=None, credential=OWN, clock=time.time):
    return Signer(key or Ed25519PrivateKey.generate(), lambda: credential, clock)


@asynccontextmanager
async def signed(state, sign=None, runner=None):
    """Serve a lagoon that signs, with an agent that is connected to it, for the block."""
    async with lagoon() as coordinator:
        coordinator.signed = (sign or signer()).sign
        async with agent(coordinator, state, runner, authorities=lambda: OWN.ca_pem):
            await coordinator.connected()
            yield coordinator


def seen(state):
    path = state / "seen"
    return path.read_bytes() if path.exists() else b""


@live
async def test_rounds_go_on_across_a_new_key_and_a_restart_of_the_agent(tmp_path):
    for round_id in (1, 2):  # each time another coordinator's process, and another agent's
        async with signed(tmp_path) as coordinator:
            version = coordinator.add(Version(model(round_id)))
            await coordinator.invite(version, round_id=round_id)
            words = f'"round_id": {round_id}'.encode()
            await until(lambda words=words: words in seen(tmp_path))


@live
async def test_a_reconnected_client_is_invited_again_and_goes_on(tmp_path):
    runner = Instant()
    runner.go.clear()
    async with signed(tmp_path, runner=runner) as coordinator:
        version = coordinator.add(Version(model()))
        await coordinator.invite(version)
        await runner.begun.wait()
        coordinator.pushes.put_nowait(None)
        await coordinator.connected(2)
        await coordinator.invite(version)
        await coordinator.push(ranks=pb.Ranks())
        runner.go.set()
        await coordinator.accepted.wait()
        assert len(runner.orders) == 1


@live
async def test_a_coordinator_that_forgot_is_refused_also_after_a_restart_of_the_agent(tmp_path):
    versions = [Version(model(seed)) for seed in range(2)]
    async with signed(tmp_path) as coordinator:
        await coordinator.invite(coordinator.add(versions[1]), round_id=2)
        await coordinator.accepted.wait()
    async with signed(tmp_path, runner=(runner := Instant())) as coordinator:
        await coordinator.invite(coordinator.add(versions[0]), round_id=1)
        failed = await coordinator.heard("failed")
        assert (failed.run_id, failed.round_id, failed.reason) == ("run-1", 1, "rollback")
        assert "round 1 is older than round 2" in failed.detail
        evaluate = pb.Evaluate(
            run_id="run-1", task="tiny:task", version=0, model_digest=versions[0].digest, time_left_s=9
        )
        await coordinator.push(evaluate=evaluate)
        assert (await coordinator.heard("evaluated")).error.startswith("rollback: version 0 is older than version 1")
        assert runner.orders == []


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda message: message.invite.MergeFrom(pb.Invite(local='{"lr": 9}')), "bad_signature"),
        (lambda message: message.ClearField("signature"), "bad_signature"),
        (lambda message: signer().sign(message, "north"), "bad_signature"),
    ],
)
@live
async def test_what_is_changed_or_not_signed_is_refused(tmp_path, spoil, reason):
    own = signer()

    def sign(message, client):
        message = own.sign(message, client)
        if message.HasField("invite"):
            spoil(message)
        return message

    async with signed(tmp_path, runner=(runner := Instant())) as coordinator:
        coordinator.pushes.put_nowait(None)  # from the next connection on
        coordinator.signed = sign
        await coordinator.connected(2)
        await coordinator.invite(coordinator.add(Version(model())))
        assert (await coordinator.heard("failed")).reason == reason
        assert runner.orders == []


@live
async def test_an_invitation_of_another_client_or_an_old_one_is_refused(tmp_path):
    own, kept = signer(), []

    def sign(message, client):
        if kept:
            return kept[0]
        message = own.sign(message, "south" if message.HasField("release") else client)
        if message.HasField("invite"):
            kept.append(message)
        return message

    async with signed(tmp_path) as coordinator:
        coordinator.pushes.put_nowait(None)
        coordinator.signed = sign
        await coordinator.connected(2)
        await coordinator.push(release=pb.Release(run_id="run-1", round_id=1, reason="round_closed"))
        version = coordinator.add(Version(model()))
        await coordinator.invite(version)
        await coordinator.accepted.wait()
        await coordinator.invite(version, round_id=2)  # what arrives is the first one once more
        failed = await coordinator.heard("failed")
        assert (failed.round_id, failed.reason) == (1, "replayed")


@live
async def test_after_an_invitation_that_was_held_back_the_clocks_are_compared_anew(tmp_path, caplog):
    runner, key = Instant(), Ed25519PrivateKey.generate()
    caplog.set_level("INFO", logger="atoll")
    async with signed(tmp_path, signer(key), runner) as coordinator:
        version = coordinator.add(Version(model()))
        coordinator.signed = signer(key, clock=lambda: time.time() - 290).sign
        await coordinator.invite(version, time_left=5.0)
        await until(lambda: "refused: Asked: clock_skew: it arrived 285" in caplog.text)
        coordinator.signed = signer(key).sign
        await until(lambda: caplog.text.count("connected to") == 2)
        assert runner.orders == []
        await coordinator.invite(version, time_left=60.0)
        await coordinator.accepted.wait()
        assert 30 < runner.orders[0].budget <= 60


@live
async def test_what_the_clocks_differ_by_is_no_time_on_the_way(tmp_path):
    runner = Instant()
    async with signed(tmp_path, signer(clock=lambda: time.time() - 290), runner) as coordinator:
        await coordinator.invite(coordinator.add(Version(model())), time_left=60.0)
        await coordinator.accepted.wait()
        assert 30 < runner.orders[0].budget <= 60


@live
async def test_a_clock_that_is_wrong_is_said_to_be(tmp_path, caplog):
    async with signed(tmp_path) as coordinator:
        coordinator.pushes.put_nowait(None)
        coordinator.signed = signer(clock=lambda: time.time() - 3600).sign
        await until(lambda: "signed 1 h 0 min behind this machine's clock" in caplog.text)
        assert "the coordinator's Welcome is not trusted: clock_skew" in caplog.text
        assert (await coordinator.heard("goodbye")).why.startswith("clock_skew: it was signed 1 h 0 min behind")


@pytest.mark.parametrize(
    ("credential", "words"),
    [
        (lambda: Member(MAIN, Issuer.create("other", now=time.time())).credential, "not signed by this authority"),
        (lambda: Member(Identity(Role.CLIENT, "south")).credential, "certified by client south"),
    ],
)
@live
async def test_a_publisher_that_is_not_the_coordinators_gets_no_connection(tmp_path, caplog, credential, words):
    async with signed(tmp_path, signer(credential=credential())) as coordinator:
        await until(lambda: words in caplog.text)
        await coordinator.connected(2)
        assert "connected to" not in caplog.text


@live
async def test_a_coordinator_that_signs_nothing_gets_no_connection(tmp_path, caplog):
    async with lagoon() as coordinator, agent(coordinator, tmp_path, authorities=lambda: OWN.ca_pem):
        await until(lambda: "the coordinator's Welcome is not trusted" in caplog.text)
