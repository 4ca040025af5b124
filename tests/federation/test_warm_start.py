"""Runs that start from a file, from a version of another run, and from a centralized training, and back."""

import contextlib
import json

import pytest

from atoll.tensors import safetensors_file
from tests.cli.invoking import faults_in, ran
from tests.federation.processes import federation
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK, simulate

GIVEN = ("rounds=2", "round.cohort_size=4", "round.min_available=4", "seed=5")


def atoll(*command, code=0, cwd="."):
    with contextlib.chdir(cwd):
        return ran(*command, code=code)


def options(overrides):
    return [part for override in overrides for part in ("--set", override)]


@pytest.mark.slow
def test_all_four_ways_start_from_the_same_file(tmp_path):
    trained = tmp_path / "trained"
    atoll("train", TASK, "--out", trained, "--set", "train.epochs=2", "--device", "cpu")
    start = f"model.start={trained / 'model.safetensors'}"
    simulated, _ = simulate(tmp_path / "simulated", *GIVEN, start)
    first = simulated["model_digest"]
    with federation(tmp_path, task=TASK) as it:
        it.start("coordinator", "coordinator", "--state", it.state, "--set", f"coordinator.listen={it.address}")
        for site in line_task.SITES:
            it.agent(site, threads=1, exit_when_done=False)
        it.wait_for(lambda: "no run yet" in it.log("coordinator"))
        atoll("run", "start", TASK, "--state", it.state, *options(("name=one", *GIVEN, start)))
        finished = {}
        for name in ("one", "two"):
            if name == "two":  # goes on from the first one's newest version
                again = options(("name=two", *GIVEN, "model.start=run:one"))
                atoll("run", "start", TASK, "--state", it.state, *again)
            it.wait_for(lambda name=name: str(it.history().run(f"{name}-1").state) == "finished")
            finished[name] = [str(row.digest) for row in it.history().versions(f"{name}-1")]
        exported = tmp_path / "one.safetensors"
        atoll("model", "export", "--run", "one", "--out", exported, "--state", it.state)
        refused = atoll(
            *("run", "start", TASK, "--state", it.state), *options(("name=three", "model.start=run:one@9")), code=2
        )
        unknown = atoll(
            *("run", "start", TASK, "--state", it.state), *options(("name=four", "model.start=run:on")), code=2
        )
        names = [row["run"] for row in json.loads(atoll("run", "list", "--state", it.state, "--json").stdout)]
    named, _ = simulate(tmp_path / "named", *GIVEN, "name=one", start)
    assert finished["one"][-1] == named["model_digest"]
    assert first != named["model_digest"]  # the name decides the sites' seeds
    assert finished["two"][0] == finished["one"][-1]
    assert finished["two"][-1] not in finished["one"]
    assert "version 9 of one-1 is not kept, or not made yet (kept: 0, 1, 2)" in refused.stderr
    assert "there is no run 'on' (known: one-1, two-1)" in unknown.stderr
    assert names == ["one-1", "two-1"]
    by_the_name_of_the_run(tmp_path, it.state, exported)
    # and a centralized training goes on from the run's model
    further = tmp_path / "further"
    given = ("--set", f"train.start={exported}", "--set", "train.steps=1", "--set", "local.lr=0.000001")
    atoll("train", TASK, "--out", further, *given, "--device", "cpu")
    before, after = safetensors_file.read(exported), safetensors_file.read(further / "model.safetensors")
    assert all(abs(after[name] - before[name]).max() < 1e-4 for name in before)
    assert any((after[name] != before[name]).any() for name in before)


def by_the_name_of_the_run(tmp_path, state, exported):
    """A simulation and a centralized training start from a version of a run by its name."""
    (tmp_path / "atoll-state").symlink_to(state)
    starts = {"simulate": "model.start=run:one@2", "train": "train.start=run:one"}
    for command, start in starts.items():
        short = ("--rounds", "1") if command == "simulate" else ("--set", "train.steps=1", "--device", "cpu")
        told = atoll(command, TASK, *short, "--out", f"of-{command}", "--set", start, cwd=tmp_path).stderr
        assert ".start: version 2 of one-1 is in atoll-start-one-1-2.safetensors" in told
    begun = safetensors_file.read(tmp_path / "of-simulate" / "models" / "versions" / "000000.safetensors")
    assert all((begun[name] == array).all() for name, array in safetensors_file.read(exported).items())
    for wanted, fault in (
        ("run:no", "there is no run 'no'"),
        ("run:one@9", "is not kept"),
        ("run:one@best", "no best"),
    ):
        refused = atoll("simulate", TASK, "--set", f"model.start={wanted}", cwd=tmp_path, code=2).stderr
        assert f"model.start: got '{wanted}': " in refused
        assert fault in refused


@pytest.mark.slow
def test_a_file_that_does_not_fit_is_refused_before_anything_runs(tmp_path):
    import torch
    from safetensors.torch import save_file

    model = line_task.model().state_dict()
    save_file({"0.weight": model["0.weight"], "1.weight": torch.ones(2)}, tmp_path / "part.safetensors")
    save_file({"more": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"no tensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, fault in (
        ("part", "part.safetensors lacks 0.bias, 2.weight, 2.bias"),
        ("no", "no.safetensors is not a safetensors file"),
        ("other", "no tensor of"),
        ("missing", "there is no file"),
        ("folder", "is a directory: name a file"),
    ):
        path = tmp_path / f"{name}.safetensors"
        for key, command in (
            ("model.start", ("simulate", TASK, "--out", tmp_path / "s")),
            (
                "model.start",
                ("coordinator", TASK, "--state", tmp_path / "c", "--set", "coordinator.listen=127.0.0.1:0"),
            ),
            ("train.start", ("train", TASK, "--out", tmp_path / "t", "--device", "cpu")),
        ):
            errors = atoll(*command, "--set", f"{key}={path}", code=2).stderr
            assert f"{key}: " in errors, (command, errors)
            assert fault in errors, (command, errors)
            assert all(f"{key}: " in told for told in faults_in(errors)), errors
            assert "Traceback" not in errors
            assert not (tmp_path / "c").exists()
    for key, command in (("model.start", "simulate"), ("train.start", "train")):
        errors = atoll(command, TASK, "--set", f"{key}=run:one", cwd=tmp_path, code=2).stderr
        assert f"atoll: {key}: got 'run:one': " in errors
        assert "is not a state directory" in errors
    loose = (
        "--set",
        f"model.start={tmp_path / 'part.safetensors'}",
        "--set",
        "model.strict=false",
        "--set",
        "rounds=1",
    )
    told = atoll("simulate", TASK, "--out", tmp_path / "s", *loose).stderr
    assert "the initial values stay in 0.bias, 2.weight, 2.bias; not used: 1.weight" in told
