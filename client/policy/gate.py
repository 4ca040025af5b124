"""The gate between a site and its coordinator: it applies the policy, counts rounds and logs every decision.

It fails closed: a policy that is no longer valid, or a history or log that cannot be written, allows nothing.
"""

import hashlib
import json
import logging
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atoll.client.disk.fresh_bytes import FreshBytes
from atoll.client.disk.spool import Entry
from atoll.client.policy.budgets.site_budgets import SiteBudgets
from atoll.client.policy.config import PrivacyPolicy, SecurePolicy
from atoll.client.policy.decide import (
    ALLOWED,
    COUNTED,
    Decision,
    Kind,
    Outcome,
    PolicyRequest,
    Rule,
    day_of,
    decide,
    is_open,
)
from atoll.client.policy.decisions import DecisionLog
from atoll.client.policy.file import PolicyFile
from atoll.client.policy.history import RUNS_MAX, HistoryUnusable, PolicyHistory
from atoll.client.policy.promise_store import PromiseStore
from atoll.client.policy.small_cells import StatisticsTerms
from atoll.client.secure.promises import Promise
from atoll.client.session.events import EvaluationRequest, Invitation, ModelRequest, Request, StatisticsRequest
from atoll.ground.bounded_mapping import BoundedMapping
from atoll.ground.folders import finds_no_room
from atoll.ground.printable import count_of
from atoll.ground.process import crash_points
from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.manifest import VersionManifest, parse_update
from atoll.protocol.part_manifest import parse_part
from atoll.protocol.privacy.composition import Kinds
from atoll.protocol.secure.terms import Terms
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import FailureReason
from atoll.tensors.codecs.chunks import encoded_bytes
from atoll.tensors.codecs.names import open_codec
from atoll.tensors.secure.masked_layout import EXACT
from atoll.training.local.algorithms import CONCATENATE

logger = logging.getLogger(__name__)

ROOM_BYTES = 64 * 1024
"""Free space [bytes] from which a disk no longer counts as full: enough for hundreds of decisions."""


