"""`atoll flower export`: the files of the app, what is refused or left out, and the app in Flower's own processes."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import atoll
from atoll.cli.flower.sources import sources_of
from atoll.flower.app import read_app
from atoll.flower.exported.run_values import RunValues
from atoll.task.apps import with_app
from tests.cli.invoking import invoke, refused
from tests.federation.flower.stock import run_by_flower
from tests.federation.flower.test_flower_apps import EXAMPLES
from tests.flower.exported.tasks import TASKS

ROOT = Path(__file__).parents[3]
OF_ALL = ("--set", "round.cohort_size=3")


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_code_of_a_task_goes_along_with_its_neighbours_and_nothing_else(tmp_path):
    done = invoke("flower", "export", f"{TASKS}:plain", tmp_path / "app", *OF_ALL)
    assert done.exit_code == 0, done.output
    assert files_of(tmp_path / "app") == [
        *("README.md", "pyproject.toml", "run_app/__init__.py", "run_app/client_app.py", "run_app/server_app.py"),
        *("run_app/task/shape_names.py", "run_app/task/shapes.py", "run_app/task/shapes_task.py"),
    ]
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert {"numpy", "torch"} < set(project["project"]["dependencies"])
    assert project["tool"]["flwr"]["app"]["config"]["local"]["lr"] == 0.1
    assert project["tool"]["flwr"]["app"]["config"]["task"] == {"shift": 0.0}


def test_imports_within_functions_and_packages_are_found(tmp_path, monkeypatch):
    (tmp_path / "study" / "parts").mkdir(parents=True)
    for place, text in {
        "study/__init__.py": "",
        "study/task.py": "from study import data\nfrom .parts import more\nimport json\n",
        "study/data.py": "def load():\n    import beside\n    return open(__file__ + 'parts/table.csv' + 'task.py')\n",
        "study/parts/table.csv": "1,2\n",
        "study/parts/more.py": "import numpy\n",
        "beside.py": "import study.task\n",
        "other.py": "",
    }.items():
        (tmp_path / place).write_text(text)
    monkeypatch.chdir(tmp_path)
    found = sources_of("study.task:task")
    assert [str(file) for file in found.files] == [
        *("beside.py", "study/__init__.py", "study/data.py", "study/parts/more.py", "study/task.py")
    ]
    assert (found.packages, found.data) == (("numpy",), ("parts/table.csv",))
    assert sources_of("sklearn.task:task").files == ()
    assert sources_of("sklearn.task:task").packages == ("scikit-learn",)


def test_what_no_strategy_has_is_refused_all_at_once(tmp_path):
    given = {
        "aggregation.rule": "geometric_median",
        "aggregation.norm_bound": 1.0,
        "aggregation.codec": "bf16",
        "cohort.sampler": "weighted",
        "optimizer.name": "fedadam",
        "model.start": "run:other@best",
    }
    overrides = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    faults = refused("flower", "export", f"{TASKS}:plain", tmp_path / "app", *overrides)
    assert sorted(fault.split(":")[0] for fault in faults) == sorted(given)
    assert all("got" in fault for fault in faults)
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        (
            "plain",
            ["round.cohort_size=4"],
            "round.cohort_size: got 4; allowed: at most 3, the task's sites (west, mid, ",
        ),
        ("plain", ["optimizer.name=fedavgm"], "FedAvgM would also step 1.num_batches_tracked, 1.running_mean, "),
        ("with_an_algorithm", ["optimizer.lr=0.5"], "would also step 1.num_batches_tracked, 1.running_mean, "),
        ("plain", ["local.lr=-1"], "local.lr"),
        ("plain", ["task.shft=1"], "task.shft: unknown key"),
        (
            "plain",
            ["round.cohort_size=3", "aggregation.rule=trimmed_mean", "aggregation.malicious=1"],
            "allowed: a fraction that gives the same number for 1 to 3, such as 0.2",
        ),
        (
            "plain",
            ["round.cohort_size=3", "aggregation.rule=trimmed_mean", "aggregation.malicious=0.3333333333333333"],
            "malicious: got 0.3333333333333333, and Flower leaves out int(beta * n) of n updates",
        ),
        (
            "plain",
            ["round.cohort_size=3", "aggregation.rule=atoll.flower.native.rules:krum_1_2"],
            "of 3 updates: each is compared with only its nearest, and rounding in Flower decides the ties",
        ),
        ("without_buffers", ["aggregation.rule=median", "optimizer.name=fedavgm"], "leave one out"),
        ("plain", ["round.mode=fedbuff"], "round.mode: got 'fedbuff', which no strategy of Flower has"),
        ("plain", ["model.start={}"], "model.start: "),
    ],
)
def test_faults_are_told_before_anything_is_written(tmp_path, name, given, says):
    (tmp_path / "no.safetensors").write_bytes(b"no model")
    given = [text.format(tmp_path / "no.safetensors") for text in given]
    overrides = [part for text in given for part in ("--set", text)]
    (fault,) = refused("flower", "export", f"{TASKS}:{name}", tmp_path / "app", *overrides)
    assert says in fault
    assert not (tmp_path / "app").exists()


def test_a_flower_app_and_a_folder_with_files_are_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (fault,) = refused("flower", "export", f"{TASKS}:plain", tmp_path, *OF_ALL)
    assert fault == f"{tmp_path} exists, and is not overwritten: name another folder"
    assert files_of(tmp_path) == ["mine.txt"]
    (fault,) = refused("flower", "export", EXAMPLES / "numpy_client", tmp_path / "app")
    assert fault.endswith("is a folder, such as a Flower app: name a native task, path/to/file.py:attribute")


def test_what_is_left_out_is_told(tmp_path):
    done = invoke("flower", "export", ROOT / "examples" / "digits.toml", tmp_path / "app", "--json")
    told = json.loads(done.stdout)
    assert told["strategy"] == "FedAvg"
    assert (told["arguments"]["min_train_nodes"], told["arguments"]["fraction_evaluate"]) == (4, 1.0)
    assert {text.split(" = ")[0] for text in told["left_out"]} == {
        *("round.over_selection", "round.quorum", "round.linger", "round.grace", "round.late", "round.partial_work"),
        "evaluation.clients_every",
    }
    assert told["files"] == files_of(tmp_path / "app")
    assert all(text in (tmp_path / "app" / "README.md").read_text() for text in told["left_out"])


def test_a_schedule_ends_with_the_rounds_of_the_app(tmp_path):
    given = ["--set", "schedule.local.lr.kind=cosine", "--set", "schedule.local.momentum.kind=linear"]
    given += ["--set", "schedule.local.momentum.rounds=4"]
    assert invoke("flower", "export", f"{TASKS}:plain", tmp_path / "app", *OF_ALL, *given).exit_code == 0
    app = read_app(with_app(str(tmp_path / "app")))
    for rounds in (10, 20):
        found = RunValues.read(app.run_config({"num-server-rounds": rounds})).given
        assert (found["lr"]["rounds"], found["momentum"]["rounds"]) == (rounds, 4)


def test_integers_under_a_rule_are_told(tmp_path):
    done = invoke("flower", "export", f"{TASKS}:plain", tmp_path / "app", *OF_ALL, "--set", "aggregation.rule=median")
    assert "left out, as Flower has no counterpart: the mean of the integers 1.num_batches_tracked" in done.stderr


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("simulates", [True, False])
def test_flowers_own_processes_give_the_model_of_a_run_here(tmp_path, simulates):
    """As Flower's simulation, and with a SuperLink and SuperNodes: the code travels as Flower packs it."""
    given = {"rounds": 3, "round.cohort_size": 3, "seed": 5, "evaluation.clients_every": 1}
    overrides = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    app = tmp_path / "app"
    assert invoke("flower", "export", f"{TASKS}:plain", app, *overrides).exit_code == 0
    run_by_flower(app, tmp_path / "flower", 3, simulates=simulates, **{"num-server-rounds": 3})
    theirs = load_file(tmp_path / "flower" / "final_model.safetensors")
    settings = given | {"simulation.engine": "sequential"}
    ours = atoll.simulate(f"{TASKS}:plain", set=settings, progress=False).model()
    assert theirs.keys() == ours.keys()
    for name, expected in ours.items():
        np.testing.assert_allclose(theirs[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_app_runs_here_too(tmp_path, capfd):
    """Hosted by Atoll: what goes there comes back."""
    app = tmp_path / "app"
    assert invoke("flower", "export", f"{TASKS}:arrays", app, *OF_ALL, "--set", "local.rate=0.5").exit_code == 0
    done = invoke("flower", "run", app, "--nodes", 3, "--simulate", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    (found,) = (tmp_path / "run").rglob("final_model.safetensors")
    ours = atoll.simulate(f"{TASKS}:arrays", set={"round.cohort_size": 3, "local.rate": 0.5}, progress=False).model()
    np.testing.assert_allclose(load_file(found)["w"], ours["w"], rtol=1e-6)
    assert load_file(found)["steps"] == ours["steps"]
