from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.simulations.experiments.report import Fairness, NoReport, Reached, is_loss, read_run
from atoll.simulations.experiments.sweep import is_finished
from atoll.simulations.federation.seal import seal, unseal
from tests.simulations.experiments.runs import line, write_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "fast", [line(1), line(2)]))
    assert (run.name, run.is_finished, len(run.rounds)) == ("fast", True, 2)
    assert run.settings["round"] == {"deadline": 30.0}
    assert run.metrics == ("server/loss", "server/accuracy", "train/loss")
    assert run.curve("server/accuracy") == ([1, 2], [1 / 2, 2 / 3])
    assert run.curve("server/accuracy", "virtual_s")[0] == [100, 200]
    assert run.curve("server/accuracy", "bytes")[0] == [1700, 3400]
    assert run.curve("server/accuracy", "bytes_up")[0] == [400, 800]
    assert run.bytes == 3400


def test_a_target_is_reached_where_it_is_first_met(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [line(k) for k in range(1, 6)]))
    found = run.reached("server/accuracy", 0.75)
    assert found == Reached(3, virtual_s=300, real_s=6, bytes=5100, bytes_up=1200, updates=33)
    assert run.reached("server/accuracy", 0.9) is None
    reached = run.reached("server/loss", 0.4)
    assert reached is not None
    assert reached.round == 3


def test_rounds_without_a_measurement_count_for_time_and_bytes_but_not_for_the_curve(tmp_path: Path) -> None:
    lines = [line(1), line(2, state="abandoned", version=None, server=None), line(3)]
    run = read_run(write_run(tmp_path, lines))
    assert run.curve("server/accuracy", "bytes_up") == ([400, 1200], [1 / 2, 3 / 4])
    assert run.participation("counted") == [11, 11, 11]


def test_the_best_of_a_loss_is_the_smallest_and_of_others_the_largest(tmp_path: Path) -> None:
    values = [{"loss": 3.0, "accuracy": 0.2}, {"loss": 1.0, "accuracy": 0.8}, {"loss": 2.0, "accuracy": 0.5}]
    run = read_run(write_run(tmp_path, [line(k, server=value) for k, value in enumerate(values, 1)]))
    assert (run.best("server/loss"), run.best("server/accuracy"), run.last("server/accuracy")) == (1.0, 0.8, 0.5)
    assert run.best("clients/accuracy") is None
    assert is_loss("clients/perplexity")
    assert not is_loss("server/f1")


def test_a_run_that_was_interrupted_may_say_a_round_twice_and_the_last_counts(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [line(1), line(2), line(2, bytes_up=7), line(3)], state=None))
    assert run.participation("bytes_up") == [400, 7, 1200]
    assert not run.is_finished


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1), line(2)])
    log = tmp_path / "rounds.jsonl"
    log.write_text(log.read_text()[:-20])
    assert len(read_run(tmp_path).rounds) == 1


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1)])
    log = tmp_path / "rounds.jsonl"
    log.write_text("{}\n" + log.read_text())
    with pytest.raises(NoReport, match=r"rounds.jsonl, line 1: is not a round"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("round", value) for value in (None, "1", 1.5, True, [1])],
        *[(name, value) for name in ("virtual_s", "bytes_up", "bytes_down") for value in (None, "1", 1e999, 10**400)],
        *[("invited", value) for value in ("2", [2], {"a": 2}, float("nan"))],
        *[(name, value) for name in ("server", "clients", "fates", "client_values") for value in (1, "x", ["a"])],
        *[("client_values", {"a": 1}), ("train_values", {"a": [1]}), ("fates", {"a": None}), ("state", None)],
    ],
)
def test_a_line_of_other_types_is_no_round(tmp_path: Path, name: str, value: object) -> None:
    write_run(tmp_path, [line(1, **{name: value}) if name != "round" else line(1) | {"round": value}, line(2)])
    with pytest.raises(NoReport, match=r"rounds.jsonl, line 1: is not a round"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["run.toml", "result.json", "population.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b"[]", b"1"])
def test_a_half_written_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_run(tmp_path, [line(1)])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(NoReport, match=name):
        read_run(tmp_path)


def test_a_line_is_left_out_whose_last_letter_is_being_written(tmp_path: Path) -> None:
    write_run(tmp_path, [line(1)])
    with (tmp_path / "rounds.jsonl").open("ab") as log:
        log.write('{"round": 2, "why": "é'.encode()[:-1])
    assert len(read_run(tmp_path).rounds) == 1


@pytest.mark.parametrize("name", ["rounds.jsonl", "result.json", "run.toml", "SHA256SUMS"])
def test_a_run_whose_files_are_damaged_enters_no_table(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, [line(1), line(2)])
    seal(tmp_path, ["rounds.jsonl", "result.json", "run.toml"])
    assert len(read_run(tmp_path).rounds) == 2
    assert is_finished(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for place in range(0, len(whole), 7):
        (tmp_path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(NoReport, match=name):
            read_run(tmp_path)
        assert not is_finished(tmp_path)
    for tenth in range(10):
        (tmp_path / name).write_bytes(whole[: len(whole) * tenth // 10])
        if name != "SHA256SUMS":
            assert not is_finished(tmp_path)
    (tmp_path / name).write_bytes(whole)
    unseal(tmp_path)
    assert is_finished(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NoReport, match=r"has no rounds.jsonl; allowed: a folder that `atoll simulate --out` has written"
    ):
        read_run(tmp_path)


def test_fairness_is_of_the_last_version_that_clients_measured(tmp_path: Path) -> None:
    measured = {"a": {"accuracy": 0.9}, "b": {"accuracy": 0.5}, "c": {"accuracy": None}, "d": {"accuracy": 0.7}}
    lines = [line(1, client_values={"a": {"accuracy": 0.1}}), line(2, client_values=measured), line(3)]
    found = read_run(write_run(tmp_path, lines)).fairness("accuracy")
    assert found == Fairness((0.5, 0.7, 0.9))
    assert read_run(tmp_path).fairness("clients/accuracy") == found
    assert read_run(tmp_path).over_clients("f1") is None
    with pytest.raises(ValueError, match="fairness: got 'f1'; allowed: accuracy"):
        read_run(tmp_path).fairness("f1")
    with pytest.raises(ValueError, match="fairness: got server/accuracy; allowed: a metric of the clients"):
        read_run(tmp_path).fairness("server/accuracy")


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(0, 1))
def test_the_spread_is_numpys(values: list[float], share: float) -> None:
    found = Fairness(tuple(sorted(values)))
    assert found.variance == pytest.approx(np.var(values), abs=1e-9)
    assert found.percentile(share) == pytest.approx(np.percentile(values, 100 * share), abs=1e-9)
