"""Evaluations by clients in secure sums: schedules of faults end with exact metrics of the members, or with none."""

import random
from dataclasses import replace

import pytest

from atoll.protocol.vocabulary import LossReason, RunState, Version
from atoll.server.rounds import events as ev
from atoll.server.rounds import session_events as of_sessions
from atoll.server.rounds.client_evaluation import shown_sum
from atoll.server.rounds.evaluations import NOT_IN_SUM
from atoll.server.rounds.run_rules import WatchedMetric
from atoll.server.rounds.waiting import what_a_run_waits_for
from tests.server.rounds.evaluated_federation import EvaluatedRun, metrics_of


def test_each_version_is_evaluated_in_one_sum_of_all_clients():
    run = EvaluatedRun(4, random.Random(1))
    assert run.run()
    assert [(closed.version, closed.summed) for closed in run.closed] == [(1, (*run.sites,)), (2, (*run.sites,))]
    assert not run.reasons


def test_the_sums_are_shown_as_those_of_a_plain_evaluation():
    run = EvaluatedRun(5, random.Random(2), rounds=1)
    assert run.run()
    [closed] = run.closed
    found, why = shown_sum(closed)
    assert (found.num_clients, why) == (5, "")
    plain = ev.CloseEvaluation(Version(1), {name: metrics_of(name, 1) for name in run.sites}, {})
    assert found.sums == shown_sum(plain)[0].sums


def test_many_clients_are_several_sessions_and_their_sums_are_added():
    run = EvaluatedRun(11, random.Random(3), rounds=1, session_max=5)
    assert run.run()
    [closed] = run.closed
    assert closed.summed == (*run.sites,)
    assert run.told.count("MaskedCame") == 11


def test_a_chosen_part_of_the_clients_is_one_sum():
    run = EvaluatedRun(7, random.Random(3), rounds=1, most=3)
    assert run.run()
    assert len(run.closed[0].summed) == 3


def test_fewer_than_three_clients_are_not_asked():
    run = EvaluatedRun(4, random.Random(4), rounds=1, most=2)
    assert run.run()
    [closed] = run.closed
    assert closed.sums is None
    assert {*closed.failures.values()} == {"a secure sum has at least 3 members; asked: 2"}
    assert not run.evaluations


@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_of_faults_adds_the_metrics_of_the_members_exactly_or_ends(seed):
    draw = random.Random(seed)
    count, faults = draw.randint(3, 7), draw.choice([0.01, 0.03, 0.1])
    run = EvaluatedRun(count, draw, faults=faults, attempts=draw.randint(1, 3), rounds=2)
    run.run()
    if run.machine.ledger.state is RunState.FINISHED:
        assert [closed.version for closed in run.closed][-1:] == [2]


def test_a_schedule_of_faults_has_other_attempts_and_evaluations_without_a_result():
    results, seed = set(), 0
    while results != {"sums", "no sums", "attempt 1", "attempt 2"} and (seed := seed + 1) < 60:
        run = EvaluatedRun(6, random.Random(seed), faults=0.08, rounds=2, attempts=2)
        run.run()
        results |= {"sums" if closed.summed else "no sums" for closed in run.closed}
        results |= {f"attempt {attempt}" for attempt in run.attempts}
    assert seed < 60


def evaluating(run):
    """Run until a version is being evaluated, and return what is asked."""
    run.post(ev.RunStarted("model-0"))
    for name in run.sites:
        run.join(name)
    while run.machine.ledger.evaluation is None:
        run.queue.pop(0)()
    return run.machine.sums_of_evaluation


def drained(run):
    while run.queue:
        run.queue.pop(0)()


def test_metrics_of_a_single_site_count_nowhere():
    run = EvaluatedRun(4, random.Random(5), rounds=1)
    evaluating(run)
    first = next(iter(run.sites))
    run.post(ev.ClientEvaluated(first, Version(1), metrics_of(first, 1)))
    drained(run)
    [closed] = run.closed
    assert closed.failures == {first: NOT_IN_SUM}
    assert closed.summed == tuple(sorted(run.sites))[1:]


def test_a_client_that_fails_or_is_lost_is_not_waited_for():
    run = EvaluatedRun(5, random.Random(6), rounds=1)
    evaluating(run)
    first, second, *others = run.sites
    run.post(ev.ClientEvaluated(first, Version(1), None, "this site has no test data"))
    run.connected.discard(second)
    run.post(ev.ClientLost(second, LossReason.LEASE_EXPIRED, silent_for=1.0))
    drained(run)
    [closed] = run.closed
    assert closed.summed == tuple(others)
    assert closed.failures == {first: "this site has no test data", second: "lost: lease_expired"}


