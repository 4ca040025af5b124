import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atoll.simulations.experiments.logs import json_log, scalars, tensorboard
from tests.simulations.experiments.runs import line


def test_every_number_of_a_round_has_a_path() -> None:
    found = dict(scalars(line(2, client_values={"a": {"accuracy": 1.0}}, fates={"a": "reported"})))
    assert found["server/accuracy"] == 2 / 3
    assert found["bytes_up"] == 800
    assert not {"round", "version", "state", "clients"} & found.keys()
    assert not any("a" in name.split("/")[1:] for name in found)


def test_tensorboard_shows_the_rounds_and_forgets_those_that_an_interruption_undid(tmp_path: Path) -> None:
    log = tensorboard(tmp_path)
    for number in (1, 2, 3):
        log(line(number))
    log = tensorboard(tmp_path)
    log(line(3, server={"accuracy": 0.1}))
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("server/accuracy")
    assert [event.step for event in events] == [1, 2, 3]
    assert [round(event.value, 4) for event in events] == [0.5, 0.6667, 0.1]


def test_a_round_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    log = json_log(tmp_path / "rounds.jsonl")
    log(line(1))
    assert json.loads((tmp_path / "rounds.jsonl").read_text()) == line(1)
