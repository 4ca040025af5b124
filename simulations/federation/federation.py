"""A whole federation in virtual time: the coordinator's run machine, the clients' sessions, real training, real folds.

    with Federation(setting, folder) as federation:
        result = federation.run()

Decisions and outcome depend on the settings alone, not on real durations or the number of workers. An interruption is a
crash of all processes at the end of a round: clients that were working start again.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.client.session.events import EvaluationRequest, Invitation
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId, Digest, RunState, Version
from atoll.server.config.run import RunConfig
from atoll.server.config.secure import faults_of_layout
from atoll.server.folding.sums import SumsFolded
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import (
    Abandon,
    Aggregate,
    CloseEvaluation,
    Commit,
    CoordinatorStarted,
    RunStarted,
)
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler
from atoll.simulations.attacks.adversary import Adversary
from atoll.simulations.attacks.disclosure import Disclosure
from atoll.simulations.attacks.lying_coordinator import LyingCoordinator
from atoll.simulations.devices.fleet import Fleet
from atoll.simulations.engines.engine import Engine
from atoll.simulations.engines.engine import Training as TrainingOfAll
from atoll.simulations.federation.client_states import ClientStates
from atoll.simulations.federation.config import SimulationConfig
from atoll.simulations.federation.data_read import data_read, other_data
from atoll.simulations.federation.efforts import Efforts
from atoll.simulations.federation.evaluations import Evaluations
from atoll.simulations.federation.invitation_tally import InvitationTally
from atoll.simulations.federation.models import Models
from atoll.simulations.federation.report import (
    OF_SUMS,
    SIMULATED,
    Json,
    Measured,
    RunFolder,
    best_of,
    line_of,
    of_privacy,
)
from atoll.simulations.federation.round_count import reopen
from atoll.simulations.federation.service import Service
from atoll.simulations.federation.site import sites_of
from atoll.simulations.federation.snapshots import Snapshot, SnapshotFile
from atoll.simulations.federation.timeline import Timeline
from atoll.simulations.federation.training_engine import check_evaluations, engine_of, kind_of
from atoll.simulations.federation.trainings import Trainings
from atoll.simulations.federation.updates import Updates
from atoll.simulations.federation.work import ClientWork
from atoll.simulations.secure.cryptography import faults_of_names
from atoll.simulations.secure.sums import SimulatedSums
from atoll.task.array_task import ArrayTask
from atoll.task.arrays import Arrays
from atoll.task.metrics import Metrics, Statistics
from atoll.task.task import Task
from atoll.training.worker.benches import bench_of
from atoll.training.worker.process import RunTerms


@dataclass(frozen=True)
class Setting:
    """Parts of which a federation is built."""

    config: RunConfig
    task: Task | ArrayTask
    """The task, whose sites are the clients."""
    num_examples: Mapping[ClientId, int]
    """The number of training examples of each client, in the order of the clients."""
    fleet: Fleet
    training: TrainingOfAll
    simulation: SimulationConfig
    sampler: Sampler | Oort
    adversary: Adversary | None = None
    disclosure: Disclosure | None = None
    """The coordinator's inference from single updates; None: it infers nothing."""
    lease: float = 30.0
    num_test_examples: Mapping[ClientId, int] | None = None
    """The number of test examples of each client; None: the task reads its data itself."""
    lies: bool = False
    """Whether the coordinator lies to the members of its secure sums."""
    are_sizes_kept: bool = False
    """Whether an earlier process has counted the numbers of examples."""
    population_report: Callable[[], Json] | None = None
    """The report on the population; None: the task's data was not dealt."""
    notes: tuple[str, ...] = ()
    """The differences between the clients and the task's sites, a sentence each."""