class Gate:
    """Policy gate of one agent. Every method is quick; beginning a round costs one durable write.

    Args:
        policy: the policy file; None: the default policy.
        folder: the agent's state directory.
        now: returns seconds since the epoch.
        coordinator: the place that receives updates, for the record of charges.
        noise: name of the secret of the agent's noise (`SiteBudgets`).

    Raises:
        ConfigError: the policy, its history, its log or its ledger of budgets cannot be used.
    """

    def __init__(
        self,
        policy: Path | None,
        folder: Path,
        now: Callable[[], float] = time.time,
        *,
        coordinator: str = "",
        noise: str = "",
    ) -> None:
        self._file, self._now = PolicyFile(policy), now
        try:
            self._log, self._history = DecisionLog(folder, now), PolicyHistory(folder)
            self.promises = PromiseStore(self._history.database)
            self._budgets = SiteBudgets(self._history.database, folder, coordinator=coordinator, noise=noise)
            self._check_budgets()
        except OSError as error:
            raise ConfigError([f"state: {error}"]) from error
        self.decisions: Counter[Decision] = Counter()
        """Number of decisions of this process by outcome and rule; their details are left out."""
        self.awaiting: dict[str, str] = {}
        """Runs that wait for the operator's approval, each with its log message."""
        self._site_fault: Callable[[], str] = str
        self._told_fault = ""
        self._folder, self._is_full, self._seen = folder, False, self._state()
        self._fresh = FreshBytes(folder)
        self._told_approver: BoundedMapping[str, str] = BoundedMapping(RUNS_MAX)

    def _check_budgets(self) -> None:
        """Check the ledger of the policy's budgets, and warn of names that nothing guards any more.

        Raises:
            ConfigError: it allows nothing.
        """
        policy = self._file.policy
        if policy is None or not policy.privacy.data:
            return
        if fault := self._budgets.fault(policy.privacy):
            raise ConfigError([f"state: {fault}"])
        for name in self._budgets.names_without_policy(policy.privacy):
            text = "data set %s has charges, and the policy has no budget of this name: nothing guards its data"
            logger.warning(text, name)

    def close(self) -> None:
        """Close the files of the history, the ledger and the log."""
        self._budgets.close()
        self._history.close()
        try:
            self._log.close()
        except OSError as error:
            logger.error("the log of the decisions cannot be signed: %s", error)

    def note_checkpoint(self, checkpoint: str) -> None:
        """Log a checkpoint of the coordinator's audit log: evidence at the site in case that log is truncated later."""
        try:
            self._log.note_checkpoint(checkpoint)
        except (OSError, ValueError) as error:
            logger.error("a checkpoint of the coordinator's audit log cannot be recorded: %s", error)

    @property
    def damage(self) -> str:
        """Description of a broken chain in the site's log; empty: none."""
        return self._log.damage

    @property
    def error_details(self) -> bool:
        """Return whether error messages may leave the site; never while the policy is not valid."""
        return self._file.policy is not None and self._file.policy.error_details

    @property
    def disclosure(self) -> Disclosure:
        """Return the terms on which metrics leave the site; no metrics leave while the policy is not valid."""
        return Disclosure(MetricsLeave.NONE) if self._file.policy is None else self._file.policy.disclosure

    def disclosure_of(self, entry: Entry) -> Disclosure:
        """Return the terms on which the metrics of an update's training leave: none of data with a budget do."""
        policy = self._file.policy
        if policy is None or not policy.privacy.data:
            return self.disclosure
        manifest = parse_update(entry.manifest)
        run_id, number = manifest.run_id, manifest.round_id
        try:
            task = self._history.task_of(run_id)
            upload = PolicyRequest(kind=Kind.UPLOAD, run_id=run_id, task=task, number=number)
            is_free = self._budgets.is_free(policy.privacy, upload)
        except HistoryUnusable:
            return Disclosure(MetricsLeave.NONE)
        return self.disclosure if is_free else Disclosure(MetricsLeave.NONE)

    @property
    def statistics_terms(self) -> StatisticsTerms:
        """Return the terms on which statistics leave the site; no statistics leave while the policy is not valid."""
        return StatisticsTerms() if self._file.policy is None else self._file.policy.statistics_terms

    @property
    def secure(self) -> SecurePolicy | None:
        """Return the site's demands on secure sums; None while the policy is not valid."""
        return None if self._file.policy is None else self._file.policy.secure

    def watch(self, site_fault: Callable[[], str]) -> None:
        """Allow nothing while `site_fault` returns a sentence: a file of this site for secure sums is damaged."""
        self._site_fault, self._seen = site_fault, ()
        self._seen = self._state()

    def note_session(self, of: Terms | Promise, action: str, outcome: str) -> None:
        """Log what this site has done in a session of a secure sum, see `DecisionLog.note_session`.

        Raises:
            OSError: the log cannot be written.
        """
        self._log.note_session(of, action, outcome)

    def poll(self) -> bool:
        """Return whether decisions may have changed: by policy, approval, hours, a new day or free space."""
        try:
            self._log.sign()
        except OSError as error:
            logger.error("the log of the decisions cannot be signed: %s", error)
        has_changed = self._file.poll() | self._has_room_again()
        seen, self._seen = self._seen, self._state()
        return has_changed or self._seen != seen

    def _has_room_again(self) -> bool:
        if not self._is_full:
            return False
        try:
            with tempfile.TemporaryFile(dir=self._folder) as probe:
                probe.write(bytes(ROOM_BYTES))
                probe.flush()
        except OSError:
            return False
        self._is_full = False
        return True

    def _state(self) -> tuple[object, ...]:
        policy, now = self._file.policy, self._now()
        try:
            change = self._history.change
        except HistoryUnusable:
            change = -1
        return (change, self._site_fault(), *(() if policy is None else (is_open(policy, now), day_of(policy, now))))

    def accepted_rollbacks(self) -> list[str]:
        """Return the runs whose rollback the operator accepts, until `rollback_taken`."""
        try:
            return self._history.accepted_rollbacks()
        except HistoryUnusable as error:
            logger.error("an accepted rollback cannot be read: %s", error)
            return []

    def rollback_taken(self, run_id: str) -> None:
        """Record that the agent has forgotten the seen rounds of a run."""
        try:
            self._history.taken(run_id)
        except HistoryUnusable as error:
            logger.error("an accepted rollback was used but cannot be marked as used, so it stays valid: %s", error)

    # ------------------------------------------------------------ questions

    def ask(self, request: Request) -> Decision:
        """Decide about a request of the coordinator, before the size of its model is known."""
        if isinstance(request, StatisticsRequest):
            return self._ask_statistics(request)
        asked = _asked(request, None, self.disclosure)
        decision, turn = self._decide(asked)
        self._tell_approver(request.run_id, decision)
        return decision if decision.is_allowed else self._logged(asked, decision, turn)

    def _ask_statistics(self, request: StatisticsRequest) -> Decision:
        """Decide about a request without a model; log an allowed one at once."""
        asked = PolicyRequest(
            kind=Kind.STATISTICS,
            run_id=request.run_id,
            task=request.task,
            number=request.number,
            local=request.local,
            metrics=str(self.statistics_terms),
            terms=request.secure,
        )
        decision, turn = self._decide(asked)
        self._tell_approver(request.run_id, decision)
        return self._logged(asked, decision, turn)

    def _tell_approver(self, run_id: str, decision: Decision) -> None:
        """Log the command that approves a waiting run, once for each of its terms."""
        if decision.rule is not Rule.APPROVAL:
            return
        there = f"--state {shlex.quote(str(self._folder.absolute()))}"
        what, look = f"{decision.detail}, here with {there}", f"`atoll site list {there}` shows its terms"
        self.awaiting[run_id] = f"run {run_id} waits for approval: {what}; {look}"
        if self._told_approver.get(run_id) != decision.detail:
            self._told_approver[run_id] = decision.detail
            logger.warning("%s", self.awaiting[run_id], extra={"run": run_id})

    def admit(self, request: ModelRequest, model: VersionManifest) -> Decision:
        """Decide about a request whose model is known; an allowed round is durably counted on return."""
        num_bytes = None if isinstance(request, EvaluationRequest) else _update_bytes(model, request)
        return self._decide_and_count(_asked(request, num_bytes, self.disclosure))

    def accounts_ahead(self, request: ModelRequest) -> list[tuple[Kinds, float]]:
        """Return the steps and deltas of which `admit` needs epsilon: a thread finds it before the event loop asks."""
        policy = self._file.policy
        try:
            asked = _asked(request, None, self.disclosure)
            return [] if policy is None else self._budgets.accounts_ahead(policy.privacy, asked)
        except HistoryUnusable:  # `admit` says so
            return []

    def ask_upload(self, entry: Entry) -> Decision:
        """Decide about the upload of an update before its first byte; an allowed upload is recorded on return.

        The fresh bytes of its noise are then gone, so that no other training has the same noise.
        """
        manifest = parse_update(entry.manifest)
        try:
            task = self._history.task_of(manifest.run_id)
        except HistoryUnusable as error:
            return self._unusable(error)
        size = entry.num_bytes + len(entry.manifest) + sum(len(part.manifest) for part in entry.parts)
        upload = PolicyRequest(
            kind=Kind.UPLOAD,
            run_id=manifest.run_id,
            task=task,
            number=manifest.round_id,
            num_bytes=size,
            content=entry.digest,
            is_masked=_is_masked(entry)
            and self.promises.promises.attempt_of(manifest.run_id, "update", manifest.round_id) > 0,
        )
        decision = self._decide_and_count(upload)
        if decision.is_allowed:
            try:
                self._fresh.forget(manifest.run_id, manifest.round_id)
            except OSError as error:
                return self._unusable(error)
        return decision

    def _decide_and_count(self, request: PolicyRequest) -> Decision:
        decision = self._decided(request)
        self.decisions[Decision(decision.outcome, decision.rule)] += 1
        return decision

    def _decided(self, request: PolicyRequest) -> Decision:
        decision, turn = self._decide(request)
        policy = self._file.policy
        if decision.is_allowed and request.kind in COUNTED:
            assert policy is not None
            decision = self._charged(policy.privacy, request)
        decision = self._logged(request, decision, turn)
        if decision.is_allowed and request.kind in COUNTED and self._file.path is not None:
            assert policy is not None
            try:
                self._history.count(request, day_of(policy, self._now()))
            except HistoryUnusable as error:
                return self._unusable(error)
        return decision

    def _charged(self, policy: PrivacyPolicy, request: PolicyRequest) -> Decision:
        """Charge what a request spends, if it reads data with a budget; it is durable when the request is allowed."""
        try:
            charges, fault = self._budgets.charge(policy, request, self._now())
            for charge in charges:
                self._log.note_charge(request, charge)
                logger.info("round %d of run %s is %s", request.number, request.run_id, charge)
        except OSError as error:
            return self._unusable(error)
        if charges:
            crash_points.reached("agent.charged")
        return Decision(Outcome.REFUSED, Rule.BUDGET, fault) if fault else ALLOWED

    def _decide(self, request: PolicyRequest) -> tuple[Decision, int]:
        """Return the decision, and how often the round has begun."""
        policy, now = self._file.policy, self._now()
        if policy is None:
            detail = "this site's policy is not valid now: nothing is allowed until it is"
            return Decision(Outcome.WAITING, Rule.POLICY_FILE, detail), 0
        if fault := self.promises.fault or self._site_fault():
            return self._damaged(fault, "this site's files for secure sums are damaged"), 0
        try:
            if fault := self._budgets.fault(policy.privacy):
                return self._damaged(fault, "this site's ledger of privacy budgets is damaged"), 0
            self._told_fault = ""
            self._note(request, now)
            history = self._history.of(request, day=day_of(policy, now))
            history = replace(history, over_budget=self._budgets.objection(policy.privacy, request))
        except HistoryUnusable as error:
            return self._unusable(error), 0
        decision = decide(policy, request, history, now)
        if decision.rule is not Rule.APPROVAL:
            self.awaiting.pop(request.run_id, None)
        return decision, history.turn

    def _damaged(self, fault: str, detail: str) -> Decision:
        if fault != self._told_fault:
            logger.error("%s", fault)
        self._told_fault = fault
        return Decision(Outcome.WAITING, Rule.STATE, detail)

    def _note(self, request: PolicyRequest, now: float) -> None:
        if request.local is None:
            return
        if self._history.asked(request, now):
            algorithm, codec = request.algorithm, request.codec
            terms = "" if algorithm is None else f"{algorithm}, codec {codec or 'plain'}, "
            if request.terms is not None:
                terms += f"in secure sums ({_sums_text(request.terms)}), "
            of_metrics = request.metrics if request.kind is Kind.STATISTICS else f"metrics {request.metrics}"
            terms += of_metrics + (f", local = {request.local}" if request.local not in ("", "{}") else "")
            extra = {"run": request.run_id}
            logger.info("run %s asks here for task %s, with %s", request.run_id, request.task, terms, extra=extra)

    def _logged(self, request: PolicyRequest, decision: Decision, turn: int) -> Decision:
        try:
            self._log.write(request, decision, turn)
        except OSError as error:
            return self._unusable(error)
        return decision

    def _unusable(self, error: OSError) -> Decision:
        logger.error("nothing is allowed: %s", error)
        if finds_no_room(error):
            self._is_full = True
            return Decision(Outcome.WAITING, Rule.DISK_FULL, "this site has no room to record its decisions")
        return Decision(Outcome.WAITING, Rule.STATE, "this site cannot record its decisions")


