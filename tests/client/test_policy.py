"""The agent with a policy, against a coordinator that asks for more: nothing leaves that the policy does not allow."""

from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from atoll.client.policy.decide import Standing
from atoll.client.policy.history import PolicyHistory
from atoll.client.work.runner import RunnerFailed
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import FailureReason
from tests.client.fake_coordinator import MIB, Instant, Version, agent, lagoon, live, model, until
from tests.client.policy.test_gate import written

POLICY = 'tasks = ["tiny:*"]\nruns = ["*"]\n'


def policy(folder, extra=""):
    (folder / "policy.toml").write_text(POLICY + extra)
    return folder / "policy.toml"


@asynccontextmanager
async def site(folder, extra="", runner=None):
    """Serve a coordinator, with an agent that has this policy, for the block."""
    async with lagoon() as coordinator, agent(coordinator, folder / "a", runner, policy=policy(folder, extra)):
        yield coordinator


def decisions(folder):
    return written(folder / "a")


@live
async def test_a_model_that_is_too_large_is_not_even_downloaded(tmp_path):
    async with (
        lagoon() as coordinator,
        agent(coordinator, tmp_path / "a", policy=policy(tmp_path, "upload_max_bytes = 39999\n")),
    ):
        version = coordinator.add(Version(model(w=10_000)))
        await coordinator.invite(version, inline=False)
        failed = await coordinator.heard("failed")
        assert failed.reason == "policy_refused"
        assert failed.detail == "upload_max_bytes: an update of 40000 bytes may not leave; allowed: at most 39999"
        assert coordinator.calls["Download"] == 0
        assert decisions(tmp_path)[-1]["action"] == "train.refused"
        assert decisions(tmp_path)[-1]["digests"]["bytes"] == "40000"


@live
async def test_an_update_that_turns_out_too_large_is_deleted_before_its_first_byte(tmp_path):
    larger = Instant({"w": np.ones(10_000, np.float32)})
    async with (
        lagoon() as coordinator,
        agent(coordinator, tmp_path / "a", larger, policy=policy(tmp_path, "upload_max_bytes = 20000\n")),
    ):
        await coordinator.invite(coordinator.add(Version(model())))
        failed = await coordinator.heard("failed")
        assert (failed.reason, failed.detail.split(":")[0]) == ("policy_refused", "upload_max_bytes")
        await until(lambda: not list((tmp_path / "a" / "spool").iterdir()))
        assert coordinator.calls["Upload"] == 0
        assert [line["action"] for line in decisions(tmp_path)] == ["train.allowed", "upload.refused"]


@live
async def test_metrics_only_answers_evaluations_and_trains_nothing(tmp_path):
    runner = Instant()
    async with (
        lagoon() as coordinator,
        agent(coordinator, tmp_path / "a", runner, policy=policy(tmp_path, "metrics_only = true\n")),
    ):
        version = coordinator.add(Version(model()))
        await coordinator.invite(version)
        assert (await coordinator.heard("failed")).detail.startswith("metrics_only: ")
        asked = pb.Evaluate(run_id="run-1", task="tiny:task", version=1, model_digest=version.digest, time_left_s=30)
        await coordinator.push(evaluate=asked)
        assert (await coordinator.heard("evaluated")).statistics["accuracy"].values == [7.0, 10.0]
        assert len(runner.orders) == 1
        assert coordinator.calls["Upload"] == 0


