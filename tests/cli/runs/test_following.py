"""`--follow` as a person and a script read it, from a state directory and from a coordinator that comes and goes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.runs.following import _records
from atoll.operations import following
from atoll.operations.faults import CommandError
from atoll.operations.following import documents
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.views.history import History
from tests.cli.invoking import invoke, refused, said, shown, told
from tests.server.journal.test_codec import some_history
from tests.server.views.test_history import write_history

NUM_ENTRIES = len(list(some_history()))
ENDED = NUM_ENTRIES - 1  # the last entry resumes the run


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A run that was stopped in its fourth round, and no coordinator."""
    with StateDirectory.open(tmp_path / "state") as opened:
        write_history(opened, ENDED)
    return tmp_path / "state"


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_ended_run_is_followed_to_its_end_which_is_there(state: Path) -> None:
    first, last = said("run", "show", "r", "--follow", "--state", state).splitlines()  # since the newest snapshot
    assert first == "r is running, version 3 of 9"
    assert last.endswith(" r: the run is stopped: enough")
    whole = said("run", "show", "r", "--follow", "--after", 0, "--state", state).splitlines()
    assert whole[0] == "r is queued, version 0 of 9"
    assert whole[-1].endswith(" r: the run is stopped: enough")
    assert [line.split(": ", 1)[1] for line in whole if "committed" in line] == [
        f"round {r}: committed as version {v}" for r, v in ((1, 1), (2, 2), (4, 3))
    ]


def test_each_line_of_json_is_an_object_and_a_reader_goes_on_after_its_number(state: Path) -> None:
    follow = ("run", "show", "r", "--follow", "--json", "--state", state, "--after")
    items = objects(said(*follow, 0))
    assert [item["seq"] for item in items if item["kind"] == "event"] == list(range(1, ENDED + 1))
    rest = objects(said(*follow, 20))
    assert [item for item in rest if item["kind"] == "event"] == [
        item for item in items if item["kind"] == "event" and item["seq"] > 20
    ]
    records = {record["round_id"]: record for item in items for record in item.get("records", ())}
    for number, record in records.items():
        view = shown("round", "show", number, "--run", "r", "--state", state)
        assert record == {key: view[key] for key in record}
    assert sorted(records) == [1, 2, 3, 4]


def test_a_gap_is_noted_beside_the_output(state: Path) -> None:
    result = invoke("run", "show", "r", "--follow", "--after", 400, "--state", state)
    assert result.exit_code == 0
    (gap,) = told(result.stderr)
    assert gap.startswith(f"the journal ends with entry {ENDED}, before entry 400: it was restored from a backup")
    assert gap.endswith(f"; this continues from entry {ENDED - 1}")
    assert result.stdout.startswith("r is running, version 3 of 9")


@pytest.mark.slow
def test_a_round_that_has_ended_is_explained_as_ever(state: Path) -> None:
    for number in ("2", "4"):
        sentences = shown("round", "show", number, "--state", state)["sentences"]
        assert said("round", "show", number, "--follow", "--state", state).splitlines() == sentences
    assert said("round", "show", "--follow", "--state", state).splitlines() == sentences
    (record,) = objects(said("round", "show", "2", "--follow", "--json", "--state", state))
    assert record["round_id"] == 2


def test_a_round_that_will_never_be_is_refused(state: Path) -> None:
    assert refused("round", "show", "7", "--follow", "--state", state) == [
        "run r has ended without a round 7: r is stopped, version 3 of 9: enough"
    ]
    assert refused("run", "show", "x", "--follow", "--state", state) == ["there is no run 'x' (known: r)"]


def test_options_that_exclude_each_other_are_refused(state: Path) -> None:
    assert refused("run", "show", "r", "--after", 3, "--state", state)[0].startswith("--after names the place at which")
    assert refused("run", "show", "r", "--follow", "--sites", "--state", state)[0].startswith("--sites shows")
    assert "got -1; allowed: at least 0" in invoke("run", "show", "r", "--follow", "--after=-1").stderr