def failure_of(decision: Decision) -> FailureReason:
    """Return the failure reason that tells the coordinator about a decision."""
    reasons = {Rule.APPROVAL: FailureReason.AWAITS_APPROVAL, Rule.DISK_FULL: FailureReason.DISK_FULL}
    return reasons.get(decision.rule, FailureReason.POLICY_REFUSED)


def _asked(request: ModelRequest, num_bytes: int | None, disclosure: Disclosure) -> PolicyRequest:
    if isinstance(request, EvaluationRequest):
        return PolicyRequest(
            kind=Kind.EVALUATE,
            run_id=request.run_id,
            task=request.task,
            number=request.version,
            local=request.local,
            metrics=str(disclosure),
            terms=request.secure,
        )
    return PolicyRequest(
        kind=Kind.TRAIN,
        run_id=request.run_id,
        task=request.task,
        number=request.round_id,
        num_bytes=num_bytes,
        local=request.local,
        algorithm=request.algorithm,
        codec=request.codec,
        metrics=str(disclosure),
        action=request.message,
        content=content_of(request),
        terms=request.secure,
    )


def _sums_text(terms: Terms) -> str:
    if terms.purpose == "statistics":
        return f"at most {count_of(terms.members_max, 'site')}, threshold {terms.threshold}"
    weights = f"weights of up to {count_of(terms.examples_max, 'example')}" if terms.examples_max else "equal weights"
    return (
        f"at most {count_of(terms.members_max, 'site')}, threshold {terms.threshold}, clip_norm {terms.clip_norm:g}, "
        f"{terms.bits}-bit words, {weights}"
    )


