"""The lines about lost files, and the events that follow from them."""

from pathlib import Path

from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.server.hosting.recovering import files_lost
from atoll.server.required.losses import LINES_MAX, Loss, lines_of

RUN = RunId("r-1")


def loss(name: str, **more: object) -> Loss:
    return Loss(RUN, Path(name), "is missing", "it was needed", **more)  # type: ignore[arg-type]


def test_many_losses_are_told_by_the_first_and_a_number() -> None:
    assert lines_of([loss("x")]) == ["run r-1: x is missing: it was needed"]
    lines = lines_of(loss(f"{number}") for number in range(LINES_MAX + 3))
    assert len(lines) == LINES_MAX + 1
    assert lines[-1] == "and 3 further files"


def test_the_losses_of_a_run_are_one_event_that_names_each_update_once() -> None:
    losses = [
        loss("a.0000.bin", updates=(Digest("a"),)),
        loss("a.0001.bin", updates=(Digest("a"),)),
        loss("1.safetensors", versions=(Version(1),), updates=(Digest("b"),)),
        loss("c.safetensors", contents=(Digest("c"),)),
    ]
    event = files_lost(losses, RUN)
    assert event is not None
    assert (event.updates, event.versions, event.contents) == (("a", "b"), (1,), ("c",))
    assert event.detail.endswith("1.safetensors is missing; and 1 more")
    assert files_lost(losses, RunId("r-2")) is None
