"""Planted bugs: each is applied to a copy of the tree, never in place, in which the suite must fail.

    python -m tests.mutants                    # all, as `make mutants`; writes docs/mutants.md
    python -m tests.mutants --new              # those without a row in docs/mutants.md; the other rows stay
    python -m tests.mutants --only NAME        # one, with the output of what caught it
    python -m tests.mutants --list

A simulator is finished when it catches the mutants, not when all seeds pass. There are two sources: `PLANTED`,
plausible mistakes made by hand; and a seeded sample of the mutants that the tool mutmut makes of the machines' files,
stored in `tests/generated_mutants.json` (see `tests/make_mutants.py`).

Use in another test:

    with tempfile.TemporaryDirectory() as directory:
        tree = tree_with(find("late update accepted"), Path(directory))
        result = run_in(tree, [sys.executable, "-m", "pytest", "-x", "tests/wire"], timeout=120)
        assert result.returncode != 0
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutant import Mutant
from tests.mutants_of_privacy import OF_PRIVACY
from tests.mutants_of_sums import OF_SUMS

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "tests" / "generated_mutants.json"
REPORT = ROOT / "docs" / "mutants.md"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "mutants", "demo-run", "bench-out", "*.pyc")
SEEDS = 400
PURE_TESTS = (
    "tests/server/parts/test_gathering.py",
    "tests/server/rounds/test_cohort_round.py",
    "tests/server/rounds/test_buffer_round.py",
    "tests/server/test_clock.py",
    "tests/server/folding/test_plan.py",
    "tests/server/rounds/test_lost_files.py",
    "tests/server/rounds/test_run_machine.py",
    "tests/server/rounds/test_evaluations.py",
    "tests/server/members/test_membership.py",
    "tests/server/rounds/test_policy.py",
    "tests/server/rounds/test_waits_for_clients.py",
    "tests/server/views/test_waiting.py",
    "tests/client/session/test_session.py",
    "tests/client/session/test_rollback_rules.py",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutant."""

    mutant: Mutant
    caught_by: str  # the seed or the test that failed; empty: none, the mutant survived
    seconds: float


ROUNDS, RUN, LEDGER = "server/rounds/cohort_round.py", "server/rounds/run_machine.py", "server/rounds/ledger.py"
EVALUATIONS, GATHERING = "server/rounds/evaluations.py", "server/parts/gathering.py"
OPEN_ROUND, ADMISSION, INTAKE = (
    "server/rounds/open_round.py",
    "server/rounds/update_claims.py",
    "server/rounds/update_intake.py",
)
BUFFER, INVITATIONS, PLAN = (
    "server/rounds/buffer_round.py",
    "server/rounds/async_invitations.py",
    "server/folding/plan.py",
)
MEMBERSHIP, SESSION, EVALUATION = (
    "server/members/membership.py",
    "client/session/session.py",
    "server/rounds/client_evaluation.py",
)
LOSSES, RENEWAL = "server/required/losses.py", "protocol/identity/renewal.py"
OF_LOSSES = ("tests/wire/test_losses.py",)
CLOCK, PAGES, LEASES = "server/clock.py", "server/members/member_pages.py", "server/members/leases.py"