def _is_masked(entry: Entry) -> bool:
    """Return whether an update has the form of a masked one: it has the tensor of the exact words."""
    pieces = [*parse_update(entry.manifest).pieces]
    for part in entry.parts:
        pieces += parse_part(part.manifest).pieces
    return any(piece.tensor == EXACT for piece in pieces)


def _update_bytes(model: VersionManifest, request: Invitation) -> int | None:
    """Return the size of an update of the whole model [bytes], without its manifest, or None.

    None: the update has a variable number of rows, or is a reply to a message; its size is checked before its upload.
    """
    if request.algorithm == CONCATENATE or request.message:
        return None
    if not request.codec:
        return model.num_bytes
    try:
        encoding = open_codec(request.codec)
        return sum(
            min(tensor.num_bytes, encoded_bytes(encoding, tensor.num_elements))
            if tensor.dtype == "F32"
            else tensor.num_bytes
            for tensor in model.layout
        )
    except ValueError:  # the codec of a plugin: assume that it is no smaller than plain values
        return model.num_bytes


def content_of(invitation: Invitation) -> str:
    """Return the SHA-256 of all fields of an invitation that the update depends on.

    Two trainings of one round with equal content are the same work: an agent that reconnects and a coordinator that
    replays its journal repeat it. It excludes the run and the round, which are compared separately; the remaining time
    and the instant of the first invitation; and the aggregation rank, which changes when a rank is away.
    """
    content = {
        "task": invitation.task,
        "base_version": invitation.base_version,
        "model_digest": invitation.model_digest,
        "seed": invitation.seed,
        "local": invitation.local,
        "algorithm": invitation.algorithm,
        "codec": invitation.codec,
        "counted_round": invitation.counted_round,
        "model_seed": invitation.model_seed,
    }
    if invitation.secure is not None:
        content |= {"secure": invitation.secure.approved.hex(), "ranges": invitation.secure.ranges}
    if invitation.message:
        content |= {"message": invitation.message, "group": invitation.group}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
