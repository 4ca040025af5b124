"""The terms of a run's secure sums: what they say, that each field counts, that every accepted setting makes some."""

import hashlib
import json
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.secure.terms import Terms, read_terms
from atoll.protocol.settings import ConfigError, load_text
from atoll.protocol.vocabulary import Digest, RoundId, RunId, Version
from atoll.server.config.run import RunConfig
from atoll.server.config.run_changes import with_frozen
from atoll.server.hosting.messages import RunTerms
from atoll.server.hosting.secure_terms import SumBase, terms_of, terms_of_evaluation
from atoll.server.rounds.session_events import SumPlace
from atoll.tensors.layout import Tensor

NINE = ("round.cohort_size=9", "secure.clip_norm=2.5", "secure.examples_max=100")
LAYOUT_JSON = b'{"metrics":[["accuracy",3],["loss",2]],"tensors":[["steps","I64",[]],["weight","F32",[3,2]]]}'
LAYOUT = (Tensor("weight", "F32", (3, 2)), Tensor("steps", "I64", ()))


def config(*overrides: str) -> RunConfig:
    return load_text(RunConfig, 'task = "m:t"', [*NINE, *overrides], name="")


def made(settings: RunConfig | None = None, **changed: Any) -> Terms:
    base = SumBase(Version(4), Digest("ab" * 32), LAYOUT)
    arguments = {"run_id": RunId("digits-1"), "task": "digits", "round_id": RoundId(5)}
    return terms_of(settings or config(), **{**arguments, "place": SumPlace(1, 2, (0, -3)), "base": base, **changed})


def test_the_terms_are_those_of_the_run_and_its_invitation() -> None:
    settings = with_frozen(
        config("local.lr=0.1", "task.smoothing=0.2", "secure.session_max=20", "secure.metrics.accuracy=3"), "cd" * 32
    )
    found = made(settings)
    assert found == Terms(
        run="digits-1",
        round=5,
        attempt=2,
        session=1,
        purpose="update",
        base=4,
        model="ab" * 32,
        frozen="cd" * 32,
        task="digits",
        algorithm="fedavg",
        local=RunTerms.of(RunId("digits-1"), "digits", settings).local,
        layout=hashlib.sha256(LAYOUT_JSON).hexdigest(),
        bits=32,
        clip_norm=2.5,
        examples_max=100,
        ranges=hashlib.sha256(b"[0,-3]").hexdigest(),
        members_max=20,
        threshold="two_thirds",
        privacy="",
        receivers=(),
        metrics=(("accuracy", 3), ("loss", 2)),
    )
    assert json.loads(found.local)["lr"] == 0.1


def test_each_thing_that_could_differ_gives_other_terms() -> None:
    base = SumBase(Version(4), Digest("ab" * 32), LAYOUT)
    others = [
        made(),
        made(run_id=RunId("digits-2")),
        made(task="digits2"),
        made(round_id=RoundId(6)),
        *(made(place=place) for place in (SumPlace(0, 2, (0, -3)), SumPlace(1, 1, (0, -3)), SumPlace(1, 2, (0, -1)))),
        made(place=SumPlace(1, 2)),
        made(base=replace(base, version=Version(3))),
        made(base=replace(base, digest=Digest("ac" * 32))),
        *(made(base=replace(base, layout=layout)) for layout in (LAYOUT[:1], (replace(LAYOUT[0], name="w"),))),
        made(base=replace(base, layout=(replace(LAYOUT[0], shape=(2, 3)), LAYOUT[1]))),
        made(base=replace(base, layout=(replace(LAYOUT[0], dtype="BF16"), LAYOUT[1]))),
        made(base=replace(base, receivers=(0, 1))),
        *(made(config(f"secure.metrics.{key}")) for key in ("accuracy=2", "accuracy=3", "auroc=2")),
        made(with_frozen(config(), "cd" * 32)),
        *(made(config(f"secure.{key}")) for key in ("bits=64", "clip_norm=2.6", "examples_max=101", "threshold=5")),
        made(config("secure.session_max=20")),
        made(config("local.lr=0.1")),
        made(config("task.smoothing=0.1")),
        made(config("schedule.local.lr={kind='list', values=[0.1, 0.2]}")),
    ]
    for one, other in combinations(others, 2):
        assert one.digest != other.digest