PLANTED = (
    Mutant(
        "quorum ignored at the deadline",
        ROUNDS,
        "        if self._reachable() >= self.record.quorum:\n            return self._close(reason, now)",
        "        if True:\n            return self._close(reason, now)",
        "a round commits below its quorum",
    ),
    Mutant(
        "quorum off by one",
        ROUNDS,
        "        if self._reachable() >= self.record.quorum:",
        "        if self._reachable() >= self.record.quorum - 1:",
        "a round commits one update below its quorum",
    ),
    Mutant(
        "hopeless round continues",
        ROUNDS,
        "            return self._below_quorum(AbandonReason.QUORUM_OUT_OF_REACH, now)\n        if policy.linger",
        "            return ()\n        if policy.linger",
        "a round that cannot reach its quorum waits for its deadline",
    ),
    Mutant(
        "round waits although everyone answered",
        ROUNDS,
        "        if not expected:\n            reason",
        "        if False:\n            reason",
        "a round waits for its deadline although no client can answer any more",
    ),
    Mutant(
        "enough is not enough",
        ROUNDS,
        "        if len(self._answered) >= policy.cohort_size:\n",
        "        if len(self._answered) > policy.cohort_size:\n",
        "a round wants one update more than `cohort_size`",
    ),
    Mutant(
        "grace for everyone",
        ROUNDS,
        "        return client.upload_begun_at is not None and deadline is not None and",
        "        return client.upload_begun_at is not None and deadline is not None or",
        "the grace period also takes uploads that began after the deadline",
    ),
    Mutant(
        "grace waits without a chance",
        ROUNDS,
        "            return self._settle(now)  # only the uploads",
        "            return ()  # only the uploads",
        "the grace period is waited out although the uploads in progress cannot make the quorum",
    ),
    Mutant(
        "linger ends with the deadline",
        ROUNDS,
        "        return limit if record.linger_by is None else min(record.linger_by, limit)",
        "        return limit if record.linger_by is None or self._in_grace else min(record.linger_by, limit)",
        "`linger` is ignored in the grace period",
    ),
    Mutant(
        "outage without end",
        OPEN_ROUND,
        "        extension = min(seconds, self.policy.outage_max - self._extended)",
        "        extension = seconds",
        "an outage extends a round by more than `outage_max`",
    ),
    Mutant(
        "every outage anew",
        OPEN_ROUND,
        "        self._extended += extension\n",
        "",
        "`outage_max` holds for each outage, not for all of them",
    ),
    Mutant(
        "aggregation forgotten in a crash",
        OPEN_ROUND,
        "        if record.phase is Phase.AGGREGATING:\n            return (self._aggregate(),)\n        return ()",
        "        return ()",
        "after a crash the closed round is not folded",
    ),
    Mutant(
        "lost before it was invited",
        ROUNDS,
        "            if reason := self.membership.lost_because(client_id):",
        '            if reason := "":',
        "a client that was lost during the draw is waited for, without a lease",
    ),
    Mutant(
        "no second invitation",
        ROUNDS,
        "client.fate not in (Fate.WAITING, Fate.LOST):\n            return ()",
        "client.fate is not Fate.WAITING:\n            return ()",
        "a client that returns after the end of its lease is not invited again",
    ),
    Mutant(
        "released without telling",
        ROUNDS,
        "        return tuple(Release(c, self.record.round_id, reason, submit) for c in released)",
        "        return tuple(Release(c, self.record.round_id, reason, submit) for c in released[1:])",
        "one straggler continues to train in vain",
    ),
    Mutant(
        "discount upside down",
        "aggregation/fold/weights.py",
        "    return float((1.0 + staleness) ** -exponent)",
        "    return float((1.0 + staleness) ** exponent)",
        "stale updates count more than fresh ones",
    ),
    Mutant(
        "partial work counts in full",
        ADMISSION,
        '    return work if policy.partial_work == "scaled" else 1.0',
        "    return 1.0",
        "`scaled` does not scale",
    ),
    Mutant(
        "a client counts twice",
        ROUNDS,
        "for client_id, update in late if client_id not in self._reported]",
        "for client_id, update in late]",
        "a client with a late and a fresh update counts twice",
    ),
    Mutant(
        "adaptive to the fastest",
        ROUNDS,
        "        slowest_needed = seconds[min(policy.cohort_size, len(seconds)) - 1]",
        "        slowest_needed = seconds[0]",
        "the adaptive deadline is that of the fastest client",
    ),
    Mutant(
        "overdue only on a tick",
        RUN,
        "        while (deadline := self.deadline) is not None and now >= deadline:",
        "        while isinstance(event, TimePassed) and (deadline := self.deadline) is not None and now >= deadline:",
        "events between the deadline and the driver's wake-up are still in time (the bug of the first sketch)",
    ),
    Mutant(
        "retry counts twice",
        INTAKE,
        "        if record is not None and client is not None and client.has(update.digest):",
        "        if False:",
        "a repeated upload of an accepted update is not recognised",
    ),
    Mutant(
        "late update accepted",
        INTAKE,
        '        if policy.late == "discard":',
        "        if False:",
        "an update that is too late is carried although the policy is `discard`",
    ),
    Mutant(
        "any age will do",
        INTAKE,
        "        if next_base - update.base_version > policy.max_staleness:",
        "        if next_base - update.base_version > policy.max_staleness + 1:",
        "updates one version too old are carried",
    ),
    Mutant(
        "age of the wrong commit",
        INTAKE,
        "        next_base = ledger.version + (self.round is not None and open_round is None)",
        "        next_base = ledger.version + (self.round is not None and self.round.phase is Phase.AGGREGATING)",
        "an update that misses its own round is judged as if it counted in it",
    ),
    Mutant(
        "carried past the end",
        INTAKE,
        "        if next_base >= self.rules.rounds or ledger.stop_reason is not None:",
        "        if next_base > self.rules.rounds:",
        "an update is acknowledged although no round follows that could use it",
    ),
    Mutant(
        "failures never forgotten",
        RUN,
        "        ledger.version, ledger.model_digest, ledger.failures = commit.version, commit.model_digest, 0",
        "        ledger.version, ledger.model_digest = commit.version, commit.model_digest",
        "`retry` counts abandoned rounds that were not in a row",
    ),
    Mutant(
        "one retry too many",
        RUN,
        "        if (is_hopeless or ledger.failures > policy.retry) and ledger.stop_reason is None:",
        "        if (is_hopeless or ledger.failures > policy.retry + 1) and ledger.stop_reason is None:",
        "a run tries once more than `retry` says",
    ),
    Mutant(
        "an absence costs a retry",
        "server/rounds/retries.py",
        "    AbandonReason.AWAITS_CLIENTS,\n",
        "",
        "a run fails when its sites are away four times in a row",
    ),
    Mutant(
        "a loss on the disk costs a retry",
        "server/rounds/retries.py",
        "    AbandonReason.FILES_LOST,\n",
        "",
        "a run fails for files that its coordinator has lost",
    ),
    Mutant(
        "a lost update is carried on",
        RUN,
        "        ledger.carried = {c: update for c, update in ledger.carried.items() if",
        "        _ = {c: update for c, update in ledger.carried.items() if",
        "a round is closed with an update whose file is lost",
    ),
    Mutant(
        "a lost update waits on",
        RUN,
        "        ledger.waiting = [update for update in ledger.waiting if update.digest not in digests]\n",
        "",
        "a buffer begins with an update whose file is lost",
    ),
    Mutant(
        "folded below the quorum after a loss",
        OPEN_ROUND,
        "        if num_left < self.record.quorum:",
        "        if False:",
        "a closed round commits below its quorum when updates of it are lost",
    ),
    Mutant(
        "no fold of what is left",
        OPEN_ROUND,
        "            return self.end_without_files(detail, now)\n        return (self._aggregate(),)",
        "            return self.end_without_files(detail, now)\n        return ()",
        "a round that was aggregating hangs after a loss",
    ),
    Mutant(
        "a lost update counts as here",
        "server/rounds/record.py",
        "        return self.digest == digest and not self.is_lost",
        "        return self.digest == digest",
        "a lost update that its client still has is acknowledged and not taken",
    ),
    Mutant(
        "a linger from before the loss",
        "server/rounds/cohort_round.py",
        "            self.record.linger_by = None\n        if self.phase",
        "            pass\n        if self.phase",
        "a round closes below its quorum when an update was lost in its linger time",
    ),
    Mutant(
        "a wait without its end",
        "server/rounds/open_round.py",
        "until = math.inf if self._wait.most is None else since + self._wait.most",
        "until = math.inf",
        "`wait.most` is ignored",
    ),
    Mutant(
        "the same absence costs each round its time",
        "server/rounds/cohort_round.py",
        "                self.membership.settle_for_these()\n",
        "                pass\n",
        "each round waits `selection_timeout` for a client that the last one did without",
    ),
    Mutant(
        "a pause without an end",
        RUN,
        "            effects.append(ResumeRun())\n",
        "            pass\n",
        "a run that was paused after a wait stays paused when its clients are back",
    ),
    Mutant(
        "a pause that no room ends",
        RUN,
        "return (*effects, ResumeRun()) if is_ended_by_it and ledger.state is RunState.PAUSED else effects",
        "return effects",
        "a run that was paused for want of room stays paused when there is some",
    ),
    Mutant(
        "time runs on a full disk",
        RUN,
        'seconds, ledger.short_since, ledger.short_of = max(0.0, now - ledger.short_since), None, ""',
        'seconds, ledger.short_since, ledger.short_of = 0.0, None, ""',
        "deadlines pass while the coordinator's disk has no room for the updates",
    ),
    Mutant(
        "round never due after a crash",
        RUN,
        "        if ledger.is_round_due:\n            effects.append(OpenNextRound(ledger.retry_at))\n",
        "",
        "a coordinator that dies between two rounds never opens the next",
    ),
    Mutant(
        "evaluation forgotten in a crash",
        RUN,
        "[*(EvaluateModel(version) for version in ledger.unevaluated), *ledger.computing]",
        "[*ledger.computing]",
        "a run whose coordinator dies in its last evaluation never finishes",
    ),
    Mutant(
        "stop while aggregating ends at once",
        RUN,
        "        if self.round.phase is Phase.AGGREGATING:\n            ledger.stop_reason = reason",
        "        if False:\n            ledger.stop_reason = reason",
        "a stop does not let a round that aggregates commit",
    ),
    Mutant(
        "ghosts after a resume",
        RUN,
        "            ledger.membership.everyone_disconnected()  # the driver reports the connected clients again now\n",
        "",
        "a resumed run counts clients that left while it was stopped",
    ),
    Mutant(
        "old records dropped too early",
        RUN,
        "        ledger.past[round_.record.round_id] = round_.record\n        is_last",
        "        ledger.past[round_.record.round_id] = round_.record\n"
        "        ledger.forget_old_rounds(most=3)\n        is_last",
        "the record of a late update's fate is dropped before it is written",
    ),
    Mutant(
        "an older loss wins",
        MEMBERSHIP,
        "round_id < member.last_round",
        "round_id > member.last_round > 0",
        "a sampler sees the loss of a client's oldest update",
    ),
    Mutant(
        "a client without a loss forgets the last one",
        MEMBERSHIP,
        "        if loss is not None:\n            member.loss, member.utility = loss, utility\n",
        "        member.loss, member.utility = loss, utility\n",
        "a client whose newest update reports no loss counts as one that never reported any",
    ),
    Mutant(
        "no client counts as chosen",
        ROUNDS,
        "            self.membership.chosen(client_id)\n",
        "",
        "Oort invites clients that never report again and again",
    ),
    Mutant(
        "late updates teach nothing",
        INTAKE,
        "        learn(ledger.membership, update)\n        effects += self._change_fate(update, record, Fate.CARRIED",
        "        effects += self._change_fate(update, record, Fate.CARRIED",
        "a sampler never hears of the loss of an update that came too late for its own round",
    ),
    Mutant(
        "the pacer rests",
        RUN,
        "        self._pace(round_, commit)\n",
        "",
        "Oort never waits for slower clients when the utility of the fast ones falls",
    ),
    Mutant(
        "the pacer counts a client twice",
        RUN,
        "for update in round_.held if update.digest in commit.used]",
        "for update in round_.held]",
        "a late update counts for the pacer although a fresh one of its client is in the model",
    ),
    Mutant(
        "the pacer counts examples",
        RUN,
        "used = [utility_of(update) for",
        "used = [float(update.num_examples) for",
        "the utility of a commit is its number of examples, regardless of their losses",
    ),
    Mutant(
        "returning client told to stop",
        INTAKE,
        "        if self._open(round_id) and (record.phase is Phase.COLLECTING or client.fate is Fate.JOINED):\n"
        "            return ()\n",
        "",
        "a client that reconnects is released from a round that still waits for it",
    ),
    Mutant(
        "unused without a reason",
        LEDGER,
        "        record.clients[update.client_id].unused_because = why\n",
        "",
        "the record does not say why an accepted update is in no model",
    ),
    Mutant(
        "the older update wins",
        LEDGER,
        "other.round_id > update.round_id else (other, update)",
        "other.round_id < update.round_id else (other, update)",
        "of two late updates the older counts",
    ),
    Mutant(
        "accepted updates of an abandoned round lost",
        LEDGER,
        "            if carry and not is_failed:\n                effects += self.carry(update)\n            else:",
        "            if carry and not is_failed:\n                pass\n            else:",
        "accepted updates vanish with an abandoned round",
    ),
    Mutant(
        "late updates lost with an abandoned round",
        LEDGER,
        "self.leave_unused(update, why) if is_failed else self.carry(update)",
        "self.leave_unused(update, why) if is_failed else []",
        "late updates vanish when the round to which they were carried is abandoned",
    ),
    Mutant(
        "a failed aggregation is tried again with the same updates",
        LEDGER,
        "        is_failed = record.abandon_reason is AbandonReason.AGGREGATION_FAILED\n",
        "        is_failed = False\n",
        "one update that cannot be folded fails every retry",
    ),
    Mutant(
        "an old stream ends the new one",
        MEMBERSHIP,
        "        if member is None or not self._is_there(member) or member.session != session:",
        "        if member is None:",
        "the end of a replaced stream disconnects the client",
    ),
    Mutant(
        "connected counted twice",
        MEMBERSHIP,
        "        self.num_connected += not self._is_there(member)\n",
        "        self.num_connected += 1\n",
        "a client that reconnects counts twice as available",
    ),
    Mutant(
        "leases never renewed",
        LEASES,
        "if (end := self._ends.get(client_id, -math.inf)) > now:",
        "if (end := self._heard.get(client_id, -math.inf)) > now:",
        "a client that sends heartbeats is lost",
    ),
    Mutant(
        "evaluation waits for the lost",
        EVALUATION,
        '            self.failures[client_id] = f"lost: {reason}"',
        "            pass",
        "an evaluation waits for its deadline although no client can answer any more",
    ),
    Mutant(
        "contact loss kills the job",
        SESSION,
        "                self.is_connected = False\n",
        "                self.is_connected, self.job = False, None\n",
        "a client that loses contact stops its training",
    ),
    Mutant(
        "killed at the deadline",
        SESSION,
        "            return job.deadline + self.rules.lease\n",
        "            return job.deadline\n",
        "a worker is killed at its deadline, without its lease",
    ),
    Mutant(
        "a lease from the release",
        SESSION,
        "Stage.STOPPING, min(now, job.deadline) + self.rules.lease",
        "Stage.STOPPING, now + self.rules.lease",
        "a worker that hangs and is stopped late outlives its deadline by two leases",
    ),
    Mutant(
        "download given up on reconnect",
        SESSION,
        "        if self.job is not None:\n            self.job.news_by = now + self.rules.lease\n",
        "",
        "after an outage a client gives up before it learns that the deadline has moved",
    ),
    Mutant(
        "spool dropped on a cut",
        SESSION,
        "            outgoing.is_active, outgoing.retry_at = False, now + wait\n",
        "            del self.outgoing[event.key]\n",
        "an update whose upload was cut is never sent again",
    ),
    Mutant(
        "no retry after a cut",
        SESSION,
        "            outgoing.is_active, outgoing.retry_at = False, now + wait\n",
        "            outgoing.retry_at = now\n",
        "an upload that was cut counts as in progress for ever",
    ),
    Mutant(
        "trains again what lies in the spool",
        SESSION,
        "        if request.key in self.outgoing:\n            return ()  # the work",
        "        if False:\n            return ()  # the work",
        "a client that is invited again trains although its update is finished",
    ),
    Mutant(
        "failure reported after the release",
        SESSION,
        "                return () if job.is_released else self._report(job.request, reason, detail)",
        "                return self._report(job.request, reason, detail)",
        "a client reports a failure to a round that has released it",
    ),
    Mutant(
        "release leaves the spool",
        SESSION,
        "        if key in self.outgoing and (not submit or key in self.encoded):",
        "        if False:",
        "an update that is not wanted stays in the spool",
    ),
    Mutant(
        "the queue outlives the stream",
        SESSION,
        "                self.waiting.clear()  # the coordinator asks",
        "                pass  # the coordinator asks",
        "a client begins a job that was withdrawn while it was disconnected",
    ),
    Mutant(
        "two jobs at once",
        SESSION,
        " and job.stage is not Stage.STOPPING:\n            return self._stop(",
        " and job.stage is not Stage.STOPPING:\n            self.job = None\n            return () and self._stop(",
        "a new job begins while the worker of the last one still runs",
    ),
    Mutant(
        "every client released at a commit",
        INVITATIONS,
        "training.items() if not self.may_still_count(self._record(r)))",
        "training.items())",
        "in an asynchronous run all training clients are released when a version is committed",
    ),
    Mutant(
        "alpha forgotten",
        BUFFER,
        '        row.scale *= self.policy.alpha if self.policy.mode == "fedasync" else 1.0\n',
        "",
        "FedAsync replaces the global model by a fresh client's",
    ),
    Mutant(
        "divided by the sum of the discounts",
        PLAN,
        '    if effect.mode == "sync":\n',
        '    if effect.mode != "fedasync":\n',
        "FedBuff's buffer is a weighted mean: stale updates do not make its step shorter",
    ),
    Mutant(
        "a full buffer waits for one more",
        BUFFER,
        "        if len(self.updates) >= self.policy.num_wanted:",
        "        if len(self.updates) > self.policy.num_wanted:",
        "a buffer of K is closed by update K + 1",
    ),
    Mutant(
        "more clients than concurrency",
        BUFFER,
        "        free = self.policy.concurrency - len(self.invitations)\n",
        "        free = self.policy.concurrency\n",
        "each draw requests a full number of clients although some train",
    ),
    Mutant(
        "overdue buffer keeps asking",
        BUFFER,
        "        if self._is_overdue or self._is_drawing:\n",
        "        if self._is_drawing:\n",
        "a buffer that could not be filled in time may stay open for ever",
    ),
    Mutant(
        "the sampler ends a closed buffer",
        BUFFER,
        "        self._is_drawing = False  # the answer to a pending draw is ignored\n",
        "",
        "a sampler that fails after the buffer was full abandons it while it is folded",
    ),
    Mutant(
        "a stop forgets the last buffer",
        BUFFER,
        "        return self._close(CloseReason.FLUSHED, now) if self._has_quorum else super().stop(reason, now)\n",
        "        return super().stop(reason, now)\n",
        "the updates in the buffer of a stopped run are lost although they make the quorum",
    ),
    Mutant(
        "asked twice for one version",
        INVITATIONS,
        "        taken = {*self._ledger.training, *record.clients, *self._counted(record.base_version)}\n",
        "        taken = {*self._ledger.training}\n",
        "a fast client fills the buffer alone, with one version",
    ),
    Mutant(
        "two updates of one version",
        INTAKE,
        "        if self.invitations.has_counted(update.client_id, update.base_version):",
        "        if False:",
        "a client that was invited again after an abandoned round counts twice for one version",
    ),
    Mutant(
        "any age will do for a buffer",
        INTAKE,
        "        if (staleness := base - update.base_version) > policy.max_staleness:",
        "        if (staleness := base - update.base_version) > policy.max_staleness + 1:",
        "updates one version too old go into the buffer",
    ),
    Mutant(
        "the queue makes no update older",
        INTAKE,
        "        full = len(ledger.waiting) // self.rules.policy.num_wanted\n",
        "        full = 0\n",
        "an update that waits behind full buffers is too stale when it is folded",
    ),
    Mutant(
        "a slow client is never replaced",
        INVITATIONS,
        "        return min(map(self._deadline, training)) if training else None\n",
        "        return None\n",
        "a client that hangs keeps its place for ever",
    ),
    Mutant(
        "an outage counts against who trains",
        INVITATIONS,
        "            row.deadline, row.extended = row.deadline + extension, row.extended + extension\n",
        "",
        "the invitations' deadlines do not move by the coordinator's downtime",
    ),
    Mutant(
        "the lost cannot come back",
        INVITATIONS,
        "        if row.fate is Fate.LOST and now < row.deadline and",
        "        if False and",
        "a client that reconnects in time does not get its invitation again",
    ),
    Mutant(
        "what was in an abandoned buffer is lost",
        LEDGER,
        "            self.waiting = [*updates, *self.waiting]  # updates that arrived during its fold are later\n",
        "",
        "accepted updates vanish with an abandoned buffer",
    ),
    Mutant(
        "training beyond the end",
        RUN,
        "*self.invitations.release_all(ReleaseReason.RUN_ENDED, ledger.now)]",
        "]",
        "the run ends with records in which clients still train",
    ),
    Mutant(
        "asked to evaluate while it trains",
        EVALUATIONS,
        " if not self.invitations.is_training(c))",
        ")",
        "a client discards its training because it is asked to evaluate",
    ),
    Mutant(
        "rounded down",
        CLOCK,
        "        return max(self._not_before, self._monotonic() + self._offset)",
        "        return self._monotonic() + self._offset",
        "a rounded sum is before the last time in the journal, and the machine refuses to go backward",
    ),
    Mutant(
        "bytes are no sign of life",
        LEASES,
        "        if client_id in self._heard:\n            self.heard(client_id, now)",
        "        pass",
        "a client is given up while its update arrives over a slow line",
    ),
    Mutant(
        "bytes bring back who was given up",
        LEASES,
        "        if client_id in self._heard:\n            self.heard(client_id, now)",
        "        self.heard(client_id, now)",
        "a client that was given up has a lease again by the rest of its transfer, and is never invited",
    ),
    Mutant(
        "away since it joined",
        MEMBERSHIP,
        "max(member.seen_at, heard_at) if self._is_there(member) else self._seen_at(member)",
        "member.seen_at",
        "a waiting run says of a site that has left that it is away since it came",
    ),
    Mutant(
        "a start behind the journal",
        CLOCK,
        "    if by < -START_MAX_S:",
        "    if by < -1e9:",
        "a coordinator starts with a clock that is behind its journal, and its sites take what it signs for replays",
    ),
    Mutant(
        "not valid yet is valid for long",
        RENEWAL,
        "        if wait > 0 and not mine.is_early(now):",
        "        if wait > 0:",
        "a certificate that a clock ahead has made is not renewed before real time has caught up",
        ("tests/protocol/identity/test_renewal.py",),
    ),
    Mutant(
        "a start without an accepted update",
        LOSSES,
        "    for digest, meta in need.updates.items():",
        "    for digest, meta in ():",
        "a start says nothing of an accepted update whose file is gone",
        OF_LOSSES,
    ),
    Mutant(
        "a cut file is whole",
        LOSSES,
        "    if (found := path.stat().st_size) != num_bytes:",
        "    if (found := path.stat().st_size) > num_bytes:",
        "a start says nothing of a file of an accepted update or a version that is cut",
        OF_LOSSES,
    ),
    Mutant(
        "a version of another run is whole",
        LOSSES,
        "        if digest and digest_of(encoded) != digest:",
        "        if False:",
        "a start takes the version of an older copy for that of the journal",
        OF_LOSSES,
    ),
    Mutant(
        "signatures follow a short step back",
        CLOCK,
        "SET_BACK_MAX_S = 2 * SKEW_S",
        "SET_BACK_MAX_S = 100.0",
        "sites take the messages of a coordinator whose clock was set back a little for replays",
    ),
    Mutant(
        "a jump is told again at each look",
        CLOCK,
        "        self._base = now\n        return jump",
        "        return jump",
        "a jump of the clock is told once a minute for ever",
    ),
    Mutant(
        "a downtime is a jump",
        CLOCK,
        "    return (now.true - before.true) - (now.uptime - before.uptime)",
        "    return now.true - before.true",
        "the time that passes counts as a jump of the clock",
    ),
    Mutant(
        "seen instants of a wrong clock count",
        "client/session/rollback_rules.py",
        "FUTURE_MAX_S = 240.0",
        "FUTURE_MAX_S = 86400.0",
        "a site that has seen an instant of a clock ahead refuses every message until real time has caught up",
    ),
    Mutant(
        "the difference of the clocks is time on the way",
        "client/session/rollback_rules.py",
        "    if (over := late - ahead - request.time_left) >= 0:",
        "    if (over := late - request.time_left) >= 0:",
        "a site whose clock is a minute ahead is out of time for each short round",
    ),
    Mutant(
        "a round shortened by the clock",
        OPEN_ROUND,
        "        seconds = max(0.0, now - down_since)",
        "        seconds = now - down_since",
        "a clock that was set back while the coordinator was down shortens the open round",
    ),
    Mutant(
        "an invitation shortened by the clock",
        INVITATIONS,
        "            extension = min(max(0.0, now - down_since), self._policy.outage_max - row.extended)",
        "            extension = min(now - down_since, self._policy.outage_max - row.extended)",
        "such a clock shortens the invitations of an asynchronous run",
    ),
    Mutant(
        "an evaluation shortened by the clock",
        RUN,
        "        down = min(max(0.0, now - event.down_since), self.rules.policy.outage_max)",
        "        down = min(now - event.down_since, self.rules.policy.outage_max)",
        "such a clock shortens the time for the clients' answers",
    ),
    Mutant(
        "trained for twice",
        SESSION,
        "            if waiting.request.key in self.outgoing or waiting.request.key in self.encoded:\n"
        "                continue  # it was requested again",
        "            if False:\n                continue  # it was requested again",
        "an invitation that arrives a second time while its job ends makes a second update",
    ),
    Mutant(
        "a release does not reach the queue",
        SESSION,
        " is not None and waiting.request.key == key:\n            del self",
        " is not None and False:\n            del self",
        "a client begins a job that was withdrawn while it was busy",
    ),
    Mutant(
        "invited by a run that has ended",
        INVITATIONS,
        "if not (self._policy.is_asynchronous and self._ledger.is_open):",
        "if not self._policy.is_asynchronous:",
        "a client that returns when a deadline ends the run is invited to it",
    ),
    Mutant(
        "a snapshot without what has changed",
        MEMBERSHIP,
        "            self.unwritten.changed.add(client_id)\n",
        "",
        "a restarted coordinator has an old session or old times of a client",
    ),
    Mutant(
        "a page too few",
        PAGES,
        "            for name in sorted(changed):",
        "            for name in sorted(changed)[1:]:",
        "one of the changed members is not in the snapshot",
    ),
    Mutant(
        "everyone is still there",
        MEMBERSHIP,
        "        self.start += 1  # sessions of an older start are void: no member is visited\n",
        "",
        "after a restart the earlier sessions count as open",
    ),
    Mutant(
        "the next round before the value",
        EVALUATIONS,
        '        is_evaluating = source == "server" and bool(ledger.unevaluated)',
        "        is_evaluating = False",
        "a run with an early stop trains on before it knows the value that ends it",
    ),
    Mutant(
        "a value computed twice",
        EVALUATIONS,
        "        ledger.computing = others\n",
        "",
        "a version whose value is computed again after a crash counts twice against patience",
    ),
    Mutant(
        "a value forgotten in a crash",
        RUN,
        "(EvaluateModel(version) for version in ledger.unevaluated), *ledger.computing]",
        "(EvaluateModel(version) for version in ledger.unevaluated)]",
        "after a restart a value that was being computed never comes, and the run hangs",
    ),
    Mutant(
        "the last of equals is the best",
        EVALUATIONS,
        "(ledger.best is None or best.is_better(value, ledger.best.value)):",
        "(ledger.best is None or not best.is_better(ledger.best.value, value)):",
        "the best version moves to a later one of the same value",
    ),
    Mutant(
        "patience continues after a stop",
        RUN,
        'ledger.failures, ledger.progress, ledger.early_stop = 0, None, ""',
        "ledger.failures = 0",
        "a run that is reopened ends at once by the early stop of before",
    ),
    Mutant(
        "a version that was not measured is passed over",
        EVALUATIONS,
        "return self._pause(PauseRequested(fault), self.ledger.now) if keys else ()",
        "return ()",
        "a metric that is never measured decides nothing, and nothing says so",
    ),
    Mutant(
        "accept with a missing part",
        GATHERING,
        "        return self.covers and len(self.kept) == self.num_parts",
        "        return self.covers and len(self.kept) >= self.num_parts - 1",
        "an update counts although one of its parts is missing",
    ),
    Mutant(
        "a part counts when its stream begins",
        GATHERING,
        "        self.coming.add(index)\n        return index not in self.kept",
        "        self.coming.add(index)\n        self.kept.add(index)\n        return True",
        "a part whose bytes are not durable counts as kept",
    ),
    Mutant(
        "parts not judged together",
        GATHERING,
        "        return self.covers and len(self.kept) == self.num_parts",
        "        return len(self.kept) == self.num_parts",
        "an update counts although its parts overlap or leave a gap",
    ),
    Mutant(
        "parts judged after their bytes",
        GATHERING,
        "len(self.kept | self.coming) == self.num_parts",
        "len(self.kept) == self.num_parts",
        "all bytes of an update that does not fit the model are taken before it is refused",
    ),
    Mutant(
        "kept parts asked for again",
        GATHERING,
        "        return index not in self.kept",
        "        return True",
        "a part that is durable is sent once more",
    ),
    Mutant(
        "partial uploads counted by part",
        GATHERING,
        "    order = [begun, *(digest for digest in partial if digest != begun)]",
        "    order = [begun, *partial]",
        "each part counts as a partial upload, and an update's own parts push it out",
    ),
    Mutant(
        "the newest partial upload goes",
        GATHERING,
        "    return order[:most], order[most:]",
        "    return order[-most:], order[:-most]",
        "a client's newest partial upload is deleted instead of its oldest",
    ),
    *OF_SUMS,
    *OF_PRIVACY,
)


