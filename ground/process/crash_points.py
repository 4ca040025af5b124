"""Named crash points at which a test may kill the process; crash recovery is tested at each of them.

`ATOLL_CRASH_AT=upload.mid_chunk:3` kills the process with SIGKILL when it reaches that step for the third time. A step
with kinds may name one: `exchange.entry/NodesAsked:2` is the second entry of this kind. Without the variable `reached`
does nothing.
"""

import itertools
import os
import signal
from collections.abc import Mapping

VARIABLE = "ATOLL_CRASH_AT"

STEPS = (
    ("journal.before_write", "an event is decided, nothing of it is on disk"),
    ("journal.after_write", "an event is on disk, none of its effects has been carried out"),
    (
        "exchange.entry",
        "an entry of a run of messages is on disk, none of its effects has been carried out; kinds: of its event",
    ),
    ("exchange.effect", "an effect of such an entry is about to be carried out; kinds: of the effect"),
    (
        "round.entry",
        "an entry of a run of rounds is on disk, none of its effects has been carried out; kinds: of its event",
    ),
    ("round.effect", "an effect of such an entry is about to be carried out; kinds: of the effect"),
    ("upload.mid_chunk", "a part of an update's bytes is on disk"),
    ("upload.before_check", "all bytes of an update are on disk, unchecked"),
    ("upload.part_kept", "a part of an update is durable and checked, others may be missing"),
    ("upload.before_accept", "an update is whole and checked, the machine has not seen it"),
    ("aggregate.before_fold", "a round is closed, no update is read yet"),
    ("aggregate.mid_fold", "some blocks of the sum are done"),
    ("aggregate.after_fold", "the next version's file is written, the journal does not know it"),
    ("rank.mid_fold", "a rank has finished some tiles of its part of the next version"),
    ("rank.folded", "a rank's shard of the next version is written, the coordinator does not know it"),
    ("publish.before", "a round is committed in the journal, its version is not announced"),
    ("publish.after", "a version is announced, its record and its snapshot are not written"),
    ("download.mid", "a client has a part of a version"),
    ("snapshot.before", "a snapshot is due, nothing of it is on disk"),
    ("snapshot.after", "a snapshot is on disk, the journal before it is not yet dropped"),
    ("statistics.asked", "the number of a secure request for statistics is durable, no site is asked"),
    ("statistics.sites_kept", "the sites of a secure sum of statistics are durable, none of them is told"),
    ("statistics.opened", "a secure sum of statistics is open, its result is not kept"),
    ("agent.invited", "an agent knows of an invitation, and has done nothing"),
    ("agent.noise_kept", "the fresh bytes of a private training's noise are durable, nothing of it has begun"),
    ("agent.charged", "a training is charged to its data set's budget, nothing of it has begun"),
    ("agent.downloading", "an agent has a part of a version"),
    ("agent.downloaded", "an agent has a whole version, checked"),
    ("agent.training", "an agent's worker is training"),
    ("agent.trained", "an update is finished, and only in memory"),
    ("agent.encoded", "an update for a secure sum is encoded and durable, its session has not begun"),
    ("agent.promised", "a promise is durable, nothing behind it has left; kinds: joined, signed"),
    ("agent.masked", "a masked update is in the spool, no byte of it is sent"),
    ("agent.revealed", "an agent has revealed its shares"),
    ("agent.part_written", "a part of an update is in the spool, the update's manifest is not"),
    ("agent.root_spooled", "the manifest of an update in parts is in the spool, which makes it one"),
    ("agent.spooled", "an update is in the spool, no byte of it is sent"),
    ("agent.noise_forgotten", "the fresh bytes of an update's noise are deleted, no byte of it is sent"),
    ("agent.uploading", "an agent has sent a part of an update"),
    ("agent.uploaded", "an agent has sent every byte, and has no answer"),
    ("agent.answered", "an agent has the answer, the spool still has the update"),
    ("agent.settled", "the residual of an answered update is kept or deleted, the spool still has the update"),
)
"""All steps, each with the state of the process there."""

_NAMES = frozenset(name for name, _ in STEPS)


def parse_crash_at(environment: Mapping[str, str]) -> tuple[str, str, int] | None:
    """Return the step to crash at, its kind and the number of the visit; None: the variable is not set.

    The text is `step`, `step:n`, `step/kind` or `step/kind:n`. An empty kind stands for all.

    Raises:
        ValueError: there is no such step, or n is not a count from 1.
    """
    text = environment.get(VARIABLE, "")
    if not text:
        return None
    place, _, count = text.partition(":")
    step, slash, kind = place.partition("/")
    is_counted = count.isascii() and count.isdigit() and int(count) >= 1
    if step not in _NAMES or not (is_counted or text == place) or bool(slash) != bool(kind):
        raise ValueError(
            f"{VARIABLE}={text!r}: allowed: step or step:n with n >= 1, and step/kind of a step with kinds; steps: "
            f"{', '.join(sorted(_NAMES))}"
        )
    return step, kind, int(count or 1)


_CRASH_AT = parse_crash_at(os.environ)
_visits = itertools.count(1)


def reached(step: str, kind: str = "") -> None:
    """Mark that the process is at `step`, and kill it here if the environment asks for that."""
    assert step in _NAMES, f"step {step!r} is not in STEPS"
    if _CRASH_AT is None or step != _CRASH_AT[0] or _CRASH_AT[1] not in ("", kind):
        return
    if next(_visits) == _CRASH_AT[2]:
        os.kill(os.getpid(), signal.SIGKILL)