@live
async def test_a_run_waits_for_approval_and_the_coordinator_hears_when_it_has_come(tmp_path, caplog):
    """The site's log and the coordinator's have the command that approves the run."""
    async with (
        lagoon() as coordinator,
        agent(coordinator, tmp_path / "a", policy=policy(tmp_path, 'approval = "each_run"\n')),
    ):
        version = coordinator.add(Version(model()))
        await coordinator.invite(version)
        failed = await coordinator.heard("failed")
        assert (failed.reason, failed.waits) == ("awaits_approval", True)
        [run] = PolicyHistory(tmp_path / "a").runs()
        command = f"`atoll site approve run-1 --terms {run.fingerprint}`"
        assert failed.detail == f"approval: its site's operator approves it with {command}"
        assert (
            f"run run-1 waits for approval: its site's operator approves it with {command}, here with " in caplog.text
        )
        assert f"--state {tmp_path / 'a'}" in caplog.text
        asked = pb.Evaluate(run_id="run-1", task="tiny:task", version=1, model_digest=version.digest, time_left_s=30)
        await coordinator.push(evaluate=asked)
        assert (await coordinator.heard("evaluated")).reason == "awaits_approval"
        assert caplog.text.count("waits for approval") == 1, "one line for its terms"
        PolicyHistory(tmp_path / "a").decided("run-1", Standing.APPROVED, 1.0)
        await coordinator.heard("ready")
        await coordinator.invite(version, round_id=2)
        await coordinator.accepted.wait()
        await coordinator.invite(version, round_id=3, local='{"epochs":9}')
        assert (await coordinator.heard("failed")).reason == "awaits_approval", "other terms are another question"


@live
async def test_a_run_that_is_rejected_while_it_trains_gets_nothing(tmp_path):
    runner = Instant()
    runner.go.clear()
    async with lagoon() as coordinator, agent(coordinator, tmp_path / "a", runner):
        await coordinator.invite(coordinator.add(Version(model())))
        await runner.begun.wait()
        PolicyHistory(tmp_path / "a").decided("run-1", Standing.REJECTED, 1.0)
        assert (await coordinator.heard("failed")).detail == "rejected: run 'run-1' was rejected here"
        await until(lambda: "stop" in runner.calls)
        await until(lambda: not list((tmp_path / "a" / "spool").iterdir()))
        assert coordinator.calls["Upload"] == 0


@live
async def test_while_the_policy_is_not_valid_nothing_goes_on(tmp_path):
    runner, path = Instant(), tmp_path / "policy.toml"
    runner.go.clear()
    async with site(tmp_path, "", runner) as coordinator:
        version = coordinator.add(Version(model()))
        await coordinator.invite(version)
        await runner.begun.wait()
        path.write_text("tasks = [")
        assert (await coordinator.heard("failed")).detail.startswith("policy_file: ")
        await coordinator.invite(version, round_id=2)
        assert (await coordinator.heard("failed")).round_id == 2
        assert coordinator.calls["Upload"] == 0
        policy(tmp_path)
        await coordinator.heard("ready")
        runner.go.set()
        await coordinator.invite(version, round_id=3)
        await coordinator.accepted.wait()