# ---------------------------------------------------------------- a tree with a bug


def tree_with(mutant: Mutant | None, directory: Path) -> Path:
    """Copy the tree (the working tree, as it is) into `directory`, with the bug in it; None: without any."""
    tree = directory / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_COPIED)
    if mutant is not None:
        path = tree / mutant.file
        path.write_text(planted(mutant, path.read_text()))
    return tree


def planted(mutant: Mutant, source: str) -> str:
    """Return the source with the bug.

    Raises:
        ValueError: the code to replace does not occur exactly once.
    """
    if (count := source.count(mutant.old)) != 1:
        raise ValueError(f"mutant {mutant.name!r}: its code occurs {count} times in {mutant.file}; make it occur once")
    return source.replace(mutant.old, mutant.new)


def run_in(tree: Path, command: Sequence[str], *, timeout: float) -> "subprocess.CompletedProcess[str]":
    """Run a command in a copy of the tree so that it imports that copy, never this one."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no end within {timeout:g} s")


def find(name: str) -> Mutant:
    """Return a mutant by its name."""
    return next(mutant for mutant in (*PLANTED, *generated()) if mutant.name == name)


def generated() -> list[Mutant]:
    """Return the stored mutants of mutmut."""
    return [Mutant(**fields) for fields in json.loads(GENERATED.read_text())]


# ---------------------------------------------------------------- the suite


def outcome_of(mutant: Mutant | None, *, seeds: int = SEEDS, unit: bool = True) -> tuple[str, str]:
    """Plant a bug and run histories and unit tests.

    Args:
        mutant: the bug; None: the tree without a bug.
        seeds: the number of histories.
        unit: True if the unit tests run, too.

    Returns:
        The seed or the test that catches the bug (empty: none does), and its output.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-mutant-") as directory:
        tree = tree_with(mutant, Path(directory))
        if mutant is not None and mutant.tests:
            return _failed_test(tree, mutant.tests)
        histories = [sys.executable, "-m", "tests.histories.first_bad", str(seeds)]
        result = run_in(tree, histories, timeout=300)
        if result.returncode:
            lines = (result.stderr or result.stdout).strip().splitlines()
            seed = next((line for line in lines if line.startswith("seed=")), lines[-1] if lines else "no output")
            return f"histories, {seed.partition(':')[0]}", result.stderr
        return _failed_test(tree, PURE_TESTS) if unit else ("", "")