def test_an_open_round_gives_each_sentence_once_and_ends_with_its_end(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 4 of the history, as if it came in while the command reads."""
    items = objects(said("run", "show", "r", "--follow", "--json", "--after", 0, "--state", state))
    first = {"round_id": 4, "ended_at": None, "sentences": ["Round 4 is open.", "a is waiting."]}
    later = {"round_id": 4, "ended_at": None, "sentences": ["Round 4 is open.", "a has reported."]}
    began = {**items[0], "run": items[0]["run"] | {"next_round": 4}}
    live = [began, {"kind": "record", "record": first}, {"kind": "waiting", "why": "nothing runs it"}]
    live += [{"kind": "record", "record": later}, *(item for item in items if item["kind"] == "event")]
    monkeypatch.setattr("atoll.cli.runs.following.items", lambda *_: iter(live))
    result = invoke("round", "show", "4", "--follow", "--state", state)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:3] == ["Round 4 is open.", "a is waiting.", "a has reported."]
    assert lines[3].startswith("Round 4 started from version 2 and was committed as version 3")
    assert result.stderr == "nothing runs it\n"


# ---------------------------------------------------------------- a coordinator elsewhere


def test_lines_are_put_together_from_parts_that_end_anywhere() -> None:
    text = b'{"a": "\xc3\xa4"}\n{"b": 1}\n'
    for cut in range(len(text)):
        assert list(documents([text[:cut], text[cut:]])) == [{"a": "\u00e4"}, {"b": 1}]
    for wrong, fault in ((b"x\n", "is not JSON"), (b"[1]\n", "is not an object")):
        with pytest.raises(CommandError, match=fault):
            list(documents([wrong]))


def test_a_coordinator_that_sends_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LINE_BYTES_MAX", 1000)
    with pytest.raises(CommandError, match="sent a line of more than 1000 bytes"):
        list(documents([b"x" * 600] * 2))


def event(seq: int, state: str | None = None) -> dict[str, Any]:
    return {"kind": "event", "seq": seq, "run": state and {"run": "r-1", "state": state}}


def test_broken_calls_go_on_after_the_last_entry_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    began = {"kind": "began", "seq": 4, "run": {"run": "r-1", "state": "running"}}
    calls: list[tuple[str, int | None, bool]] = []
    waits: list[float] = []
    script: list[list[Any]] = [
        ["away"],
        ["away"],
        [began, event(5), {"kind": "record", "seq": 5}, event(6), "cut"],
        ["cut"],
        ["cut"],
        [{**began, "seq": 6}],  # ended by the coordinator, before the run has
        [{**began, "seq": 6}, event(7, "finished")],
    ]

    def one_call(run: str, after: int | None, _: object, *, has_begun: bool) -> Iterator[dict[str, Any]]:
        calls.append((run, after, has_begun))
        for item in script[len(calls) - 1]:
            if isinstance(item, str):
                raise following._Broken(item)
            yield item

    monkeypatch.setattr(following, "_one_call", one_call)
    monkeypatch.setattr(following.Ending, "wait", lambda _, seconds: waits.append(seconds))
    found = list(following._from_elsewhere("r", None, following.Ending()))
    assert [item["seq"] for item in found if item["kind"] == "event"] == [5, 6, 7]
    assert [item["why"] for item in found if item["kind"] == "waiting"] == [
        "away; trying again",
        "cut; trying again",
        "the coordinator has ended the call before the end of the run; trying again",
    ]
    assert calls == [("r", None, False)] * 3 + [("r-1", 6, True)] * 4
    assert len(waits) == 6
    assert waits[3] > waits[2]
    assert waits[5] < 0.5, "an answer makes the waits short again"


def test_what_the_coordinator_refuses_ends_the_following(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: str, after: int | None, _: object, *, has_begun: bool) -> Iterator[dict[str, Any]]:
        raise CommandError("client north may not call atoll.v1.Admin/Follow")
        yield {}

    monkeypatch.setattr(following, "_one_call", refuse)
    with pytest.raises(CommandError, match="may not call"):
        list(following._from_elsewhere("r", None, following.Ending()))


def test_a_state_directory_stays_as_it_is(state: Path) -> None:
    before = (state / "state.db").read_bytes()
    said("run", "show", "r", "--follow", "--after", 0, "--state", state)
    assert (state / "state.db").read_bytes() == before
    assert History(state).coordinator() is None


@pytest.mark.parametrize("ended_at", [None, 9.0])
def test_an_exchange_beside_a_newer_open_one_is_followed_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended_at: float | None
) -> None:
    here = {"run": "talk-1", "state": "running", "cause": "", "next_round": 3, "open_round": 2, "exchanges": 2}
    first = {"round_id": 1, "ended_at": ended_at, "sentences": ["exchange 1 is open"]}
    last = {"round_id": 1, "ended_at": 9.0, "sentences": ["exchange 1 is closed"]}
    stream = [{"kind": "began", "run": here}, {"kind": "open", "record": first}, {"kind": "event", "records": [last]}]
    monkeypatch.setattr("atoll.cli.runs.following.items", lambda *_: iter(stream))
    monkeypatch.setattr("atoll.cli.runs.following.read_view", lambda *_, **__: first)
    found = [*_records(1, "talk", tmp_path, "")]
    assert found == ([first, last] if ended_at is None else [first])