def test_a_client_without_keys_by_the_deadline_is_left_out():
    run = EvaluatedRun(4, random.Random(7), rounds=1)
    sums = evaluating(run)
    silent = [*run.sites][2]
    run.connected.discard(silent)
    drained(run)
    assert run.machine.deadline == sums.deadline
    run.now = run.machine.deadline
    run.post(ev.TimePassed())
    drained(run)
    assert run.closed[0].failures == {silent: "did not answer in time"}
    assert len(run.closed[0].summed) == 3


def test_a_crash_of_the_coordinator_at_each_message_changes_no_sum():
    whole = EvaluatedRun(3, random.Random(8), rounds=1)
    assert whole.run()
    for step in range(1, len(whole.told) + 1):
        run = EvaluatedRun(3, random.Random(8), rounds=1)
        evaluating(run)
        while len(run.told) < step:
            run.queue.pop(0)()
        run.crash()
        while run.machine.ledger.state is RunState.RUNNING:
            run.queue.pop(0)() if run.queue else run.post(ev.TimePassed())
        assert run.closed[-1].summed == (*run.sites,)


def test_a_run_says_whose_metrics_and_whose_messages_it_waits_for():
    run = EvaluatedRun(3, random.Random(13), rounds=1)
    evaluating(run)
    said = [what_a_run_waits_for(run.machine)]
    while run.machine.ledger.evaluation is not None:
        run.queue.pop(0)()
        if (sentence := what_a_run_waits_for(run.machine)) != said[-1]:
            said.append(sentence)
    assert said[:3] == [
        "version 1 is being evaluated by site-00, site-01, site-02",
        "version 1 is being evaluated by site-01, site-02",
        "version 1 is being evaluated by site-02",
    ]
    assert "the secure sum of the metrics of version 1 waits for site-00, site-01, site-02" in said
    assert "the secure sum of the metrics of version 1 is being opened" in said


def test_an_agent_that_joins_no_sessions_is_not_asked():
    run = EvaluatedRun(4, random.Random(9), rounds=1)
    join, (old, *_) = run.join, run.sites

    def joined(name):
        if name == old:
            run.post(ev.ClientJoined(name, "old", joins_sessions=False, software="atoll 0.1"))
        else:
            join(name)

    run.join = joined
    run.rules = replace(run.rules, policy=replace_policy(run.rules.policy, cohort_size=3))
    run.machine = type(run.machine)(run.rules)
    assert run.run()
    assert run.closed[0].summed == tuple(name for name in run.sites if name != old)
    assert old not in run.closed[0].failures


def test_a_site_that_is_not_trusted_is_left_out_and_the_others_make_another_attempt():
    run = EvaluatedRun(5, random.Random(12), rounds=1)
    evaluating(run)
    stranger, *others = run.sites
    for name in others:
        del run.sites[name].pinned[stranger]
    drained(run)
    [closed] = run.closed
    assert closed.summed == tuple(others)
    assert "it was left out" in closed.failures[stranger]
    assert "the key of site-00 is not pinned" in closed.failures[stranger]
    assert run.attempts == {1, 2}


def replace_policy(policy, **changes):
    return policy.model_copy(update=changes)


def test_the_values_of_the_sums_choose_the_best_version():
    run = EvaluatedRun(4, random.Random(10), rounds=2)
    run.rules = replace(run.rules, best=WatchedMetric("accuracy", "clients", "max"))
    run.machine = type(run.machine)(run.rules)
    carry_out = run.carry_out

    def computed(effect):
        if isinstance(effect, ev.ComputeMetrics):
            right, count = effect.statistics["accuracy"]
            values = {"accuracy": right / count}
            run.queue.append(lambda: run.post(ev.MetricsComputed(effect.version, effect.source, values)))
        else:
            carry_out(effect)

    run.carry_out = computed
    assert run.run()
    values = {closed.version: closed.sums["accuracy"][0] / closed.sums["accuracy"][1] for closed in run.closed}
    best = run.machine.ledger.best
    assert (best.version, best.value) == max(values.items(), key=lambda item: (item[1], -item[0]))


def test_a_sum_that_is_none_of_its_members_is_dropped_with_the_reason():
    run = EvaluatedRun(3, random.Random(11), rounds=1)

    def opened(effect):
        summed = effect.sum
        at = (effect.round_id, summed.session, summed.attempt)
        run.queue.append(
            lambda: run.post(of_sessions.SumOpened(*at, (), "evaluation", fault="its canaries are 7 instead of 3"))
        )

    run.open_metrics = opened
    assert run.run()
    [closed] = run.closed
    assert (closed.summed, closed.sums) == ((), None)
    assert {*closed.failures.values()} == {"its secure sum has no result: its canaries are 7 instead of 3"}