@live
async def test_an_upload_that_is_no_longer_allowed_ends_where_it_is(tmp_path):
    large = Instant({"w": np.ones(MIB, np.float32)})
    async with lagoon() as coordinator, agent(coordinator, tmp_path / "a", large, upload_limit=MIB // 2):
        await coordinator.invite(coordinator.add(Version(model())))
        await until(lambda: coordinator.received_bytes > 0)
        PolicyHistory(tmp_path / "a").decided("run-1", Standing.REJECTED, 1.0)
        assert (await coordinator.heard("failed")).detail == "rejected: run 'run-1' was rejected here"
        await until(lambda: not list((tmp_path / "a" / "spool").iterdir()))
        assert coordinator.received_bytes < 4 * MIB
        assert coordinator.calls["Upload"] == 1


@live
async def test_an_update_that_has_to_wait_is_kept_and_goes_on_when_it_may(tmp_path):
    large, path = Instant({"w": np.ones(MIB // 2, np.float32)}), policy(tmp_path)
    async with lagoon() as coordinator, agent(coordinator, tmp_path / "a", large, policy=path, upload_limit=MIB):
        await coordinator.invite(coordinator.add(Version(model())))
        await until(lambda: coordinator.received_bytes > 0)
        path.write_text("tasks = [")
        await until(lambda: decisions(tmp_path)[-1]["action"] == "upload.waiting")
        assert len(list((tmp_path / "a" / "spool").iterdir())) == 1
        policy(tmp_path)
        await coordinator.accepted.wait()
        assert coordinator.calls["Upload"] >= 2
        assert len(coordinator.received) == 1


@live
async def test_a_round_that_is_asked_for_again_and_again_is_no_way_around_the_days_rounds(tmp_path):
    runner = Instant()
    async with site(tmp_path, "rounds_per_day = 1\n", runner) as coordinator:
        version = coordinator.add(Version(model()))
        await coordinator.invite(version)
        await coordinator.accepted.wait()
        await until(lambda: not list((tmp_path / "a" / "spool").iterdir()))
        for local in ("{}", '{"lr":1}', '{"lr":2}'):
            await coordinator.invite(version, local=local)
            assert (await coordinator.heard("failed")).detail.startswith("rounds_per_day: ")
        assert len(runner.orders) == coordinator.calls["Upload"] == 1
        allowed = [line["action"] for line in decisions(tmp_path) if line["action"].endswith("allowed")]
        assert allowed == ["train.allowed", "upload.allowed"]


@live
async def test_every_update_that_leaves_is_in_the_sites_log(tmp_path):
    runner = Instant()
    async with site(tmp_path, "", runner) as coordinator:
        version = coordinator.add(Version(model()))
        for count in range(1, 4):
            runner.arrays = {"w": np.full(4, count, np.float32)}
            coordinator.accepted.clear()
            await coordinator.invite(version, local=f'{{"lr":{count}}}')
            await coordinator.accepted.wait()
            await until(lambda: not list((tmp_path / "a" / "spool").iterdir()))
        lines = decisions(tmp_path)
        assert [line["action"] for line in lines] == ["train.allowed", "upload.allowed"] * 3
        assert {line["digests"]["update"] for line in lines[1::2]} == set(coordinator.received)


@live
async def test_a_client_that_comes_back_goes_on_with_the_days_only_round(tmp_path):
    """Invite a client again while it trains, while its update waits, and after a restart."""
    runner, rule = Instant(), "rounds_per_day = 1\n"
    runner.go.clear()
    async with lagoon() as coordinator:
        version = coordinator.add(Version(model()))
        async with agent(coordinator, tmp_path / "a", runner, policy=policy(tmp_path, rule)):
            await coordinator.invite(version)
            await runner.begun.wait()
        runner.begun.clear()
        async with agent(coordinator, tmp_path / "a", runner, policy=policy(tmp_path, rule)):
            await coordinator.connected(2)
            await coordinator.invite(version)
            await runner.begun.wait()
            coordinator.pushes.put_nowait(None)
            await coordinator.connected(3)
            await coordinator.invite(version, time_left=50.0)
            await until(lambda: runner.calls)
            coordinator.upload_status = (grpc.StatusCode.UNAVAILABLE, "not now")
            runner.go.set()
            await until(lambda: coordinator.calls["Upload"] >= 2)
            await coordinator.invite(version)
            coordinator.upload_status = None
            await coordinator.accepted.wait()
        assert "failed" not in kinds(coordinator)
        assert len(coordinator.received) == 1
        assert {line["action"] for line in decisions(tmp_path)} == {"train.allowed", "upload.allowed"}


def kinds(coordinator):
    """Return the kinds of the messages that the test has not read yet."""
    waiting = [coordinator.messages.get_nowait() for _ in range(coordinator.messages.qsize())]
    return {message.WhichOneof("message") for message in waiting}


SECRET = 'ValueError: cannot parse record: patient 4711, J. Doe\n  File "/data/load.py", line 7'


@pytest.mark.parametrize(("extra", "disclosed"), [("", ""), ("error_details = true\n", SECRET)])
def test_what_the_tasks_code_raised_leaves_only_where_the_policy_says_so(tmp_path, caplog, extra, disclosed):
    runner = Instant()
    runner.error = RunnerFailed(FailureReason.TRAINING_FAILED, SECRET)

    @live
    async def scenario():
        async with site(tmp_path, extra, runner) as coordinator:
            version = coordinator.add(Version(model()))
            await coordinator.invite(version)
            failed = await coordinator.heard("failed")
            assert (failed.reason, failed.detail) == ("training_failed", disclosed)
            asked = pb.Evaluate(
                run_id="run-1", task="tiny:task", version=1, model_digest=version.digest, time_left_s=30
            )
            await coordinator.push(evaluate=asked)
            error = (await coordinator.heard("evaluated")).error
            assert error == (f"training_failed: {disclosed}" if disclosed else "training_failed")

    scenario()
    assert caplog.text.count("patient 4711") == 2, "the whole text is in the agent's own log"