def _failed_test(tree: Path, tests: Iterable[str]) -> tuple[str, str]:
    """Run tests of a tree; return the first that fails (empty: none does), and the output."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    result = run_in(tree, pytest, timeout=300)
    if result.returncode == 0:
        return "", ""
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return failed[0].split(" - ")[0].partition(" ")[2] if failed else "pytest", result.stdout


def try_all(mutants: Iterable[Mutant], *, jobs: int, seeds: int) -> list[Outcome]:
    """Try each mutant, and print its result at once."""

    def attempt(mutant: Mutant) -> Outcome:
        begun = time.perf_counter()
        caught_by, _ = outcome_of(mutant, seeds=seeds)
        outcome = Outcome(mutant, caught_by, time.perf_counter() - begun)
        print(f"{mutant.name:45} {caught_by or 'SURVIVED'}  ({outcome.seconds:.1f} s)", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(attempt, mutants))


# ---------------------------------------------------------------- the report


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the text of `docs/mutants.md`."""
    dead = sum(bool(outcome.caught_by) for outcome in outcomes)
    by_hand = [outcome for outcome in outcomes if outcome.mutant in PLANTED]
    by_tool = [outcome for outcome in outcomes if outcome.mutant not in PLANTED]
    lines = [
        "# Planted bugs",
        "",
        "Mutation testing of the machines; `make mutants` (`python -m tests.mutants`) writes this page. Each bug",
        f"is planted in a temporary copy of the tree, where {SEEDS} simulated histories are judged and the unit tests",
        "of the machines run; for a file that no history runs, its tests. A bug is caught when one of them fails.",
        "",
        f"**{dead} of {len(outcomes)} are caught**: {_score(by_hand)} by hand, {_score(by_tool)} by mutmut (a seeded",
        "sample, see `tests/make_mutants.py`).",
        "",
        "## Written by hand",
        "",
        "| bug | file | what goes wrong | caught by |",
        "|---|---|---|---|",
        *(f"| {o.mutant.name} | `{o.mutant.file}` | {o.mutant.what} | {_caught(o)} |" for o in by_hand),
        "",
        "## Made by mutmut",
        "",
        "| mutant | change | caught by |",
        "|---|---|---|",
        *(f"| {o.mutant.name} | `{_one_line(o.mutant.what)}` | {_caught(o)} |" for o in by_tool),
        "",
    ]
    survivors = [outcome.mutant for outcome in outcomes if not outcome.caught_by]
    if survivors:
        lines += ["## Survivors", ""]
        lines += [f"- **{mutant.name}**: {why_equivalent(mutant) or 'not explained'}" for mutant in survivors]
        lines.append("")
    return "\n".join(lines)


