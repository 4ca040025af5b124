"""The composition root of the runs: it makes each run's parts from its settings and the coordinator's resources."""

import shutil
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from atoll.ground.noise.key import key_of
from atoll.ground.printable import count_of
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.noise_secret import noise_secret, run_number
from atoll.protocol.manifest import parse_update, parse_version
from atoll.protocol.settings import ConfigError, or_faults
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import TERMINAL, RunId, Version
from atoll.server.config.model import faults_of_metrics
from atoll.server.config.privacy import faults_of_layout as faults_of_private_layout
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.run import RunConfig
from atoll.server.config.run_changes import with_frozen, with_noise
from atoll.server.config.secure import WITHOUT_CERTIFICATES, faults_of_layout
from atoll.server.errors import OperatorError
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.files.disk_limits import DiskLimits
from atoll.server.files.run_store import RunStore
from atoll.server.folding.evaluator import TASK_TIMEOUT_S, EvaluationFailed, Evaluator, Reference
from atoll.server.folding.reducer import Reducer
from atoll.server.folding.sums import expected_layout
from atoll.server.hosting.fair_executor import FairExecutor
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.hosting.run_parts import RunParts, SharedParts
from atoll.server.journal.codec import decode_meta
from atoll.server.journal.holder import run_folder
from atoll.server.journal.placement import num_ranks_of, state_of_rank, write_num_ranks
from atoll.server.journal.rows import RunRow
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.programs.contents import Contents
from atoll.server.ranks.registry import Ranks
from atoll.server.ranks.sharded_reducer import ShardedReducer
from atoll.server.required.keep import Keep
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler
from atoll.task.task import task_name
from atoll.tensors.codecs.installed import is_installed
from atoll.tensors.safetensors_file import read_buffers
from atoll.training.worker.warm_start import Start


