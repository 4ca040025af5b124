"""The coordinator of a simulated federation: the run machine of a real one, and the execution of its effects.

There is no journal: `snapshots` saves the state at the end of a round. Work of the coordinator (a draw, a fold, an
evaluation) takes no virtual time, because policies are compared by the time that clients need.
"""

from atoll.aggregation.masked.no_sum import NoSum
from atoll.client.session import events as client
from atoll.protocol.secure import wire
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, Version
from atoll.server.config.run import RunConfig
from atoll.server.rounds.events import (
    Abandon,
    Accept,
    Aggregate,
    Aggregated,
    AggregationFailed,
    AskEvaluation,
    ClientEvaluated,
    ClientFailed,
    CloseEvaluation,
    CohortDrawn,
    Commit,
    ComputeMetrics,
    DrawCohort,
    Effect,
    EndRun,
    EvaluateModel,
    Invite,
    MetricsComputed,
    ModelEvaluated,
    OpenNextRound,
    PauseRun,
    Reject,
    Release,
    RoundDue,
    SamplerFailed,
    StopRequested,
    Update,
)
from atoll.server.rounds.relevance import is_asked, is_failure_news, is_first_upload
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.session_events import OpenSum, SumPlace, TellMember
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler, SamplerError, draw
from atoll.simulations.federation.coordinator import Coordinator
from atoll.simulations.federation.host import Client, Host
from atoll.simulations.federation.models import Models
from atoll.simulations.federation.timeline import EPOCH, Timeline
from atoll.simulations.secure.site_sums import Said
from atoll.simulations.secure.sums import CoordinatorSums
from atoll.task.metrics import finite, values, why_refused
from atoll.task.randomness import training_seed