class Federation:
    """Simulated run of a whole federation in virtual time.

    Args:
        setting: its parts.
        folder: the folder of the run; an interrupted run in it is resumed.
        on_round: a callback for each round's line.
        tell: a callback for other notes to the operator.
        clock: the real time [s].

    Raises:
        ConfigError: the chosen engine cannot train the task; the task is not deterministic, has no examples to measure
            on, or lacks clients of the resumed run.
        StoreCorrupted: the files of an earlier process are damaged.
    """

    def __init__(
        self,
        setting: Setting,
        folder: Path,
        *,
        on_round: Callable[[Json], None] = lambda line: None,
        tell: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.setting, self._on_round, self._clock, self._tell = setting, on_round, clock, tell
        config = setting.config
        self._snapshot_file = SnapshotFile(folder, clock)
        saved = self._snapshot_file.load_whole()
        self._data = data_read(setting.task, setting.num_examples, setting.num_test_examples, config.seed)
        if saved:
            self._check_data(saved, folder)
            reopen(saved.ledger, config.rounds)
        self.machine = RunMachine(replace(config.rules, wait=None), saved.ledger if saved else None)
        self.timeline = Timeline(self.machine.ledger.now)
        threads = setting.simulation.threads
        run = RunTerms(config.given, config.aggregation.training, config.rounds, setting.training.run_number)
        request = {**asdict(run), "threads": threads, "model_seed": config.seed}
        keep = Keep.after(0, self.machine, config.round) if saved else None
        self.versions = Models(
            folder / "models",
            config,
            bench_of(setting.task, request),
            threads,
            keep,
            setting.simulation.noise_cohort_size,
        )
        numbers = {name: number for number, name in enumerate(setting.num_examples)}
        self.client_states = ClientStates(folder / "clients", numbers, saved.client_states if saved else ())
        self.sums = self._secure_sums(folder / "sums", saved)
        self.updates = Updates(folder / "updates", self.versions.row_layout, saved.updates if saved else ())
        self.evaluations = Evaluations(
            setting.task, request, self.versions, self.client_states, setting.num_test_examples
        )
        self._check_measurements()
        self.engine = self._engine(saved.engine if saved else None)
        for line in filter(None, (self.versions.note, config.round.warning_of_staleness(len(numbers)))):
            tell(line)
        self.trainings = Trainings(self.engine, self.versions.arrays, self._state_of, self._num_wanted)
        due = saved.round_due if saved else None
        self.service = Service(
            self, self.timeline, self.versions, config, self.machine, setting.sampler, setting.lease, due
        )
        self.work = self._client_work(saved.train if saved else {})
        self.sites = sites_of(self.setting, self.timeline, self.service, self.work, self.sums)
        self._report = RunFolder(folder, self.machine.ledger.next_round - 1, saved.rounds if saved else None)
        self._measured: dict[Version, Measured] = {}
        self._summed: SumsFolded | None = None  # the newest fold of secure sums
        self._attack: Json = {}  # what the newest fold's updates have told the coordinator
        self._pending: tuple[Commit | Abandon, Json] | None = None
        self._is_over = self._is_interrupted = self._has_stopped = False
        self._is_saved = True  # the last round that has ended
        self._tally = InvitationTally(saved.totals.get("tally", {}) if saved else {})
        self._began, self._before = clock(), saved.totals if saved else {}
        if saved:
            self._restore_sites(saved)

    def _check_data(self, saved: Snapshot, folder: Path) -> None:
        """Check that a resumed run's clients exist, with the data on which it began."""
        if missing := sorted(saved.sites.keys() - self.setting.num_examples.keys()):
            what = f"the run there has clients that the task lacks: {', '.join(missing[:5])}"
            raise ConfigError([f"{folder}: {what}; choose another --out"])
        if found := other_data(saved.data, self._data):
            way_out = f"give the task that data again, or choose another --out, with model.start from {folder}/models"
            raise ConfigError([f"{folder}: the run there has trained on {found}; {way_out}"])

    def _check_measurements(self) -> None:
        """Check that the run has what is measured in it: examples to evaluate on, tensors that an attack reads."""
        self.evaluations.check(self.setting.config)
        if self.setting.disclosure is not None:
            self.setting.disclosure.check_travels(self.versions.version(Version(0)).manifest.layout)

    def _engine(self, before: str | None) -> Engine:
        """Return the engine; `before` is the kind with which a resumed run began."""
        setting, config, done = self.setting, self.setting.config, self.machine.ledger.version
        first, clients = self.versions.arrays(self.versions.version(done).digest), list(setting.num_examples)
        if config.evaluation.clients_every and before is None:
            check_evaluations(setting.simulation, setting.training, first, clients)
        return engine_of(
            setting.simulation,
            setting.training,
            first,
            clients,
            cohort=config.round.num_wanted,
            trainings=(config.rounds - done) * config.round.num_wanted,
            before=before or "",
            tell=self._tell,
        )

    def _client_work(self, statistics: Mapping[str, Statistics]) -> ClientWork:
        """Return the clients' work, with the sums measured by the trainings of an interrupted run."""
        setting = self.setting
        return ClientWork(
            efforts=Efforts(setting.task, setting.config.given, setting.num_examples),
            trainings=self.trainings,
            evaluations=self.evaluations,
            versions=self.versions,
            updates=self.updates,
            states=self.client_states,
            has_codec=bool(setting.config.aggregation.codec_name),
            kept_sizes=setting.num_examples if setting.are_sizes_kept else {},
            statistics={Digest(digest): sums for digest, sums in statistics.items()},
            sums=self.sums,
        )

    def _secure_sums(self, folder: Path, saved: Snapshot | None) -> SimulatedSums | None:
        """Return the secure sums of the run, with what the sites of a resumed run have promised; None: it has none."""
        setting, ledger = self.setting, self.machine.ledger
        if setting.config.secure is None:
            return None
        sums = SimulatedSums(
            setting.config,
            folder,
            is_real=setting.simulation.secure == "real",
            may_forge=self._forges,
            liar=LyingCoordinator(setting.config.seed) if setting.lies else None,
        )
        layout = self.versions.version(Version(0)).manifest.layout
        if faults := [*faults_of_layout(layout), *faults_of_names(setting.num_examples)]:
            raise ConfigError(faults)
        if saved is not None:
            sums.cryptography.restore(saved.signed, f"{setting.config.name}-1", str(ledger.model_digest))
        return sums

    # ------------------------------------------------------------ life

    def run(self) -> Json:
        """Run to the end, or to an interruption; return the result, which is also written to the folder."""
        with few_collections():
            self._begin()
            while not (self._is_over or self._has_stopped) and self.timeline.step():
                pass
        if not (self._is_over or self._has_stopped):
            raise RuntimeError("the federation hangs: no action is planned, and the run has not ended")
        if self._is_over:
            self._flush()
            self._snapshot_file.save(self._snapshot())
            self._collect_garbage(at_once=True)
        result = self._result()
        self._report.finish(result)
        return result

    def interrupt(self) -> None:
        """Make `run` return as soon as the last ended round is saved, so that the folder can be resumed.

        This happens now, or at the end of the next round if the last one was not saved.
        """
        self._is_interrupted = True
        self._has_stopped = self._is_saved

    def _begin(self) -> None:
        ledger, now = self.machine.ledger, self.timeline.now
        if ledger.state is RunState.QUEUED:
            self.service.post(RunStarted(self.versions.version(Version(0)).digest))
        elif ledger.state is RunState.RUNNING:
            self.service.post(CoordinatorStarted(now))
        else:
            self._is_over = True
            return
        for name, site in self.sites.items():
            if self.setting.fleet.is_awake(name, now):
                site.wake()
            elif name in ledger.training:
                self.service.start_lease(site)  # otherwise its slot would be occupied until its deadline
            site.follow(self.setting.fleet)

    # ------------------------------------------------------------ training

    def _state_of(self, client_id: ClientId, invitation: Invitation) -> Arrays | None:
        return self.client_states.find(client_id, invitation.counted_round)

    def _num_wanted(self) -> int:
        """Return the number of updates that the open round still waits for."""
        round_, policy = self.machine.round, self.setting.config.round
        if round_ is None:
            return 1
        return max(1, policy.num_wanted - round_.record.num_in)

    # ------------------------------------------------------------ folds

    def fold(self, effect: Aggregate) -> Digest:
        """Fold the updates into the next version of the model, and return its digest.

        Raises:
            ValueError: the updates cannot be folded.
            OSError: a file cannot be read or written.
        """
        if self._forges:
            self._forge(effect, self.updates.arrays, self.updates.replace)
        self._infer(effect, lambda: {str(c.client_id): self.updates.arrays(c.digest) for c in effect.contributions})
        return self.versions.fold(effect, self.updates)

    def next_clip_norm(self, effect: Aggregate) -> float:
        """Return the clip norm of the private round after a folded one; 0: it is fixed, or the run is not private."""
        return self.versions.next_clip_norm(effect, self.updates)

    def fold_sums(self, effect: Aggregate) -> SumsFolded:
        """Fold the opened secure sums into the next version of the model.

        Raises:
            ValueError: the updates cannot be folded, or no sum counts.
            OSError: a file cannot be read or written.
        """
        assert self.sums is not None
        if self._forges:
            self._forge(effect, self.sums.updates.plain, self._forge_in_sum)
        sums, layout = self.sums, self.versions.version(effect.base_version).manifest.layout
        self._infer(effect, lambda: sums.seen(effect, layout))
        folded = self.versions.fold_sums(effect, self.sums)
        self._summed = folded
        return folded

    def _infer(self, effect: Aggregate, seen: Callable[[], Mapping[str, Arrays]]) -> None:
        """Attack what the coordinator has received of single clients, if it does."""
        if self.setting.disclosure is not None:
            version = self.versions.arrays(self.versions.version(effect.base_version).digest)
            self._attack = dict(self.setting.disclosure.of_round(version, seen()))

    def evaluate(self, version: Version) -> Statistics | str:
        """Measure a version on the server's test data; return the sums, or the reason why there are none."""
        sums = self.evaluations.of_server(self.versions.version(version))
        if not isinstance(sums, str):
            self._measured.setdefault(version, Measured()).server = sums
        return sums

    def evaluation_asked(self, client_id: ClientId, request: EvaluationRequest) -> None:
        """Record that a client will evaluate a version, so that the engine measures it with the others."""
        self.evaluations.ask(client_id, request)

    @property
    def _forges(self) -> bool:
        """Return whether malicious clients replace their updates."""
        return self.setting.adversary is not None and self.setting.adversary.forges

    def _forge_in_sum(self, digest: Digest, update: Arrays) -> None:
        assert self.sums is not None
        assert self.setting.adversary is not None
        self.sums.updates.forge(digest, update, keeps_bound=self.setting.adversary.config.keeps_bound)

    def _forge(
        self, effect: Aggregate, arrays: Callable[[Digest], Arrays], put: Callable[[Digest, Arrays], None]
    ) -> None:
        """Replace the malicious clients' updates by the adversary's.

        Args:
            effect: the fold.
            arrays: returns an honest update.
            put: replaces an update.
        """
        assert self.setting.adversary is not None
        honest = {str(c.client_id): arrays(c.digest) for c in effect.contributions}
        version = self.versions.arrays(self.versions.version(effect.base_version).digest)
        before = self.versions.known(Version(effect.base_version - 1)) if effect.base_version else None
        previous = self.versions.arrays(before.digest) if before is not None else None
        digests = {c.client_id: c.digest for c in effect.contributions}
        for name, update in self.setting.adversary.updates(effect.round_id, honest, version, previous).items():
            put(digests[ClientId(name)], update)

    # ------------------------------------------------------------ rounds

    def next_round(self) -> None:
        """Finish the record of the last round, whose measurements are complete."""
        self._flush()

    def round_ended(self, effect: Commit | Abandon) -> None:
        """Begin the results line of a round that was committed or abandoned; the measurements follow."""
        self._flush()
        record = self.machine.record_of(effect.round_id)
        assert record is not None
        rows = ((row.client_id, row.digest) for row in record.buffer)
        counted = rows if record.buffer else ((name, client.digest) for name, client in record.clients.items())
        statistics = self.work.statistics
        train = [(str(name), statistics[digest]) for name, digest in counted if digest in statistics]
        if self._summed is not None and isinstance(effect, Commit):
            train, self._summed = [(OF_SUMS, dict(self._summed.statistics))], None
        line = line_of(
            record,
            self.metrics,
            train=train,
            ended=self._tally.ended(self.machine.newest_first()) if record.mode != "sync" else None,
            totals=self._totals(),
            malicious=self._malicious,
            is_uniform=self.setting.config.aggregation.weighting == "uniform",
        )
        if self.sums is not None and self.sums.liar is not None:
            self._attack = self.sums.liar.take(effect.round_id)
        if self._attack:
            line["attack"], self._attack = self._attack, {}
        if (noise_cohort := self.setting.simulation.noise_cohort_size) is not None:
            line["noise_cohort_size"] = noise_cohort  # its epsilon is no guarantee
        self._pending, self._is_saved = (effect, line), False
        self._collect_garbage()

    def clients_evaluated(self, effect: CloseEvaluation) -> None:
        """Record the clients' measurements of a version."""
        measured = self._measured.setdefault(effect.version, Measured())
        answers = effect.answers if effect.sums is None else {OF_SUMS: effect.sums}
        measured.clients = {str(name): dict(sums) for name, sums in answers.items()}
        measured.max_share = effect.max_share

    def run_ended(self) -> None:
        """Make `run` return, because the run has ended."""
        self._is_over = True

    @property
    def _malicious(self) -> frozenset[str]:
        """The malicious clients of an attack; empty: none."""
        adversary = self.setting.adversary
        return frozenset() if adversary is None or adversary.config.kind == "none" else adversary.malicious

    @property
    def metrics(self) -> Metrics:
        """The metrics of the task."""
        return getattr(self.setting.task, "metrics", {})

    def _flush(self) -> None:
        """Write the line of the last round with its version's measurements, and save a snapshot if one is due."""
        if self._pending is None:
            return
        effect, line = self._pending
        self._pending = None
        if isinstance(effect, Commit) and (measured := self._measured.pop(effect.version, None)) is not None:
            line |= measured.values(self.metrics, with_clients=line.get("fates") is not None, malicious=self._malicious)
            if left_out := line.get("not_finite", {}) | measured.refusals():
                line["not_finite"] = left_out
            if capped := measured.capped():
                line["capped"] = line.get("capped", {}) | {"metrics": capped}
        self._report.add(line)
        self._on_round(line)
        self._save()

    def _save(self) -> None:
        """Save a snapshot between two rounds: if one is due, and always before a stop or when clients have states."""
        always = self.client_states.is_used or self._is_interrupted
        self._is_saved = self.machine.may_snapshot and self._snapshot_file.save_if_due(self._snapshot, always=always)
        self._has_stopped = self._is_interrupted and self._is_saved

    def _collect_garbage(self, *, at_once: bool = False) -> None:
        """Drop updates and versions that no decision can need any more."""
        keep = Keep.after(0, self.machine, self.setting.config.round)
        live = keep.updates | {update.digest for site in self.sites.values() for update in site.spool.values()}
        self.work.keep_only(live)
        if self.sums is not None:
            self.sums.updates.keep_only(
                {*live, *(each.digest for s in self.sites.values() for each in s.encoded.values())}
            )
        self.versions.collect(keep, live, at_once=at_once)

    # ------------------------------------------------------------ totals

    def _totals(self) -> Json:
        service, before = self.service, self._before
        return {
            "virtual_s": self.timeline.now,
            "real_s": self._clock() - self._began + before.get("real_s", 0.0),
            "bytes_down": service.bytes_down + before.get("bytes_down", 0),
            "bytes_up": service.bytes_up + before.get("bytes_up", 0),
            "bytes_up_plain": service.bytes_up_plain + before.get("bytes_up_plain", 0),
            "trainings": self.trainings.num_computed + before.get("trainings", 0),
            **self._invitations(),
        }

    def _invitations(self) -> Json:
        """Return the totals of an asynchronous run's invitations so far, with the number of clients still training."""
        if not self.setting.config.round.is_asynchronous:
            return {}
        return {"invitations": {**self._tally.so_far, "training": len(self.machine.invitations)}}

    def _result(self) -> Json:
        ledger = self.machine.ledger
        if self._is_over:
            self._tally.ended(self.machine.newest_first())
        return {
            "state": "interrupted" if self._is_interrupted and not self._is_over else str(ledger.state),
            "cause": ledger.cause,
            "rounds": int(ledger.next_round) - 1 - (self.machine.round is not None),  # the ended ones
            "version": int(ledger.version),
            "model_digest": str(ledger.model_digest),
            **best_of(self.setting.config.model.metric, ledger.best),
            **of_privacy(
                self.machine, self.setting.config.round.cohort_size, self.setting.simulation.noise_cohort_size
            ),
            **({"undecided": undecided} if (undecided := self.machine.undecided) else {}),
            "engine": self.engine.name,
            **({} if self.sums is None else {"secure": SIMULATED}),
            "seed": self.setting.config.seed,
            **({"malicious": sorted(self._malicious)} if self._malicious else {}),
            "notes": list(self.setting.notes),
            **self._totals(),
        }

    # ------------------------------------------------------------ interruptions

    def _snapshot(self) -> Snapshot:
        """Return a snapshot, and write all files that it refers to."""
        ledger, keep = self.machine.ledger, Keep.after(0, self.machine, self.setting.config.round)
        self.versions.write(keep)
        train = {str(digest): sums for digest, sums in self.work.statistics.items() if digest in keep.updates}
        due = self.timeline.now if ledger.is_round_due else None
        sites = {
            str(name): (site.seconds_of_uploads, site.model_digest, site.num_sessions)
            for name, site in self.sites.items()
            if site.model_digest is not None
        }
        updates = self.updates.write(sorted(keep.updates))
        states = self.client_states.named()
        names = [
            *self.versions.files(),
            *(f"updates/{update.digest}" for update in updates),
            *(f"clients/{name}" for name in states),
        ]
        files = self._snapshot_file.digests.of(names, {f"clients/{name}" for name in self.client_states.written()})
        totals = self._totals() | {"tally": self._tally.saved}
        of_files = states, files, self._report.digest, self._data
        signed = {} if self.sums is None else self.sums.cryptography.signed(ledger.model_digest)
        return Snapshot(ledger, totals, sites, kind_of(self.engine), due, updates, train, *of_files, signed)

    def _restore_sites(self, saved: Snapshot) -> None:
        for name, (upload_seconds, model_digest, num_sessions) in saved.sites.items():
            site = self.sites[ClientId(name)]
            site.upload_seconds, site.model_digest, site.num_sessions = (
                upload_seconds,
                Digest(model_digest),
                num_sessions,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        self._report.close()


COLLECT_EVERY = 100_000
"""Allocations minus deallocations between two collections of the youngest generation; Python's default is 700."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Freeze all existing objects and collect new ones rarely; restore the settings at the end.

    A simulation makes hundreds of thousands of small values a second, and no cycles: the collector would only traverse
    the sites, the records and all libraries repeatedly.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
