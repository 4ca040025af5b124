"""The jobs of an agent: a download, a training that ends with an update in the spool, an evaluation, statistics."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.client.disk.residual_store import Owner
from atoll.client.disk.spool import Costs, Entry
from atoll.client.disk.stores import Stores
from atoll.client.phases import LOAD, SPOOL, TRAIN, Phases, fault_of
from atoll.client.policy.budgets.terms import has_terms
from atoll.client.policy.gate import content_of
from atoll.client.session.events import (
    Encoded,
    Evaluated,
    EvaluationRequest,
    Event,
    Invitation,
    JobFailed,
    Key,
    ModelReady,
    ModelRequest,
    StatisticsMade,
    StatisticsRequest,
    Trained,
)
from atoll.client.work.encoding import encoding_of
from atoll.client.work.runner import (
    EncodeOrder,
    EvaluateOrder,
    MessageOrder,
    Runner,
    RunnerFailed,
    StatisticsOrder,
    Training,
    TrainOrder,
)
from atoll.client.work.version_fetcher import NotAdmitted, VersionFetcher
from atoll.ground.durable import remove
from atoll.ground.folders import finds_no_room
from atoll.ground.noise.key import BYTES, key_of
from atoll.ground.process import crash_points
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import ClientId, FailureReason, RoundId, RunId
from atoll.protocol.wire.stream import StreamBroken
from atoll.tensors.masked.encode import Encoded as Words
from atoll.tensors.masked.encode import NotFinite, encode_update
from atoll.tensors.safetensors_file import parse_header
from atoll.tensors.secure.masked_layout import layout_digest
from atoll.tensors.secure.plan import Encoding, Vector

logger = logging.getLogger(__name__)


class Jobs:
    """Jobs of one agent, one at a time; each ends with an event for the session, whatever happens.

    Args:
        site: this client's name.
        stores: the agent's state on disk.
        runner: trains and evaluates.
        versions: downloads versions into the model cache.
        save_seen: makes the newest round and version seen durable, before any outcome of that round is sent; may run on
            a thread.
    """

    def __init__(
        self, site: str, stores: Stores, runner: Runner, versions: VersionFetcher, *, save_seen: Callable[[], None]
    ) -> None:
        self._client_id, self._runner, self._versions, self._save_seen = ClientId(site), runner, versions, save_seen
        self._spool, self._cache = stores.spool, stores.models
        self._residuals, self._client_state = stores.residuals, stores.client_state
        self._noise_secret, self._fresh = stores.noise_secret, stores.fresh
        self._update_out = stores.work / "update.safetensors"
        self._encoded, self._encoded_out = stores.encoded, stores.work / "encoded.safetensors"
        self._residual_out = stores.work / "residual"
        self._client_state_out = stores.work / "own"
        self._download_seconds = 0.0
        self.phases = Phases()

    async def download(self, request: ModelRequest) -> Event:
        """Complete the version of a request; returns ModelReady or JobFailed."""
        began = time.monotonic()
        try:
            await self._versions.fetch(request)
        except NotAdmitted as error:
            return JobFailed(request.key, error.reason, error.detail)
        except StreamBroken as error:
            return JobFailed(request.key, FailureReason.DOWNLOAD_FAILED, str(error))
        except OSError as error:
            return JobFailed(request.key, _disk_reason(error, FailureReason.DOWNLOAD_FAILED), _text(error))
        except ValueError as error:  # in the manifest, a piece, or a header that no valid file has
            return JobFailed(request.key, FailureReason.DOWNLOAD_FAILED, str(error))
        self._download_seconds = time.monotonic() - began
        crash_points.reached("agent.downloaded")
        return ModelReady(request.key)

    async def train(self, invitation: Invitation, budget: float) -> Event:
        """Train within `budget` seconds and put the update into the spool; returns Trained or JobFailed."""
        key, begun = invitation.key, time.monotonic()
        self._residual_out.unlink(missing_ok=True)  # left by a failed training
        remove(self._update_out)
        try:
            encode = await on_thread(None, self._encoding_of, invitation)
            order = TrainOrder(
                **_of_run(invitation, budget),
                model=self._cache.path(invitation.model_digest),
                out=self._update_out,
                round_id=invitation.round_id,
                version=invitation.base_version,
                seed=invitation.seed,
                algorithm=invitation.algorithm,
                own=await self._state_that_counted(invitation),
                has_counted=bool(invitation.counted_round),
                own_out=self._client_state_out,
                model_seed=invitation.model_seed,
                codec=invitation.codec,
                owed=await self._owed(invitation),
                residual=self._residual_out,
                noise=await on_thread(None, self._noise_of, invitation, "train"),
                encode=encode,
            )
            trained = await self._training(order, key, begun)
            crash_points.reached("agent.trained")
            with self.phases.timed(SPOOL, key):
                if encode is not None:
                    await self._encode(invitation, encode.encoding, trained)
                    crash_points.reached("agent.encoded")
                    return Encoded(key)
                entry = await self._spool_update(invitation, trained)
        except RunnerFailed as error:
            return JobFailed(key, error.reason, error.detail)
        except OSError as error:
            return JobFailed(key, _disk_reason(error, FailureReason.TRAINING_FAILED), _text(error))
        crash_points.reached("agent.spooled")
        return Trained(key, entry.digest)

    async def _training(self, order: TrainOrder, key: Key, begun: float) -> Training:
        """Train, with a crash point once it has begun; a job that is cancelled meanwhile leaves no training.

        What the worker does before it begins to train is the phase `load`; of a failure it is a part of `train`.
        """
        training = asyncio.ensure_future(self._runner.train(order))
        try:
            await asyncio.sleep(0)  # yield, so that it starts
            crash_points.reached("agent.training")
            trained = await training
        except BaseException as error:
            self.phases.note(TRAIN, key, begun, fault=fault_of(error))
            raise
        finally:
            training.cancel()
        loaded = max(begun, (now := time.monotonic()) - trained.seconds)
        self.phases.note(LOAD, key, begun, loaded)
        self.phases.note(TRAIN, key, loaded, now)
        return trained

    async def answer(self, invitation: Invitation, budget: float) -> Event:
        """Answer a message within `budget` seconds and put the reply into the spool; returns Trained or JobFailed."""
        key = invitation.key
        remove(self._update_out)
        try:
            order = MessageOrder(
                **_of_run(invitation, budget),
                kind=invitation.message,
                group=invitation.group,
                message=self._cache.path(invitation.model_digest),
                out=self._update_out,
                round_id=invitation.round_id,
                seed=invitation.seed,
                own=await self._own(invitation.run_id, invitation.counted_round),
                own_out=self._client_state_out,
                noise=await on_thread(None, self._noise_of, invitation, invitation.message),
            )
            entry = await self._spool_update(invitation, await self._runner.message(order))
        except RunnerFailed as error:
            return JobFailed(key, error.reason, error.detail)
        except OSError as error:
            return JobFailed(key, _disk_reason(error, FailureReason.TRAINING_FAILED), _text(error))
        return Trained(key, entry.digest)

    def _noise_of(self, invitation: Invitation, what: str) -> bytes:
        """Return the noise key of an invitation, of which the fresh part is durable if its steps are accounted.

        Such a training has the same noise when it is repeated after a kill, and is charged once. The key is another one
        for every other invitation, and for the same one once an update of it has begun to leave: two trainings with one
        noise and other settings, or other rows, would tell by their difference what the noise hides. Work without an
        account has other noise each time, as the bytes on disk cost a round two writes: of repeated work nothing has
        left.
        """
        if not has_terms(invitation.local):
            return secrets.token_bytes(BYTES)
        content = content_of(invitation)
        fresh = self._fresh.made(invitation.run_id, invitation.round_id, content)
        purpose = (what, invitation.run_id, invitation.round_id, invitation.model_digest, content, fresh.hex())
        return key_of(self._noise_secret, *purpose, self._client_id)

    async def _state_that_counted(self, invitation: Invitation) -> Path | None:
        """Return the client state after the newest training that is part of a committed model; None: there is none.

        Raises:
            RunnerFailed: the file of the state is missing, and the algorithm cannot train without it.
        """
        counted = invitation.counted_round
        found = await self._own(invitation.run_id, counted)
        if found is None and counted and invitation.algorithm == "scaffold":
            detail = f"the control variate of round {counted} is no longer in this agent's state directory (personal/)"
            raise RunnerFailed(FailureReason.TRAINING_FAILED, f"{detail}: put it back, or start a new run")
        return found

    async def _owed(self, invitation: Invitation) -> tuple[Path, ...]:
        if not invitation.codec:
            return ()
        return await on_thread(None, self._residuals.current, _residual_owner(invitation))  # reads the whole files

    async def _own(self, run_id: RunId, counted: RoundId) -> Path | None:
        return await on_thread(None, self._client_state.find, run_id, counted)  # reads the whole file

    async def _spool_update(self, invitation: Invitation, trained: Training) -> Entry:
        if invitation.message:
            what = (invitation.round_id, invitation.message, invitation.run_id, trained.seconds)
            logger.info("answered message %d (%s) of %s in %.2f s", *what)
        else:
            logger.info(
                "trained %g examples for round %d of %s, work %.0f %%, in %.2f s%s",
                trained.num_examples,
                invitation.round_id,
                invitation.run_id,
                100 * trained.work,
                trained.seconds,
                f"; {trained.mesh}" if trained.mesh else "",
            )
        parts = [PartManifest(index, pieces) for index, pieces in enumerate(trained.parts)]
        manifest = self._manifest(
            invitation,
            num_examples=trained.num_examples,
            work=trained.work,
            pieces=trained.pieces,
            normalizer=trained.normalizer,
            effective_steps=trained.effective_steps,
            parts=tuple(part.listed for part in parts),
        )

        def add() -> Entry:
            self._save_seen()
            if self._residual_out.exists():
                self._residuals.stage(_residual_owner(invitation), manifest.digest, self._residual_out)
            self._stage_own(invitation, trained)
            return self._spool.add(
                self._update_out,
                manifest,
                statistics=trained.statistics,
                costs=Costs(
                    download_seconds=self._download_seconds,
                    train_seconds=trained.seconds,
                    mesh=trained.mesh,
                    steps=trained.steps,
                ),
                rank=invitation.rank,
                spreads=invitation.spreads,
                parts=parts,
            )

        try:
            return await on_thread(None, add)
        except OSError:
            self._residuals.settle(manifest.digest, accepted=False)
            raise

    def _encoding_of(self, invitation: Invitation) -> EncodeOrder | None:
        """Return the encoding that the terms of a secure sum ask for, before any work is spent on it; None: no sum.

        Raises:
            RunnerFailed: the terms are of other tensors than the model's, or no encoding.
        """
        if (terms := invitation.secure) is None:
            return None
        layout = parse_header(self._cache.path(invitation.model_digest))[0]
        if layout_digest(layout, terms.metrics) != terms.layout:
            raise RunnerFailed(FailureReason.SESSION_REFUSED, "the terms are of other tensors than the model's")
        try:
            encoding = encoding_of(terms, invitation.ranges, layout)
            Vector(layout, encoding)
        except ValueError as fault:
            raise RunnerFailed(FailureReason.SESSION_REFUSED, f"the terms' encoding: {fault}") from None
        remove(self._encoded_out)
        purpose = ("rounding", invitation.run_id, invitation.round_id, invitation.model_digest)
        rounding = key_of(self._noise_secret, *purpose, self._client_id)
        return EncodeOrder(encoding=encoding, out=self._encoded_out, rounding=rounding)

    def _manifest(self, invitation: Invitation, **of_training: Any) -> UpdateManifest:
        """Return the manifest of an update for a round."""
        return UpdateManifest(
            run_id=invitation.run_id,
            round_id=invitation.round_id,
            client_id=self._client_id,
            base_version=invitation.base_version,
            base_digest=invitation.model_digest,
            **of_training,
        )

    def _stage_own(self, invitation: Invitation, trained: Training) -> None:
        """Make the client state after a training durable, until the update's verdict; the algorithm may have none."""
        if trained.has_own:
            of_round = invitation.run_id, invitation.round_id, invitation.counted_round
            self._client_state.stage(*of_round, self._client_state_out)

    async def _encode(self, invitation: Invitation, encoding: Encoding, trained: Training) -> None:
        """Make the encoded update durable; nothing about this site alone is kept with it.

        The ranks of a mesh have encoded it where its boxes are; a file is encoded here, once.

        Raises:
            RunnerFailed: the update is of other tensors than the terms, or has values that are not finite.
        """
        if trained.parts and trained.encoded is None:
            detail = "the ranks have not encoded their parts: they run another version of Atoll than the agent"
            raise RunnerFailed(FailureReason.SESSION_REFUSED, detail)
        layout = parse_header(self._cache.path(invitation.model_digest))[0]
        plan = encoding.plan(trained.num_examples, trained.statistics)
        parts = [PartManifest(index, pieces) for index, pieces in enumerate(trained.parts)]

        def add() -> Words:
            self._save_seen()
            self._stage_own(invitation, trained)
            encoded = trained.encoded or encode_update(self._update_out, self._encoded_out, layout=layout, plan=plan)
            remove(self._update_out)
            listed = tuple(part.listed for part in parts)
            manifest = self._manifest(invitation, num_examples=1, work=1.0, pieces=encoded.pieces, parts=listed)
            self._encoded.add(
                self._encoded_out,
                manifest,
                statistics={},
                rank=invitation.rank,
                spreads=invitation.spreads,
                parts=parts,
                terms="" if invitation.secure is None else invitation.secure.of_sum.hex(),
            )
            return encoded

        try:
            encoded = await on_thread(None, add)
        except NotFinite as error:
            raise RunnerFailed(FailureReason.NOT_FINITE, str(error)) from None
        except ValueError as error:
            raise RunnerFailed(FailureReason.TRAINING_FAILED, str(error)) from None
        clipped = f", clipped to {encoding.clip_norm:g}" if encoded.norm > encoding.clip_norm else ""
        text = "encoded the update of round %d of %s for a secure sum: norm %.4g%s"
        logger.info(text, invitation.round_id, invitation.run_id, encoded.norm, clipped)
        for left_out in encoded.left_out:
            logger.warning("not in the secure sum of round %d: %s", invitation.round_id, left_out)

    async def evaluate(self, request: EvaluationRequest, budget: float) -> Event:
        """Evaluate a version within `budget` seconds; returns Evaluated, with the sums or the reason for none.

        Each answer has other noise of the task, as the rows may have changed since the last one; none waits on disk.
        """
        try:
            order = EvaluateOrder(
                **_of_run(request, budget),
                model=self._cache.path(request.model_digest),
                version=request.version,
                own=await self._own(request.run_id, request.counted_round),
                model_seed=request.model_seed,
                noise=secrets.token_bytes(BYTES),
            )
            sums = await self._runner.evaluate(order)
            await on_thread(None, self._save_seen)
        except RunnerFailed as error:
            return Evaluated(request.key, None, f"{error.reason}: {error.detail}", error.reason)
        except OSError as error:
            reason = _disk_reason(error, FailureReason.TRAINING_FAILED)
            return Evaluated(request.key, None, f"{reason}: {_text(error)}", reason)
        logger.info("evaluated version %d of %s", request.version, request.run_id)
        return Evaluated(request.key, sums, "" if sums is not None else "this site has no test data")

    async def make_statistics(self, request: StatisticsRequest, budget: float) -> Event:
        """Make the statistics of the site's data within `budget` seconds; returns StatisticsMade or JobFailed."""
        try:
            order = StatisticsOrder(
                **_of_run(request, budget),
                model_seed=request.model_seed,
                question="" if request.question is None else request.question.text,
                noise=secrets.token_bytes(BYTES),
            )
            found = await self._runner.statistics(order)
            await on_thread(None, self._save_seen)
        except RunnerFailed as error:
            return JobFailed(request.key, error.reason, error.detail)
        except OSError as error:
            return JobFailed(request.key, _disk_reason(error, FailureReason.TRAINING_FAILED), _text(error))
        logger.info("made the statistics of request %d of %s", request.number, request.run_id)
        return StatisticsMade(request.key, found)


