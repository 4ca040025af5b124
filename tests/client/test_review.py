"""The findings of a hostile review on the agent's side; each test failed before its fix."""

import math

import pytest

from atoll.client.work.runner import RunnerFailed
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import FailureReason
from atoll.task.metrics import SUMS_MAX
from tests.client.fake_coordinator import Instant, Version, agent, lagoon, live, model, until


class Measuring(Instant):
    """A runner whose measurements the test sets."""

    def __init__(self, measure):
        super().__init__()
        self.measure = measure

    async def evaluate(self, order):
        return self.measure()


def evaluate(version, **fields):
    manifest = version.manifest.encode()
    fields = {"run_id": "run-1", "task": "tiny:task", "version": 1, "time_left_s": 30.0, "manifest": manifest} | fields
    return pb.Evaluate(model_digest=version.digest, **fields)


@live
async def test_failure_whose_words_are_no_text_is_reported(tmp_path):
    runner = Instant()
    runner.error = RunnerFailed(FailureReason.TRAINING_FAILED, "no such file: 'caf\udce9'")
    async with lagoon() as coordinator, agent(coordinator, tmp_path, runner):
        await coordinator.invite(coordinator.add(Version(model())))
        failed = await coordinator.heard("failed")
        assert (failed.reason, failed.detail) == ("training_failed", "no such file: 'caf?'")


@live
async def test_metric_whose_name_is_no_text_costs_no_update(tmp_path):
    class Odd(Instant):
        async def train(self, order):
            trained = await super().train(order)
            trained.statistics["caf\udce9"] = (1.0,)
            return trained

    async with lagoon() as coordinator, agent(coordinator, tmp_path, Odd()):
        await coordinator.invite(coordinator.add(Version(model())))
        await coordinator.accepted.wait()


@live
async def test_worker_that_cannot_be_started_costs_an_evaluation_and_not_the_agent(tmp_path):
    def no_process():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async with lagoon() as coordinator, agent(coordinator, tmp_path, Measuring(no_process)):
        await coordinator.push(evaluate=evaluate(coordinator.add(Version(model()))))
        assert "temporarily unavailable" in (await coordinator.heard("evaluated")).error


@live
async def test_more_sums_than_a_message_holds_are_an_answer_without_them(tmp_path):
    def confusion():
        return {"confusion": (0.0,) * 1_000_000}

    async with lagoon() as coordinator, agent(coordinator, tmp_path, Measuring(confusion)):
        await coordinator.push(evaluate=evaluate(coordinator.add(Version(model()))))
        assert str(SUMS_MAX) in (await coordinator.heard("evaluated")).error


@pytest.mark.parametrize("seconds", [1e300, 1e12])
def test_time_that_no_calendar_has_costs_no_agent(tmp_path, seconds):
    @live
    async def check(tmp_path):
        async with lagoon() as coordinator, agent(coordinator, tmp_path):
            await coordinator.invite(coordinator.add(Version(model())), time_left=seconds)
            await coordinator.accepted.wait()

    check(tmp_path)


@live
async def test_heartbeat_that_is_no_number_is_not_believed(tmp_path):
    async with lagoon() as coordinator:
        coordinator.welcome = pb.Welcome(heartbeat_s=math.nan, lease_s=15.0)
        async with agent(coordinator, tmp_path):
            await coordinator.invite(coordinator.add(Version(model())))
            await coordinator.accepted.wait()
            await until(lambda: coordinator.calls["Session"] == 1)


@live
async def test_number_of_examples_that_no_message_holds_is_cut(tmp_path):
    class Vast(Instant):
        async def describe(self):
            return 10**30

    async with lagoon() as coordinator, agent(coordinator, tmp_path, Vast()):
        await coordinator.connected()
        assert coordinator.hellos[0].num_examples == 2**53
