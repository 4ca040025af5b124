"""The folders of `simulate` and `train`: neither writes over files of another kind, or of a person."""

import pytest

from tests.cli.invoking import TINY, invoke, refused

TOML = f'# of a person\ntask = "{TINY}:task"\nrounds = 1\n\n[simulation]\nengine = "sequential"\n'
SMALL = TINY.parents[2] / "simulations" / "federation" / "line_task.py"


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "lock"}


def test_a_simulation_in_the_folder_of_its_toml_leaves_the_toml_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(TOML)
    assert refused("simulate", "run.toml", "--out", ".") == [
        ".: run.toml there is not from an earlier run, and would be overwritten; choose another folder with --out"
    ]
    assert (tmp_path / "run.toml").read_text() == TOML
    assert invoke("simulate", "run.toml", "--out", "out").exit_code == 0
    printed = (tmp_path / "out" / "run.toml").read_text()
    for name in ("state.json", "rounds.jsonl"):  # as a process leaves the folder that is killed in the first round
        (tmp_path / "out" / name).unlink()
    assert invoke("simulate", "run.toml", "--out", "out").exit_code == 0
    assert invoke("simulate", "out/run.toml", "--out", "out").exit_code == 0
    assert (tmp_path / "out" / "run.toml").read_text() == printed


@pytest.mark.slow
def test_a_training_and_a_simulation_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ("train", f"{SMALL}:task", "--steps", "1", "--out")
    simulate = ("simulate", f"{SMALL}:task", "--rounds", "1", "--set", "simulation.engine=sequential", "--out")
    assert invoke(*train, "trained").exit_code == 0
    assert invoke(*simulate, "simulated").exit_code == 0
    before = files_of(tmp_path / "trained"), files_of(tmp_path / "simulated")
    (told,) = refused(*simulate, "trained")
    assert told.startswith("trained: there is a training of `atoll train` (log.jsonl)")
    (told,) = refused(*train, "simulated")
    assert told.startswith("--out: simulated: there is a simulated run (")
    assert (files_of(tmp_path / "trained"), files_of(tmp_path / "simulated")) == before
    assert invoke(*train, "trained").exit_code == 0  # its own again


@pytest.mark.slow
def test_a_training_does_not_write_over_a_model_of_another_origin(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"exported yesterday")
    (told,) = refused("train", f"{SMALL}:task", "--steps", "1", "--out", tmp_path)
    assert "model.safetensors there is not from an earlier run, and would be overwritten" in told
    assert files_of(tmp_path) == {"model.safetensors": b"exported yesterday"}
    (told,) = refused("train", f"{SMALL}:task", "--steps", "1", "--out", tmp_path / "model.safetensors")
    assert told == f"--out: {tmp_path}/model.safetensors cannot be used: it is no folder; choose another folder"