def _residual_owner(invitation: Invitation) -> Owner:
    """Return the owner of the residuals that biased codecs leave out of this client's updates in one run and task."""
    return Owner("residual", invitation.run_id, invitation.task)


def _of_run(request: Invitation | EvaluationRequest | StatisticsRequest, budget: float) -> dict[str, Any]:
    """Return the part of an order that is the same for all work, and for statistics before a run has a number."""
    named = {name: getattr(request, name) for name in ("task", "run_id")}
    if not isinstance(request, StatisticsRequest):
        named |= {"run_number": request.run_number, "asked_at": request.asked_at}
    return named | {"local": _overrides(request.local), "budget": budget}


def _overrides(local: str) -> dict[str, Any]:
    """Read an invitation's overrides of the task's Local: a JSON object of plain values."""
    try:
        overrides = json.loads(local)
    except (ValueError, RecursionError) as error:
        raise RunnerFailed(FailureReason.TRAINING_FAILED, f"the invitation's `local` is not JSON: {error}") from None
    if not isinstance(overrides, dict):
        raise RunnerFailed(FailureReason.TRAINING_FAILED, "the invitation's `local` is not a JSON object")
    return overrides


def _disk_reason(error: OSError, otherwise: FailureReason) -> FailureReason:
    return FailureReason.DISK_FULL if finds_no_room(error) else otherwise


def _text(error: OSError) -> str:
    return error.strerror or str(error)