class RunFactory:
    """Factory of the parts of runs and of the drivers built from them.

    Args:
        config: the coordinator's settings.
        state: the state directory, locked.
        shared: the parts that all runs share.
        folding: the threads that fold.
        ranks: the aggregation ranks; None: the coordinator folds by itself.
        dialer: opens the channels to the aggregation ranks.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        state: StateDirectory,
        shared: SharedParts,
        folding: FairExecutor,
        ranks: Ranks | None,
        dialer: Dialer,
    ) -> None:
        self._config, self._state, self._shared = config, state, shared
        self._folding, self._ranks, self._dialer = folding, ranks, dialer
        self._disk = DiskLimits(config.disk_free_min, config.incoming_max)

    def driver(self, row: RunRow, machine: RunMachine, seq: int, evaluator: Evaluator, reducer: Reducer) -> RunDriver:
        """Build the driver of a run; it is not started.

        Args:
            row: the run's row in the journal.
            machine: its state machine, new or replayed.
            seq: the sequence number of the last event that `machine` has received.
            evaluator: see `evaluator`.
            reducer: see `reducer`.
        """
        sampler = _sampler(row.config, is_over=machine.ledger.state in TERMINAL)
        task = task_name(row.config.task)
        number = run_number(self._state.path, row.run_id)
        parts = RunParts(row.run_id, row.config, task, machine, seq, reducer, evaluator, sampler, number)
        return RunDriver(parts, self._shared)

    def message_driver(self, row: RunRow, machine: ExchangeMachine, seq: int) -> MessageDriver:
        """Build the driver of a run of messages, like `driver` for a run of rounds.

        Raises:
            OSError: the folders of the run cannot be made.
        """
        folder, path, run_id = self._state.run(row.run_id), self._state.path, row.run_id
        contents = Contents(folder, RunStore(folder, disk=self._disk, has_files_only=True))
        noise, number = key_of(noise_secret(path), "run", run_id), run_number(path, run_id)
        return MessageDriver(run_id, row.config, machine, seq, contents, self._shared, noise, number)

    def check_answers_messages(self) -> None:
        """Check that this coordinator can host a run of messages.

        Raises:
            OperatorError: replies would go to aggregation ranks, which fold and do not answer.
        """
        if self._config.aggregators:
            ranks = count_of(self._config.aggregators, "aggregation rank")
            what = f"program.main: this coordinator has {ranks}, only for updates"
            raise OperatorError(f"{what}; allowed: a coordinator without --aggregators")

    async def parts_of_changed(
        self, old: RunConfig, new: RunConfig, run_id: RunId
    ) -> tuple[Sampler | Oort, Evaluator | None]:
        """Return the sampler of changed settings, and an evaluator if the local training or the metrics have changed.

        Raises:
            OperatorError: the sampler does not load, or the task refuses its new settings or lacks a metric.
        """
        try:
            sampler = new.cohort.build()
            if (new.given, new.rules.watched) == (old.given, old.rules.watched):
                return sampler, None
            evaluator = self.evaluator(new, run_id)
        except ConfigError as error:
            raise OperatorError(str(error)) from error
        try:
            await evaluator.check()
            await self._check_watched(new, evaluator)
            await self._check_same_model(old, new, run_id, evaluator)
        except (EvaluationFailed, ValueError) as error:
            evaluator.close()
            raise OperatorError(str(error)) from error
        return sampler, evaluator

    def evaluator(self, config: RunConfig, run_id: RunId) -> Evaluator:
        """Make the evaluator of a run; its worker process starts with the first request."""
        reference = Reference(config.task, config.given, config.aggregation.training, config.seed, config.rounds)
        return Evaluator(
            reference,
            self._state.run(run_id) / "worker.log",
            timeout_s=TASK_TIMEOUT_S,
            load_timeout_s=self._config.load_timeout,
            noise=key_of(noise_secret(self._state.path), "run", run_id),
            run_number=run_number(self._state.path, run_id),
        )

    def reducer(self, config: RunConfig, run_id: RunId, *, is_over: bool = False) -> Reducer:
        """Make the reducer of a run: a sharded one if the run was started with the ranks of this coordinator."""
        make: Callable[..., Reducer] = Reducer
        if self._ranks is not None and num_ranks_of(self._state.run(run_id)) == self._ranks.num_ranks:
            make = partial(ShardedReducer, self._ranks, run_id, self._config.aggregator_patience, self._dialer)
        reducer = make(
            self._state.run(run_id),
            self._folding.of(run_id),
            partial(self._shared.journal.updates, run_id),
            settings=config,
            is_over=is_over,
            keep_versions=config.model.keep_versions or self._config.keep_versions,
            disk=self._disk,
            sums_here=self._ranks is None or self._config.start_aggregators,  # at least on this machine
        )
        reducer.noise = key_of(noise_secret(self._state.path), "run", run_id)
        return reducer

    def check_can_go_on(self, run_id: RunId, config: RunConfig) -> None:
        """Check that this coordinator can continue a run of an earlier process.

        Raises:
            OperatorError: the number of ranks differs, or custom code does not load; the message lists all faults.
        """
        had, has = num_ranks_of(self._state.run(run_id)), self._config.aggregators
        faults = [f"run {run_id}: {fault}" for fault in (*_faults_of_own_code(config), *self._faults_of_keys(config))]
        if had != has:
            what = f"run {run_id} was started with --aggregators {had}, and its versions are there"
            faults.append(f"{what}; this coordinator has {has}: start it with --aggregators {had}")
        if faults:
            raise OperatorError("\n".join(faults))

    def check_has_codecs(self, row: RunRow, machine: RunMachine) -> None:
        """Check that the updates waiting for a fold here were encoded with this process's version of the codec.

        Raises:
            OperatorError: another version of its package encoded them.
        """
        waiting = Keep.after(0, machine, row.config.round).updates
        if self._ranks is not None or not is_installed(row.config.aggregation.codec_name):
            return  # the record of the round names a rank that lacks a codec
        rows = self._shared.journal.updates(row.run_id, sorted(waiting))
        metas = [decode_meta(found.meta, where=f"update {digest}") for digest, found in rows.items()]
        codecs = frozenset(name for meta in metas for name in parse_update(meta.manifest).codecs)
        if other := sorted(codecs - {row.config.aggregation.codec_name}):
            raise OperatorError(
                f"run {row.run_id}: aggregation.codec: updates that wait for their fold are encoded with "
                f"{', '.join(other)}, and {row.config.aggregation.codec_name} is installed here: install that version "
                "again, at least until this round has ended"
            )

    async def first_version(
        self, config: RunConfig, run_id: RunId, evaluator: Evaluator, start: Start | None
    ) -> tuple[Reducer, RunConfig]:
        """Load the rule, the sampler and the task, and write version 0; if this fails, the run leaves no file.

        Returns:
            The run's reducer, and its settings with the digest of the tensors that are never sent.

        Raises:
            OperatorError: a part does not load, or no update would fit into the quota.
            OSError: a file cannot be written.
        """
        try:
            if faults := [
                *_faults_of_own_code(config),
                *self._faults_of_ranks(config),
                *self._faults_of_keys(config),
            ]:
                raise ConfigError(faults)
            write_num_ranks(self._state.run(run_id), self._config.aggregators)
            reducer = self.reducer(config, run_id)
            await evaluator.check()
            await self._check_watched(config, evaluator)
            if config.evaluation.server_every and config.rules.watches("server"):  # then its data has already been read
                await evaluator.try_out()
            await reducer.write_initial(evaluator, config.seed, start)
            self._check_layout(config, reducer)
            self._check_quota(config, reducer)
            config = with_noise(with_frozen(config, evaluator.frozen))
        except (EvaluationFailed, ValueError, OSError) as error:
            evaluator.close()  # it logs there
            await on_thread(None, remove_files, self._state, run_id)
            if isinstance(error, OSError):
                raise
            raise OperatorError(str(error)) from error
        return reducer, config

    def _faults_of_ranks(self, config: RunConfig) -> list[str]:
        """Return the reason why the aggregation ranks cannot fold this run; empty: they can, or there are none."""
        if self._ranks is None or not config.aggregation.grows:
            return []
        what = "aggregation.rule: got 'concatenate', and each rank has a fixed part of a model of fixed size"
        return [f"{what}; allowed: a coordinator without --aggregators"]

    def _faults_of_keys(self, config: RunConfig) -> list[str]:
        """Return the reason why no site's keys could be certified here; empty: they can, or sums are not secure."""
        if config.secure is None or self._shared.authorities():
            return []
        return [WITHOUT_CERTIFICATES]

    def _check_layout(self, config: RunConfig, reducer: Reducer) -> None:
        """Check that the tensors of version 0 add up in secure sums, and that noise covers them in private ones.

        Raises:
            ValueError: there are others.
        """
        layout = reducer.version(Version(0)).manifest.layout
        privacy = config.rules.privacy
        if privacy is not None and privacy.noise_by != "site":
            buffers = read_buffers(reducer.store.version_path(Version(0)))
            if faults := [*faults_of_private_layout(layout, buffers, privacy, config.rules.secure)]:
                raise ValueError("\n".join(faults))
        if config.secure is not None and (faults := [*faults_of_layout(layout)]):
            raise ValueError("\n".join(faults))

    async def _check_watched(self, config: RunConfig, evaluator: Evaluator) -> None:
        """Check that the task measures the metrics that choose the best version or end the run early.

        Raises:
            ValueError: the task does not measure a metric; one line for each.
        """
        if config.rules.watched and (
            faults := [*faults_of_metrics(config.model, config.stop, await evaluator.measures())]
        ):
            raise ValueError("\n".join(faults))

    async def _check_same_model(self, old: RunConfig, new: RunConfig, run_id: RunId, evaluator: Evaluator) -> None:
        """Check that the task's model, which may depend on its options, still matches the run.

        Raises:
            ValueError: a tensor's name or shape differs.
        """
        before = parse_version(RunStore(self._state.run(run_id)).read_manifest(Version(0))).layout
        rows = 1 if old.aggregation.grows else 0  # axes of any length
        here = {tensor.name: tensor.shape[rows:] for tensor in before}
        there = {name: shape[rows:] for name, shape in (await evaluator.shapes()).items()}
        if differing := sorted(name for name in here | there if here.get(name) != there.get(name)):
            changed = {**old.options, **new.options}.items() - old.options.items()
            values = ", ".join(f"task.{name} = {value!r}" for name, value in sorted(changed)) or "these settings"
            what = f"the model would have another {', '.join(differing[:3])}"
            raise ValueError(f"--set: {values}: {what}; a new run may have it")

    def _check_quota(self, config: RunConfig, reducer: Reducer) -> None:
        """Check that an update fits into the quota: a larger one would never be received.

        A plain update is as large as a version, a masked one as the words of its sum; in a run whose model grows an
        update has at most `append_max` bytes.

        Raises:
            ValueError: an update does not fit into the quota.
        """
        most, appended = self._config.incoming_max, config.aggregation.most_appended
        layout = expected_layout(reducer.version(Version(0)).manifest.layout, config.rules.secure)
        num_bytes = sum(tensor.num_bytes for tensor in layout) if appended is None else appended
        if most and config.aggregation.codec == "none" and self._ranks is None and num_bytes > most:
            has = "of this model has" if appended is None else "may append aggregation.append_max ="
            what = f"coordinator.incoming_max is {most}: an update {has} {count_of(num_bytes, 'byte')}"
            raise ValueError(f"{what}; allowed: 0 (no limit), or at least this number")


