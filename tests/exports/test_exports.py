"""The four destinations, as the tools themselves read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.exports.destination import ExportRefused
from atoll.exports.exporter import LiveExport
from atoll.exports.folders import SimulatedFolder, TrainingFolder, sources_in
from atoll.exports.rows import State
from atoll.exports.tools import Target, parsed
from atoll.exports.wandb_file import BLOCK, HEADER, framed, read_records
from atoll.protocol.settings import ConfigError
from tests.exports.readers import TOOLS, expected, export, mlflow_run, points, wandb_records
from tests.simulations.experiments.runs import line, write_run

Places = Callable[[str], Path]
SITES = {"north": {"accuracy": 0.5, "loss": None}, "süd": {"accuracy": 0.25}}


def a_run(folder: Path, num_rounds: int = 4, **changes: Any) -> Path:
    return write_run(folder, [line(k, client_values=SITES, **changes) for k in range(1, num_rounds + 1)])


def close_to(found: Any, wanted: Any) -> bool:
    """Return whether the numbers agree, each as often; TensorBoard has single precision."""
    return found.keys() == wanted.keys() and all(found[key] == pytest.approx(wanted[key], rel=1e-6) for key in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_each_number_is_there_once_however_often_a_run_is_exported(tool: str, tmp_path: Path, place_of: Places) -> None:
    run, place = a_run(tmp_path / "run", 2), place_of(tool)
    assert export(tool, run, place) == 2
    a_run(tmp_path / "run", 4)  # it has gone on
    assert export(tool, run, place) == 2
    assert export(tool, run, place) == 0
    wanted = expected(run)
    if tool == "mlflow":
        from atoll.exports.mlflow import key_of

        wanted = {(key_of(name), step): values for (name, step), values in wanted.items()}
    assert close_to(points(tool, place, "run"), wanted)
    assert ("sites/north/accuracy", 4) in wanted
    assert ("sites/north/loss", 4) not in wanted  # it has no value


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["tensorboard", "wandb", "jsonl"])
def test_a_file_that_was_cut_off_anywhere_ends_as_the_whole_one(tool: str, tmp_path: Path, place_of: Places) -> None:
    run, place = a_run(tmp_path / "run", 3), place_of(tool)
    export(tool, run, place)
    (file,) = [path for path in place.rglob("*") if path.is_file()]
    whole, wanted = file.read_bytes(), points(tool, place, "run")
    for cut in {*range(0, len(whole), 311), *range(len(whole) - 12, len(whole))}:
        file.write_bytes(whole[:cut])
        export(tool, run, place)
        if tool == "wandb":  # a row is several records there, and those of its summary may come again
            assert points(tool, place, "run") == wanted, cut
        else:
            assert file.read_bytes() == whole, cut


@pytest.mark.parametrize("tool", ["tensorboard", "wandb", "jsonl"])
def test_a_place_takes_one_run_and_one_export_at_a_time(tool: str, tmp_path: Path, place_of: Places) -> None:
    run, place = a_run(tmp_path / "run"), place_of(tool)
    first = Target(tool, str(place)).open()
    first.begin(SimulatedFolder(run).about())
    with pytest.raises(ExportRefused, match="another export writes it"):
        export(tool, run, place)
    first.close()
    other = a_run(tmp_path / "other" / "run")
    if tool == "wandb":  # a file of its own
        assert export(tool, other, place) == 4
    else:
        with pytest.raises(ExportRefused, match="holds another run: choose another place with --to"):
            export(tool, other, place)


@pytest.mark.slow
def test_mlflow_has_the_settings_the_state_and_one_run_of_each_folder(tmp_path: Path, place_of: Places) -> None:
    place = place_of("mlflow")
    run = a_run(tmp_path / "run")
    (run / "result.json").write_text('{"state": "interrupted", "version": 4}')
    export("mlflow", run, place)
    assert mlflow_run(place, "run")[1].info.status == "RUNNING"
    best = {"version": 3, "metric": "accuracy", "source": "server", "value": 0.75}
    (run / "result.json").write_text(json.dumps({"state": "finished", "cause": "4 rounds", "version": 4, "best": best}))
    export("mlflow", run, place)
    export("mlflow", a_run(tmp_path / "twin", 2), place)
    _, found = mlflow_run(place, "run")
    assert (found.info.status, found.data.params["round.deadline"]) == ("FINISHED", "30.0")
    assert {key: found.data.tags[f"atoll.{key}"] for key in ("state", "cause", "version", "best_version")} == {
        "state": "finished",
        "cause": "4 rounds",
        "version": "4",
        "best_version": "3",
    }
    assert mlflow_run(place, "twin")[1].data.metrics["round/invited"] == 13


@pytest.mark.slow
def test_a_setting_that_a_resumed_run_has_changed_is_a_tag_in_mlflow(tmp_path: Path, place_of: Places) -> None:
    place, run = place_of("mlflow"), a_run(tmp_path / "run")
    for rounds in (4, 9):
        (run / "run.toml").write_text(f'task = "digits.py:task"\nrounds = {rounds}\n')
        export("mlflow", run, place)
    _, found = mlflow_run(place, "run")
    assert (found.data.params["rounds"], found.data.tags["atoll.changed.rounds"]) == ("4", "9")


def test_tensorboard_shows_settings_and_state_as_texts(tmp_path: Path, place_of: Places) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place, run = place_of("tensorboard"), a_run(tmp_path / "run")
    export("tensorboard", run, place)
    (run / "result.json").write_text('{"state": "failed", "cause": "no | quorum"}')
    export("tensorboard", run, place)
    read = EventAccumulator(str(place / "run")).Reload()
    texts = {
        tag: [each.tensor_proto.string_val[0].decode() for each in read.Tensors(tag)] for tag in ("settings", "state")
    }
    assert "| round.deadline | 30.0 |" in texts["settings"][0]
    assert [len(found) for found in texts.values()] == [1, 2]
    assert texts["state"][1].endswith("| state | failed |\n| cause | no \\| quorum |")
    assert b"round.deadline" in read.summary_metadata["_hparams_/session_start_info"].plugin_data.content


def test_an_offline_run_of_wandb_has_axes_and_goes_on_after_its_end(tmp_path: Path, place_of: Places) -> None:
    place, run = place_of("wandb"), a_run(tmp_path / "run", 2)
    export("wandb", run, place)
    assert wandb_records(place)[-1].WhichOneof("record_type") == "exit"
    a_run(tmp_path / "run", 3)
    export("wandb", run, place)
    records = wandb_records(place)
    kinds = [record.WhichOneof("record_type") for record in records]
    assert (kinds[:2], kinds.count("exit"), kinds[-1]) == (["header", "run"], 1, "exit")
    assert [record.num for record in records] == list(range(1, len(records) + 1))
    assert [record.history.step.num for record in records if record.HasField("history")] == [0, 1, 2]
    assert {record.metric.step_metric for record in records if record.HasField("metric")} == {"round"}
    config = {item.key: json.loads(item.value_json) for item in records[1].run.config.update}
    assert config == {"task": "digits.py:task", "round.deadline": 30.0}


@given(st.lists(st.integers(0, 3 * BLOCK), max_size=6), st.integers(0, 4 * BLOCK))
def test_the_framing_of_wandb_keeps_records_of_any_length_up_to_a_cut(lengths: list[int], cut: int) -> None:
    records = [bytes([k + 1]) * length for k, length in enumerate(lengths)]
    content, ends = HEADER, []
    for record in records:
        content += framed(record, len(content))
        ends.append(len(content))
    assert read_records(content) == (records, ends)
    num_whole = sum(end <= cut for end in ends)
    assert read_records(content[:cut]) == (records[:num_whole], ends[:num_whole])


def test_sites_beyond_a_hundred_are_exported_on_demand(tmp_path: Path) -> None:
    many = {f"s{k}": {"accuracy": 0.5} for k in range(101)}
    run = write_run(tmp_path / "run", [line(1, client_values=many, invited=101)])
    names = [set(next(iter(SimulatedFolder(run, sites=sites).rows())).values) for sites in (None, True, False)]
    assert [sum(name.startswith("sites/") for name in found) for found in names] == [0, 101, 0]
    assert SimulatedFolder(run).note().endswith("leaves out the values of more than 100 sites: --sites exports them")
    assert not SimulatedFolder(run, sites=False).note()


def test_a_training_is_exported_by_its_steps_of_which_the_last_line_counts(tmp_path: Path, place_of: Places) -> None:
    folder = tmp_path / "training"
    folder.mkdir()
    events = [
        {"event": "begin", "step": 0, "task": "digits", "train": {"steps": 2, "epochs": 1}, "local": {"lr": 0.1}},
        {"event": "step", "step": 1, "epoch": 0.5, "loss": 3.0, "seconds": 1.0},
        {"event": "step", "step": 2, "epoch": 1.0, "loss": 9.0, "seconds": 2.0},
        {"event": "begin", "step": 1, "task": "digits", "train": {"steps": 2, "epochs": 1}, "local": {"lr": 0.1}},
        {"event": "step", "step": 2, "epoch": 1.0, "loss": 2.0, "seconds": 2.0},
        {"event": "evaluation", "step": 2, "epoch": 1.0, "test/accuracy": 0.5, "test/loss": None},
        {"event": "end", "step": 2, "why": "finished"},
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "st')
    (source,) = sources_in(folder)
    assert isinstance(source, TrainingFolder)
    assert source.about().settings["local.lr"] == 0.1
    assert source.state() == State("finished", {"steps": 2})
    found = [(row.step, dict(row.values)) for row in source.rows()]
    assert found == [
        (1, {"loss": 3.0, "seconds": 1.0}),
        (2, {"loss": 2.0, "seconds": 2.0}),
        (2, {"test/accuracy": 0.5}),
    ]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no rounds\.jsonl and no log\.jsonl; allowed: a folder of `atoll sim"):
        sources_in(tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("mlfow", "--export: got 'mlfow': did you mean mlflow? (known: tensorboard, mlflow, wandb, jsonl)"),
        ("wandb:https://host", "--export: got 'https://host'; allowed for wandb: a folder"),
        ("jsonl:pyproject.toml", "--export: got 'pyproject.toml', which is a file; allowed: a folder"),
    ],
)
def test_a_target_that_cannot_be_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parsed([text])
    assert refusal.value.faults == (fault,)


def test_a_missing_package_and_a_tool_named_twice_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.exports.tools.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refusal:
        parsed(["mlflow:http://host", "wandb", "jsonl", "jsonl:there"])
    assert refusal.value.faults == (
        "--export: mlflow needs mlflow and alembic, which are not installed: pip install 'atoll[mlflow]'",
        "--export: wandb needs wandb, which is not installed: pip install 'atoll[wandb]'",
        "--export: jsonl is named twice: leave one of them out",
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("sites/north/accuracy", "sites/north/accuracy"),
        ("sites/a@b/f1:macro", "sites/a_40_b/f1_3a_macro"),
        ("x//../y", "x/__/_.._/y"),
    ],
)
def test_a_name_becomes_a_key_that_mlflow_takes(name: str, key: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    from atoll.exports.mlflow import key_of

    assert key_of(name) == key
    _validate_metric_name(key)


class Broken:
    """A destination whose disk is full after the first write."""

    place = "there"

    def __init__(self) -> None:
        self.is_closed = False

    def check(self) -> None:
        pass

    def begin(self, about: object) -> None:
        pass

    def lacks(self, row: object) -> bool:
        return True

    def write(self, rows: object) -> None:
        raise OSError("no room")

    def state(self, state: object) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def test_a_destination_that_fails_does_not_disturb_the_run_nor_the_other_exports(
    tmp_path: Path, place_of: Places
) -> None:
    run, place, told, broken = a_run(tmp_path / "run", 1), place_of("jsonl"), list[str](), Broken()
    with LiveExport([broken, Target("jsonl", str(place)).open()], SimulatedFolder(run), told.append) as exports:
        for k in (2, 3):
            a_run(tmp_path / "run", k)
            exports.take(line(k, client_values=SITES))
    assert broken.is_closed
    (sentence,) = told
    assert sentence.startswith("the export to there has ended: no room; the run continues, and `atoll export` writes")
    assert points("jsonl", place, "run") == expected(run)


def test_a_run_that_was_refused_is_not_exported(tmp_path: Path, place_of: Places) -> None:
    place = place_of("jsonl")
    with pytest.raises(ConfigError), LiveExport([Target("jsonl", str(place)).open()], SimulatedFolder(tmp_path), print):
        raise ConfigError(["another run is there"])
    assert not any(place.iterdir())
