"""The checks of updates in parts: none counts without all of its parts, and what is kept is not asked for again."""

from collections import defaultdict
from collections.abc import Iterator

from atoll.protocol.vocabulary import ClientId, Digest
from atoll.server.rounds.events import Accept
from atoll.server.transfers.timeouts import PARTIALS_MAX
from atoll.simulations.histories.history import History, PartStep
from atoll.simulations.histories.parts import num_parts_of


def faults_of_parts(history: History) -> Iterator[str]:
    """Yield the faults of a history's updates in parts."""
    kept: dict[Digest, set[int]] = defaultdict(set)
    began: dict[ClientId, list[Digest]] = defaultdict(list)  # the newest last
    judged: set[Digest] = set()
    for step in history.part_steps:
        yield from _faults_of(step, kept[step.digest], began[step.client_id], judged)
        if step.what == "begins":
            began[step.client_id] = [*(d for d in began[step.client_id] if d != step.digest), step.digest]
        elif step.what == "is kept" and step.index is not None:
            kept[step.digest].add(step.index)
        elif step.what == "is judged":
            judged.add(step.digest)
        elif step.what.startswith("pushes out "):
            kept.pop(Digest(step.what.removeprefix("pushes out ")), None)
    yield from _accepted(history)


def _faults_of(step: PartStep, kept: set[int], began: list[Digest], judged: set[Digest]) -> Iterator[str]:
    which = f"at {step.at:.3f}, part {step.index} of {step.digest}"
    if step.what == "begins" and step.index in kept:
        yield f"{which}: its bytes are wanted again, and it is kept"
    if step.what == "is here" and step.index not in kept:
        yield f"{which}: its bytes are not wanted, and it is not kept"
    if step.what == "is kept" and len(kept | {step.index}) == num_parts_of(step.digest) and step.digest not in judged:
        yield f"{which}: the last part was taken before all were judged together"
    if step.what.startswith("pushes out "):
        pushed = Digest(step.what.removeprefix("pushes out "))
        newest = [*(d for d in began if d != step.digest), step.digest][-PARTIALS_MAX:]
        if pushed in newest:
            yield f"at {step.at:.3f}, {step.digest} pushes out {pushed}, which is among the newest {newest}"


def _accepted(history: History) -> Iterator[str]:
    """Check that each accepted update in parts was whole and judged when it was accepted."""
    when: dict[tuple[Digest, int | None], float] = {}
    for part in history.part_steps:
        if part.what in ("is kept", "is judged"):
            when.setdefault((part.digest, part.index), part.at)
    for step, effect in history.effects():
        if not isinstance(effect, Accept) or not (num_parts := num_parts_of(effect.digest)):
            continue
        for index in (None, *range(num_parts)):
            if (effect.digest, index) not in when or when[effect.digest, index] > step.when:
                what = "all parts were judged together" if index is None else f"part {index} was kept"
                yield f"{effect.digest} was accepted at {step.when:.3f}, before {what}"
