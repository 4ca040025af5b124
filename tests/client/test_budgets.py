"""The agent with a budget, against a coordinator that refuses its updates: what has left is charged, and stays so."""

import json
from itertools import pairwise

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import RejectReason
from tests.cli.invoking import shown
from tests.client.fake_coordinator import Version, agent, lagoon, live, model, until
from tests.client.policy.budgets.test_gate import DATA
from tests.client.policy.budgets.test_terms import CLIENT
from tests.client.policy.test_gate import written

LOCAL = json.dumps(CLIENT)


def policy(folder):
    path = folder / "policy.toml"
    path.write_text('tasks = ["*"]\nruns = ["*"]\n' + DATA.format(epsilon=30.0, unit="client").replace('"t"', '"*"'))
    return path


def charged(folder):
    return [line["object"] for line in written(folder / "a") if line["action"] == "privacy.charge"]


def budget(folder):
    [found] = shown("site", "budgets", "--state", folder / "a", "--policy", folder / "policy.toml")["budgets"]
    return found


def spool(folder):
    return [*(folder / "a" / "spool").iterdir()]


@live
async def test_a_refused_update_stays_charged_whatever_the_reason_and_so_does_the_next_training(tmp_path):
    """Too late, of the wrong size, not of the round, ...: the coordinator has its bytes, or may say that it has not."""
    rounds = {number: reason for number, reason in enumerate(RejectReason, 1)}
    spent = [0.0]
    async with lagoon() as coordinator, agent(coordinator, tmp_path / "a", policy=policy(tmp_path)):
        version = coordinator.add(Version(model()))
        for number, reason in rounds.items():
            coordinator.accepted.clear()
            coordinator.verdict = pb.Verdict(reason=reason, detail=f"refused: {reason}")
            await coordinator.invite(version, round_id=number, local=LOCAL)
            await coordinator.accepted.wait()
            await until(lambda: not spool(tmp_path))
            assert charged(tmp_path) == [f"round {each}" for each in range(1, number + 1)], reason
            spent.append(budget(tmp_path)["spent"])
    assert all(after > before for before, after in pairwise(spent))
    assert budget(tmp_path)["charges"] == len(rounds)
    assert budget(tmp_path)["spent"] == spent[-1], "the agent's end refunds nothing"


@live
async def test_an_update_that_is_refused_before_its_last_byte_or_by_a_status_stays_charged(tmp_path):
    async with lagoon() as coordinator, agent(coordinator, tmp_path / "a", policy=policy(tmp_path)):
        version = coordinator.add(Version(model()))
        coordinator.early_verdict = pb.Verdict(reason="wrong_layout", detail="too many bytes")
        await coordinator.invite(version, round_id=1, local=LOCAL)
        await until(lambda: coordinator.calls["Upload"] == 1 and not spool(tmp_path))
        assert charged(tmp_path) == ["round 1"]
        coordinator.early_verdict = None
        coordinator.upload_status = (grpc.StatusCode.INVALID_ARGUMENT, "no manifest")
        await coordinator.invite(version, round_id=2, local=LOCAL)
        await until(lambda: coordinator.calls["Upload"] == 2 and not spool(tmp_path))
    assert charged(tmp_path) == ["round 1", "round 2"]
    assert budget(tmp_path)["charges"] == 2


@pytest.mark.parametrize("is_restarted", [False, True], ids=["", "restarted"])
@live
async def test_a_round_that_is_asked_for_again_after_a_refusal_is_charged_again(tmp_path, is_restarted):
    """Its update has left, so that another one of the same round is another release."""
    async with lagoon() as coordinator:
        coordinator.verdict = pb.Verdict(reason="too_late", detail="round 1 is over")
        version = coordinator.add(Version(model()))
        for asked in (1, 1) if is_restarted else (2,):
            connected = len(coordinator.hellos) + 1
            async with agent(coordinator, tmp_path / "a", policy=policy(tmp_path)):
                await coordinator.connected(connected)
                for _ in range(asked):
                    coordinator.accepted.clear()
                    coordinator.verdicts.clear()
                    await coordinator.invite(version, round_id=1, local=LOCAL)
                    await coordinator.accepted.wait()
                    await until(lambda: not spool(tmp_path))
    assert budget(tmp_path)["charges"] == 2
    assert charged(tmp_path) == ["round 1"] * 2