def _faults_of_own_code(config: RunConfig) -> list[str]:
    """Return the reasons why a run's custom rule, codec and sampler do not load; empty: they do."""
    faults: list[str] = []
    builds: tuple[Callable[[], object], ...] = (
        config.aggregation.build,
        config.aggregation.open_codec,
        config.cohort.build,
    )
    for build in builds:
        or_faults(build, faults)
    return faults


def remove_files(state: StateDirectory, run_id: RunId) -> None:
    """Remove the folders of a run, including those of its aggregation ranks on this machine."""
    folder = state.run(run_id)
    num_ranks = num_ranks_of(folder)
    of_ranks = (state_of_rank(state.path, rank, num_ranks) for rank in range(num_ranks))
    for path in (*(run_folder(of_rank, run_id) for of_rank in of_ranks), folder):  # `num_ranks_of` needs the last one
        shutil.rmtree(path, ignore_errors=True)


def _sampler(config: RunConfig, *, is_over: bool) -> Sampler | Oort:
    """Load the run's sampler. A run that has ended needs none: missing code matters only when it is resumed."""
    try:
        return config.cohort.build()
    except ConfigError as error:
        if not is_over:
            raise
        missing = error

    def no_sampler(*_: object) -> NoReturn:
        raise missing

    return no_sampler