def on_the_page(page: str) -> dict[str, str]:
    """Return what caught each bug by its row on the page: a seed or a test; empty: nothing did."""
    rows = re.findall(r"^\| (.+?) \| .* \| (?:`([^`]+)`|\*\*nothing\*\*) \|$", page, re.MULTILINE)
    return dict(rows)


def _score(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(bool(outcome.caught_by) for outcome in outcomes)} of {len(outcomes)}"


def _caught(outcome: Outcome) -> str:
    return f"`{outcome.caught_by}`" if outcome.caught_by else "**nothing**"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


EQUIVALENT = {
    "more = self._committed(effect, now)": "an event ends at most one round, so nothing was in `more` before",
    "other.round_id >= update.round_id": "a client has at most one accepted update of a round, so the numbers differ",
    "retry_at: float = 1.0": "what an earlier process left is due at once when the stream stands: `Connected` sets it",
}
"""Mutants of mutmut without any observable effect: a part of their code, and the reason."""


def why_equivalent(mutant: Mutant) -> str:
    """Return the reason that a mutant has no observable effect; empty if it should be caught."""
    return next((reason for part, reason in EQUIVALENT.items() if part in mutant.new), "")


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Plant bugs, which the suite must catch."
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one bug, with its output")
    parser.add_argument("--new", action="store_true", help="those without a row on the page; the other rows stay")
    parser.add_argument("--list", action="store_true", help="list the bugs and plant none")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel trials")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of histories for each bug")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{m.name:45} {m.file:22} {_one_line(m.what)[:100]}" for m in (*PLANTED, *generated())))
        return 0
    for name in arguments.only:
        print(*outcome_of(find(name), seeds=arguments.seeds), sep="\n")
    if arguments.only:
        return 0
    if (caught_by := outcome_of(None, seeds=arguments.seeds)[0]) != "":
        print(f"the tree itself fails, without any bug: {caught_by}", file=sys.stderr)
        return 2
    known = on_the_page(REPORT.read_text()) if arguments.new else {}
    mutants = (*PLANTED, *generated())
    tried = try_all((m for m in mutants if m.name not in known), jobs=arguments.jobs, seeds=arguments.seeds)
    new = {outcome.mutant.name: outcome for outcome in tried}
    outcomes = [new.get(m.name) or Outcome(m, known[m.name], 0.0) for m in mutants]
    REPORT.write_text(report(outcomes))
    survivors = [o.mutant for o in outcomes if not o.caught_by]
    names = ", ".join(mutant.name for mutant in survivors)
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} caught; survivors: {names or 'none'}")
    return 0 if all(map(why_equivalent, survivors)) else 1


if __name__ == "__main__":
    sys.exit(main())