def test_the_order_of_tensors_and_of_receivers_makes_no_other_terms() -> None:
    base = SumBase(Version(4), Digest("ab" * 32), LAYOUT, (0, 1))
    assert made(base=base) == made(base=replace(base, layout=LAYOUT[::-1], receivers=(1, 0)))


def test_what_a_site_has_not_approved_is_the_same_whatever_the_run_may_change() -> None:
    for override in ("secure.stage_timeout=9.0", "secure.attempts=1", "secure.sessions=2", "rounds=99"):
        assert made(config(override)).approved == made().approved


@given(
    cohort=st.integers(1, 80),
    table=st.fixed_dictionaries(
        {"clip_norm": st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)},
        optional={
            "bits": st.sampled_from([32, 64]),
            "examples_max": st.integers(1, 2**40),
            "threshold": st.sampled_from(["two_thirds", *range(2, 65)]),
            "session_max": st.integers(5, 64),
            "sessions": st.integers(1, 4),
            "metrics": st.dictionaries(st.text(max_size=210), st.integers(1, 10_000), max_size=4),
        },
    ),
    local=st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=9_000) | st.floats(-1, 1), max_size=2),
    place=st.builds(SumPlace, st.integers(0, 3), st.integers(1, 100), st.lists(st.integers(-9, 9)).map(tuple)),
)
def test_every_accepted_setting_gives_terms_that_sites_can_read(
    cohort: int, table: dict[str, Any], local: dict[str, Any], place: SumPlace
) -> None:
    weighting = "examples" if "examples_max" in table else "uniform"
    document = {"round": {"cohort_size": cohort}, "secure": table, "aggregation": {"weighting": weighting}}
    try:
        settings = RunConfig.model_validate({"task": "m:t", "local": local, **document})
    except ValueError:
        return
    found = made(with_frozen(settings, "cd" * 32), place=place)
    assert read_terms(found.canonical()) == found


def test_names_of_metrics_are_refused_before_the_terms_are_too_long() -> None:
    read = []
    for number in range(1, 100, 7):
        try:
            settings = RunConfig.model_validate(
                {
                    "task": "m:t",
                    "round": {"cohort_size": 9},
                    "secure": {
                        "clip_norm": 1.0,
                        "examples_max": 9,
                        "metrics": {chr(0x4E00 + name) * 200: 2 for name in range(number)},
                    },
                }
            )
        except ValueError:
            continue
        found = made(settings)
        assert read_terms(found.canonical()) == found
        read.append(number)
    assert read == [*range(1, max(read) + 1, 7)]
    assert 30 < max(read) < 60


def test_a_text_of_the_largest_length_is_accepted_and_read() -> None:
    room = 16 * 1024 - len(config("local.note=''").local_text) - len(', "frozen": ""') - 64
    lengths = [room - 40, *range(room - 20, room + 20)]
    read = 0
    for length in lengths:
        try:
            settings = config(f"local.note={'x' * length}")
        except ConfigError:
            continue
        found = made(with_frozen(settings, "cd" * 32))
        assert read_terms(found.canonical()) == found
        read += 1
    assert 1 <= read < len(lengths)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_full_session_of_any_width_adds_without_overflow(bits: int) -> None:
    assert made(config(f"secure.bits={bits}")).members_max == 64


def test_the_terms_of_an_evaluation_add_metrics_alone_and_say_so() -> None:
    settings = with_frozen(
        config("secure.metrics.accuracy=3", "secure.session_max=20", "secure.threshold=6"), "cd" * 32
    )
    names = {"run_id": RunId("digits-1"), "task": "digits", "version": Version(4), "model": Digest("ab" * 32)}
    found = terms_of_evaluation(settings, **names, place=SumPlace(1, 2))  # type: ignore[arg-type]
    layout = b'{"metrics":[["accuracy",3],["loss",2]],"tensors":[]}'
    assert found == replace(
        made(settings),
        **{"round": 4, "purpose": "evaluation", "algorithm": "", "layout": hashlib.sha256(layout).hexdigest()},
        **{"bits": 64, "clip_norm": 1.0, "examples_max": 0, "ranges": hashlib.sha256(b"[]").hexdigest()},
        **{"members_max": 20, "threshold": "two_thirds"},
    )
    assert read_terms(found.canonical()) == found
    assert found.approved != made(settings).approved