class Service(Coordinator[RunMachine]):
    """Coordinator of one simulated run of rounds: the run machine, and the execution of its effects.

    Args:
        host: the federation, which folds, measures and records.
        timeline: virtual time.
        versions: the versions of the model.
        config: the settings of the run.
        machine: the run machine.
        sampler: the sampler of the cohorts.
        lease: the time after which a disconnected client is lost [virtual s].
        round_due: the beginning of the first round of a resumed run [virtual s]; None: as the run machine decides.
    """

    def __init__(
        self,
        host: Host,
        timeline: Timeline,
        versions: Models,
        config: RunConfig,
        machine: RunMachine,
        sampler: Sampler | Oort,
        lease: float,
        round_due: float | None = None,
    ) -> None:
        super().__init__(timeline, config, machine, lease)
        sums = host.sums
        self._host, self._versions, self._sampler, self._round_due = host, versions, sampler, round_due
        self.bytes_up_plain = 0
        self._local = config.local_text
        self._codec, self._algorithm = config.aggregation.codec_name, config.aggregation.training
        self._sums = None if sums is None else CoordinatorSums(sums, self.run_id, self._task, versions, machine)
        self._cryptography = None if sums is None else sums.cryptography
        self._liar = None if sums is None else sums.liar
        self._fetched = Digest(""), 0
        self._requests: dict[tuple[Version, RoundId, float, SumPlace | None], client.EvaluationRequest] = {}

    def stop(self, reason: str) -> None:
        """Stop the run on behalf of the operator."""
        if self.is_running:
            self.post(StopRequested(reason))

    # ------------------------------------------------------------ effects out

    def _act(self, effect: Effect) -> None:
        match effect:
            case Accept() | Reject():
                pass  # the caller of `post` answers the client
            case Invite(client_id):
                self._send(client_id, client.Asked(self._invitation(effect)))
            case Release():
                self._release(effect)
            case TellMember(client_id):
                if (site := self._connected.get(client_id)) is not None:
                    site.asked_in_sum(effect if self._liar is None else self._liar.told(effect))
            case AskEvaluation(client_id):
                self._ask_evaluation(client_id, self._evaluation_request(effect))
            case Commit() | Abandon():
                self._host.round_ended(effect)
            case CloseEvaluation():
                self._host.clients_evaluated(effect)
            case EndRun() | PauseRun():  # in a simulation no operator resumes the run
                self._host.run_ended()
            case _:
                self._begin_duty(effect)

    def _begin_duty(self, effect: Effect) -> None:
        """Plan the coordinator's work for after the other effects of the same event."""
        match effect:
            case DrawCohort():
                self._timeline.after(0.0, self._draw, effect)
            case Aggregate():
                self._timeline.after(0.0, self._aggregate, effect)
            case OpenSum():
                self._timeline.after(0.0, self._open_sum, effect)
            case EvaluateModel(version):
                self._timeline.after(0.0, self._evaluate, version)
            case ComputeMetrics():
                self._timeline.after(0.0, self._compute, effect)
            case OpenNextRound(not_before):
                pause = self.config.pause if self.machine.ledger.next_round > 1 else 0.0
                due, self._round_due = self._round_due, None  # a part of a resumed run's pause has passed
                soonest = max(self._timeline.now + pause, not_before)
                self._timeline.at(soonest if due is None else due, self._open_next_round)
            case _:
                pass

    def _ask_evaluation(self, client_id: ClientId, request: client.EvaluationRequest) -> None:
        if client_id in self._connected:
            self._host.evaluation_asked(client_id, request)
        self._send(client_id, client.Asked(request))

    def _invitation(self, effect: Invite) -> client.Invitation:
        seed = training_seed(self.config.seed, self.config.name, effect.round_id, effect.client_id)
        place = effect.sum
        terms = None
        if place is not None and self._sums is not None:
            terms = self._sums.terms(effect.round_id, effect.base_version, place)
        return client.Invitation(
            self.run_id,
            effect.round_id,
            self._task,
            effect.base_version,
            self._versions.version(effect.base_version).digest,
            max(0.0, effect.deadline - self._timeline.now),
            seed=seed,
            local=self._local,
            codec=self._codec,
            algorithm=self._algorithm,
            counted_round=effect.counted_round,
            model_seed=self.config.seed,
            asked_at=EPOCH + effect.asked_at,
            secure=terms,
            ranges=() if place is None else place.ranges,
        )

    def _evaluation_request(self, effect: AskEvaluation) -> client.EvaluationRequest:
        time_left = max(0.0, effect.deadline - self._timeline.now)
        same = effect.version, effect.counted_round, time_left, effect.sum
        if same not in self._requests:  # most clients are asked the same
            self._requests = {key: request for key, request in self._requests.items() if key[0] == effect.version}
            self._requests[same] = client.EvaluationRequest(
                self.run_id,
                effect.version,
                self._task,
                self._versions.version(effect.version).digest,
                time_left,
                local=self._local,
                counted_round=effect.counted_round,
                model_seed=self.config.seed,
                asked_at=EPOCH + effect.asked_at,
                secure=None if self._sums is None else self._sums.terms_of_request(effect),
            )
        return self._requests[same]

    def _draw(self, effect: DrawCohort) -> None:
        try:
            clients = draw(
                self._sampler,
                seed=self.config.seed,
                round_id=effect.round_id,
                count=effect.count,
                candidates=effect.candidates,
                number=effect.number,
                relaxed=effect.relaxed,
            )
        except SamplerError as error:
            self.post(SamplerFailed(effect.round_id, str(error)))
            return
        self.post(CohortDrawn(effect.round_id, clients))

    def _aggregate(self, effect: Aggregate) -> None:
        try:
            self.post(self._folded(effect))
        except (ValueError, OSError) as error:
            dropped = error.dropped if isinstance(error, NoSum) else {}
            self.post(AggregationFailed(effect.round_id, f"{type(error).__name__}: {error}"[:2000], dropped))

    def _folded(self, effect: Aggregate) -> Aggregated:
        if not effect.sums:
            digest = self._host.fold(effect)
            return Aggregated(effect.round_id, digest, clip_norm=self._host.next_clip_norm(effect))
        sums = self._host.fold_sums(effect)
        return Aggregated(effect.round_id, sums.digest, sums.dropped, sums.ranges, sums.statistics)

    def _open_sum(self, effect: OpenSum) -> None:
        assert self._cryptography is not None
        assert self._sums is not None
        self.post(self._cryptography.opening_of(effect, self._sums.metrics))

    def _evaluate(self, version: Version) -> None:
        found = self._host.evaluate(version)
        if isinstance(found, str):
            self.post(ModelEvaluated(version, None, found))
            return
        self.post(ModelEvaluated(version, found))

    def _compute(self, effect: ComputeMetrics) -> None:
        found = values(self._host.metrics, effect.statistics)
        self.post(MetricsComputed(effect.version, effect.source, finite(found)))

    def _open_next_round(self) -> None:
        if self.is_running:
            self._host.next_round()
            self.post(RoundDue())

    # ------------------------------------------------------------ clients

    def heard(self, site: Client, message: client.Effect) -> None:
        """Handle a client's report: that it failed, or the result of its evaluation."""
        match message:
            case client.ReportFailure(_, round_id, reason, detail):
                if is_failure_news(self.machine, site.client_id, round_id):
                    self.post(ClientFailed(site.client_id, round_id, reason, detail))
            case client.ReportEvaluation(_, version, sums, detail):
                if is_asked(self.machine, site.client_id, version):
                    if sums and not all(sums.values()):
                        detail = detail or why_refused(sums)
                    self.post(ClientEvaluated(site.client_id, version, sums, detail))

    def heard_in_sum(self, site: Client, of: SessionName, message: Said) -> None:
        """Handle a message of a client's member of a session."""
        if self._liar is not None and (another := self._liar.heard(site.client_id, of, message)) is not None:
            self._act(another)
        if self.is_running and self._sums is not None:
            event = self._sums.event_of(site.client_id, wire.answer_message(of, message))
            if event is not None:
                self.post(event)

    # ------------------------------------------------------------ models and updates

    def bytes_of(self, digest: Digest) -> int:
        """Return the size of a version [bytes]; the last result is cached for the rest of the cohort."""
        if digest != self._fetched[0]:
            version = self._versions.by_digest(digest)
            assert version is not None
            self._fetched = digest, version.manifest.num_bytes
        return self._fetched[1]

    def _is_hopeless(self, update: Update) -> bool:
        return self.machine.is_hopeless(update)

    def _fault_of(self, update: Update) -> str:
        return self.config.aggregation.fault_of_rows(update.num_bytes)

    def _is_first_upload(self, update: Update) -> bool:
        return is_first_upload(self.machine, update)

    def update_arrived(self, update: Update) -> client.Answered:
        """Receive the bytes of an update, and return the verdict."""
        self.bytes_up_plain += update.plain_bytes or update.num_bytes
        return super().update_arrived(update)
