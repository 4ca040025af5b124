"""The evaluations of a run's versions, and what their metrics determine: the best version, an early stop. Pure.

A run with an early stop opens its next round after the value of the newest version is known, so that its end depends on
the values alone and never on the time that an evaluation takes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.protocol.secure.session_size import MEMBERS_MIN
from atoll.protocol.vocabulary import DECLINES, TERMINAL, ClientId, RunState, Version
from atoll.server.rounds.client_evaluation import ClientEvaluation, clients_to_ask, shown_sum
from atoll.server.rounds.events import (
    AskEvaluation,
    ClientEvaluated,
    ComputeMetrics,
    Effect,
    EvaluateModel,
    MetricsComputed,
    ModelEvaluated,
    PauseRequested,
    Sums,
)
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.run_rules import MeasuredVersion, RunRules, Source, WatchedMetric, value_in
from atoll.server.rounds.session_events import OpeningFailed, SessionEvent, SessionLeft, SumOpened
from atoll.server.rounds.update_claims import most_claimed, why_most
from atoll.server.rounds.update_intake import Intake

if TYPE_CHECKING:
    from atoll.server.rounds.secure_evaluation import SecureEvaluation

NOT_IN_SUM = "it answered outside of its secure sum"
"""Failure of a client that sends metrics to a coordinator which wants none of a single site."""


class Evaluations(Intake, ABC):
    """Part of a run's machine that requests evaluations and handles their results; `run_machine` has the rest."""

    _sums: "SecureEvaluation | None" = None

    @abstractmethod
    def _next_round_or_end(self) -> Effects: ...

    @abstractmethod
    def _pause(self, event: PauseRequested, now: float) -> Effects: ...

    # ------------------------------------------------------------ requests and answers

    def _evaluate(self, now: float) -> Effects:
        """Request the evaluations of the committed version: on the server's data, and by the clients."""
        ledger, rules = self.ledger, self.rules
        is_last = ledger.version >= rules.rounds
        effects: list[Effect] = []
        every = rules.evaluate_server_every
        if every and (ledger.version % every == 0 or is_last):
            ledger.unevaluated.append(ledger.version)
            effects.append(EvaluateModel(ledger.version))
        every = rules.evaluate_clients_every
        if every and (ledger.version % every == 0 or is_last):
            connected = (c for c in ledger.membership.evaluating() if not self.invitations.is_training(c))
            most = rules.evaluate_clients_max
            asked = clients_to_ask(connected, most=most, seed=rules.seed, version=ledger.version)
            effects += self._ask(asked, now) if asked else ()
        return tuple(effects)

    def _ask(self, clients: list[ClientId], now: float) -> Effects:
        """Request the evaluation of the newest version by clients."""
        ledger, deadline = self.ledger, now + self.rules.evaluation_deadline
        evaluation = ClientEvaluation(ledger.version, deadline, clients, asked_at=now)
        if self.rules.secure is not None and len(clients) < MEMBERS_MIN:
            why = f"a secure sum has at least {MEMBERS_MIN} members; asked: {len(clients)}"
            evaluation.failures |= dict.fromkeys(clients, why)
            return (evaluation.close(),)
        ledger.evaluation = evaluation
        if (sums := self.sums_of_evaluation) is not None:
            return tuple(sums.asked(client_id) for client_id in clients)
        return tuple(self._request(client_id) for client_id in clients)

    def _request(self, client_id: ClientId) -> AskEvaluation:
        assert self.ledger.evaluation is not None
        return self.ledger.evaluation.ask(client_id, self.ledger.membership.counted_round(client_id))

    def _asked_again(self, client_id: ClientId) -> Effects:
        """Repeat the request to a client that has connected again, or what it was last told of its secure sum."""
        if (sums := self.sums_of_evaluation) is not None:
            return sums.joined(client_id)
        evaluation = self.ledger.evaluation
        return (self._request(client_id),) if evaluation and evaluation.is_waiting_for(client_id) else ()

    @property
    def sums_of_evaluation(self) -> "SecureEvaluation | None":
        """The secure sums of the open evaluation; None: there is none, or it is plain."""
        evaluation, rules = self.ledger.evaluation, self.rules.secure
        if evaluation is None or rules is None:
            return None
        if self._sums is None or self._sums.evaluation is not evaluation:
            from atoll.server.rounds.secure_evaluation import SecureEvaluation

            self._sums = SecureEvaluation(evaluation, rules, self.rules.seed, self._request)
        return self._sums

    @property
    def _evaluation_deadline(self) -> float | None:
        """The time at which the open evaluation continues without the missing clients; None: no timer runs."""
        if (sums := self.sums_of_evaluation) is not None:
            return None if (by := sums.deadline) == math.inf else by
        return self.ledger.evaluation.deadline if self.ledger.evaluation else None

    def _extend_evaluation(self, seconds: float) -> None:
        """Move the deadlines of the open evaluation by a time during which nothing could arrive."""
        if (sums := self.sums_of_evaluation) is not None:
            sums.extend(seconds)
        if self.ledger.evaluation is not None:
            self.ledger.evaluation.deadline += seconds

    def _model_evaluated(self, event: ModelEvaluated, now: float) -> Effects:
        if event.version not in self.ledger.unevaluated:
            return ()
        self.ledger.unevaluated.remove(event.version)
        return (*self._compute(event.version, "server", event.statistics, event.detail), *self._go_on())

    def _client_evaluated(self, event: ClientEvaluated, now: float) -> Effects:
        if event.reason is not None:
            self.ledger.membership.noted(event.client_id, event.reason, event.detail, now)
        if event.reason in DECLINES:
            self.ledger.membership.declined_evaluation(event.client_id)
        if self.ledger.evaluation is None:
            return ()
        if (sums := self.sums_of_evaluation) is not None:
            is_its = event.version == self.ledger.evaluation.version
            found = sums.gave_up(event.client_id, event.detail or NOT_IN_SUM, now) if is_its else ()
            return (*found, *self._close_evaluation_when_complete())
        most = most_claimed(self.ledger.membership, event.client_id, self.rules.policy)
        self.ledger.evaluation.answered(event, most, lambda: why_most(most, self.rules.policy))
        return self._close_evaluation_when_complete()

    def _evaluation_lost(self, client_id: ClientId, reason: str, now: float) -> Effects:
        """Continue the open evaluation without a client that is lost."""
        effects: Effects = ()
        if (sums := self.sums_of_evaluation) is not None:
            effects = sums.gave_up(client_id, f"lost: {reason}", now)
        elif self.ledger.evaluation is not None:
            self.ledger.evaluation.lost(client_id, reason)
        return (*effects, *self._close_evaluation_when_complete())

    def _evaluation_overdue(self, now: float) -> Effects:
        sums = self.sums_of_evaluation
        return self._close_evaluation() if sums is None else self._with_sums(sums.time_passed(now))

    def _event_of_evaluation(self, event: SessionEvent, now: float) -> Effects:
        """Take an event of the secure sums of the open evaluation; one of another version changes nothing."""
        if (sums := self.sums_of_evaluation) is None:
            return ()
        if isinstance(event, SumOpened):
            sums.sum_opened(event)
            return self._with_sums(())
        if isinstance(event, OpeningFailed):
            return self._with_sums(sums.opening_failed(event, now))
        if not sums.is_news_of(event):
            return ()
        if isinstance(event, SessionLeft):
            self.ledger.membership.noted(event.client_id, event.reason, event.detail, now)
        return self._with_sums(sums.came(event, now))

    def _with_sums(self, effects: Effects) -> Effects:
        return (*effects, *self._close_evaluation_when_complete())

    def _close_evaluation_when_complete(self) -> Effects:
        evaluation, sums = self.ledger.evaluation, self.sums_of_evaluation
        is_complete = sums.is_complete if sums is not None else evaluation is not None and evaluation.is_complete
        return self._close_evaluation() if is_complete else ()

    def _close_evaluation(self) -> Effects:
        sums_of_evaluation = self.sums_of_evaluation
        evaluation, self.ledger.evaluation, self._sums = self.ledger.evaluation, None, None
        assert evaluation is not None
        if sums_of_evaluation is not None:
            closed = sums_of_evaluation.close()
        else:
            closed = evaluation.close(self.rules.policy.max_share)
        found, why = shown_sum(closed)
        sums = found.sums if self.rules.watches("clients") else None
        why_not = why or "; ".join(sorted(set(closed.failures.values())))
        return (closed, *self._compute(closed.version, "clients", sums, why_not), *self._go_on())

    # ------------------------------------------------------------ metrics

    def _compute(self, version: Version, source: Source, statistics: Sums | None, why_not: str) -> Effects:
        """Request the values of an evaluation whose metrics choose the best version or end the run early."""
        if not self.rules.watches(source):
            return ()
        if not statistics:
            keys = [key for key, _ in self._unknown(source)]
            fault = f"{' and '.join(keys)}: the {source} could not measure version {version}: {why_not}"
            return self._pause(PauseRequested(fault), self.ledger.now) if keys else ()
        effect = ComputeMetrics(version, source, statistics)
        self.ledger.computing.append(effect)
        return (effect,)

    @property
    def _awaits_metric(self) -> bool:
        """Return whether an early stop needs a value that is not known yet."""
        stop, ledger = self.rules.stop, self.ledger
        if stop is None:
            return False
        source = stop.metric.source
        is_evaluating = source == "server" and bool(ledger.unevaluated)
        return is_evaluating or any(effect.source == source for effect in ledger.computing)

    @property
    def _has_too_many_unevaluated(self) -> bool:
        """Return whether the next round must wait until the server has evaluated one of the waiting versions."""
        most, is_last = self.rules.unevaluated_max, self.ledger.version >= self.rules.rounds
        return 0 < most <= len(self.ledger.unevaluated) and not is_last

    def _metrics_computed(self, event: MetricsComputed, now: float) -> Effects:
        ledger = self.ledger
        others = [e for e in ledger.computing if (e.version, e.source) != (event.version, event.source)]
        if len(others) == len(ledger.computing):
            return ()
        ledger.computing = others
        self._note_best(event)
        self._note_progress(event)
        effects: Effects = ()
        if faults := [*self._absent(event)]:
            effects = self._pause(PauseRequested("; ".join(faults)), now)
        return (*effects, *self._go_on())

    def _note_best(self, event: MetricsComputed) -> None:
        best, ledger = self.rules.best, self.ledger
        if best is None or (value := value_in(best, event.values, event.source)) is None:
            return
        if event.version not in ledger.lost and (ledger.best is None or best.is_better(value, ledger.best.value)):
            ledger.best = MeasuredVersion(event.version, value)

    def _note_progress(self, event: MetricsComputed) -> None:
        stop, ledger = self.rules.stop, self.ledger
        if stop is None or ledger.state is not RunState.RUNNING:
            return
        if (value := value_in(stop.metric, event.values, event.source)) is not None:
            measured = MeasuredVersion(event.version, value)
            ledger.progress = stop.after(ledger.progress, measured)
            ledger.early_stop = stop.cause(ledger.progress, measured)

    def _absent(self, event: MetricsComputed) -> Iterator[str]:
        """Yield the fault of each watched metric that the first evaluation of its data lacks."""
        for key, metric in self._unknown(event.source):
            if event.values and metric.name not in event.values:
                names = ", ".join(sorted(event.values))
                yield f"{key}: got {metric.name!r}, which the {metric.source} did not measure; allowed: {names}"

    def _unknown(self, source: Source) -> Iterator[tuple[str, WatchedMetric]]:
        """Yield the deciding metrics of a data source that have no value yet, each as (settings key, metric)."""
        rules, ledger = self.rules, self.ledger
        if rules.best is not None and rules.best.source == source and ledger.best is None:
            yield "model.best", rules.best
        if rules.stop is not None and rules.stop.metric.source == source and ledger.progress is None:
            yield "stop.metric", rules.stop.metric

    @property
    def undecided(self) -> list[str]:
        """The messages about metrics that should have decided about an ended run and never had a value."""
        if self.ledger.state not in TERMINAL or not self.ledger.version:
            return []
        unknown = (*self._unknown("server"), *self._unknown("clients"))
        return [
            f"{key} has decided nothing: {metric.name} ({metric.source}) never had a value" for key, metric in unknown
        ]

    def _forget_measures(self, rules: RunRules) -> None:
        """Forget the measurements of metrics other than the new rules'."""
        if rules.best != self.rules.best:
            self.ledger.best = None
        if rules.stop != self.rules.stop:
            self.ledger.progress, self.ledger.early_stop = None, ""

    def _go_on(self) -> Effects:
        """Open the next round or end the run, if it has only waited for an evaluation."""
        ledger = self.ledger
        is_waiting = ledger.state is RunState.RUNNING and self.round is None and not ledger.is_round_due
        return self._next_round_or_end() if is_waiting else ()
