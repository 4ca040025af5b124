"""`atoll train`: what it refuses, and real processes that are stopped, killed and broken."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from platform import node
from typing import Any

import pytest

from atoll.operations.training.folder import folder_lock
from atoll.task import metrics
from tests.cli import failing_tasks
from tests.cli.invoking import invoke, refused, shown
from tests.parallel.ranks import call_on_ranks
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import mesh, model, on_ranks, run
from tests.process_table import descendants

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "tests" / "parallel" / "trainer" / "tasks.py"
TASK = f"{TASKS}:task"
LIMIT_S = 500.0
EVERY_STEP = ["--set", "train.log_every=1", "--set", "train.batch_size=8", "--set", "train.checkpoint_every=3"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the environment variables of a launcher, as in a shell."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        (
            ["--nproc", "2", "--mesh", "dp=2,tp=2"],
            ["mesh: pp=1 x dp_replicate=2 x dp_shard=1 x tp=2 = 4 ranks", "tp=2"],
        ),
        (["--nproc", "4", "--mesh", "pp=4", "--set", "plan.schedule=interleaved-1f1b"], ["pp=4: 3 layers"]),
        (["--mesh", "dp=0,xp=2"], ["mesh: 'dp=0' must be AXIS=DEGREE", "mesh: 'xp=2' must be AXIS=DEGREE"]),
        (["--nproc", "8", "--set", "train.batch_size=4"], ["a global batch of 4 is too small for dp=8 with"]),
        (
            ["--nproc", "8", "--mesh", "auto", "--set", "train.batch_size=2"],
            ["a global batch of 2 is too small for dp=8"],
        ),
        (["--mesh", "auto", "--set", "plan.zero=4"], ["plan.zero: must be 0, 1, 2, 3 or none, got 4"]),
        (["--set", "lr=1", "--set", "server.lr=1"], ["--set: got 'lr=1'; allowed", "--set: server.lr: unknown key"]),
        (
            ["--epochs", "0", "--set", "local.lr=-1", "--set", "plan.zero=4"],
            ["train.epochs: must be at least 1", "local.lr: must be positive", "plan.zero: must be 0, 1, 2, 3 or none"],
        ),
        (["--nproc", "0", "--device", "tpu"], ["--nproc: must be at least 1, got 0", "--device: must be auto, cpu"]),
        (["--set", "task.smooth=1"], ["task.smooth: unknown key, got '1' (known, from Task(options=...): none)"]),
        (["--set", "train.last=drop", "--set", "train.batch_size=64"], ["last: leaves no step: 52 examples"]),
    ],
)
def test_all_mistakes_are_reported_before_anything_starts(
    options: list[str], faults: list[str], tmp_path: Path
) -> None:
    said = refused("train", TASK, "--out", tmp_path / "out", *options)
    for fault in faults:
        assert any(line.startswith(fault) for line in said), said
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_what_is_no_torch_task_or_not_there_is_refused(tmp_path: Path) -> None:
    assert refused("train", ROOT / "examples/iris_sklearn.py:task")[0].endswith("`atoll train` takes a Task")
    assert refused("train", tmp_path / "none.py:task") == [f"there is no file {tmp_path / 'none.py'}"]


def test_test_data_without_an_example_is_refused_as_in_a_simulation(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom tests.parallel.trainer.tasks import task as full\n"
        "task = replace(full, test_data=lambda: [])\n"
    )
    own, no_examples = tmp_path / "own.py:task", "the task's test_data has no examples"
    assert refused("train", own, "--out", tmp_path / "out") == [f"{no_examples}: give it some, or leave test_data out"]
    (line,) = refused("simulate", own, "--rounds", 1, "--out", tmp_path / "out")
    assert no_examples in line


def test_a_launcher_that_is_there_starts_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert refused("train", TASK, "--nproc", "2") == ["--nproc: a launcher has started 2 ranks already; leave it out"]


@pytest.mark.parametrize(("here", "known"), [("8", "has 8 of 16"), (None, "has an unknown number of 16: set LOCAL_")])
def test_the_ranks_of_several_machines_choose_no_mesh_by_themselves(
    here: str | None, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would choose by its own machine's memory, and unlike meshes wait for each other for ever."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    found = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"} | ({"LOCAL_WORLD_SIZE": here} if here else {})
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    (line,) = refused("train", TASK, "--mesh", "auto")
    assert line.startswith("--mesh: auto chooses for the ranks of one machine, and this one ")
    assert known in line
    assert "a named mesh" in line


@pytest.mark.slow
def test_it_trains_says_so_and_goes_on_unless_it_must_be_fresh(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = shown("train", TASK, "--out", out, "--epochs", 2, *EVERY_STEP)
    assert (result["why"], result["steps"], result["mesh"]) == ("finished", 14, "one rank")
    assert json.loads((out / "result.json").read_text()) == result
    assert model(out)
    assert refused("train", TASK, "--out", out, "--fresh") == [
        f"--fresh: {out} is not empty; delete it, or choose another folder with --out"
    ]
    again = invoke("train", TASK, "--out", out, "--epochs", 3, *EVERY_STEP)
    assert again.exit_code == 0
    assert "tasks: finished after 21 steps (3 epochs" in again.stdout.replace("tasks:task", "tasks")
    assert "resuming from step 14" in again.stderr
    assert refused("train", TASK, "--out", out, *EVERY_STEP, "--set", "local.lr=0.5")[0].startswith(
        f"{out} holds a training with other settings: local.lr was 0.2, now 0.5"
    )


@pytest.mark.real
def test_the_planner_chooses_the_mesh_and_the_ranks_take_its_choice(tmp_path: Path) -> None:
    result = invoke("train", TASK, "--nproc", 2, "--mesh", "auto", "--out", tmp_path / "out", "--steps", 1, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["mesh"] == "dp_replicate=2"
    assert result.stderr.count("mesh auto is dp_replicate=2: ") == 1


def test_a_loss_that_is_no_number_ends_with_1_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from dataclasses import replace\nfrom tests.parallel.trainer import tasks\n"
        "task = replace(tasks.task, loss=tasks.Breaking(4))\n"
    )
    result = invoke("train", tmp_path / "broken.py:task", "--out", tmp_path / "out", *EVERY_STEP)
    assert result.exit_code == 1
    assert "atoll: the loss or its gradient is not finite in step 4" in result.stderr
    assert "the checkpoint of step 3 is kept" in result.stderr
    assert "Traceback" not in result.stderr


class Trainer:
    """`atoll train` as a process of its own."""

    def __init__(self, task: str, out: Path, *options: str) -> None:
        self.log, self.errors = out / "log.jsonl", out.with_suffix(".err")
        self.slowed_by = out.with_suffix(".slow")
        self.slowed_by.touch()
        command = [sys.executable, "-m", "atoll", "train", task, "--out", str(out), "--json", *EVERY_STEP, *options]
        variables = {"OMP_NUM_THREADS": "1", tasks.SLOWED_BY: str(self.slowed_by)}
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, env=os.environ | variables
            )

    def wait_for(self, step: int) -> None:
        """Wait until the log has this step."""
        until = time.monotonic() + LIMIT_S
        while not self.log.exists() or max(tasks.losses(self.log.parent), default=0) < step:
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < until, self.errors.read_text()
            time.sleep(0.05)

    def end(self) -> tuple[int, Any]:
        """The exit code, and what was printed."""
        output, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, json.loads(output) if output else None


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Any]:
    started: list[Trainer] = []

    def begin(*arguments: Any) -> Trainer:
        started.append(Trainer(*arguments))
        return started[-1]

    yield begin
    for trainer in started:
        if trainer.process.poll() is None:
            for process in [*descendants(trainer.process.pid), trainer.process.pid]:
                os.kill(process, signal.SIGKILL)
        trainer.process.communicate()


def ranks_of(process: int) -> dict[int, int]:
    """Process by rank."""
    found = {}
    for child in descendants(process):
        name, _, rank = Path(f"/proc/{child}/comm").read_text().strip().rpartition(" ")
        found |= {int(rank): child} if name == "atoll rank" else {}
    return found


@pytest.mark.long
@pytest.mark.real
def test_a_rank_that_is_killed_costs_nothing_but_time(start: Any, tmp_path: Path) -> None:
    call_on_ranks(on_ranks, 2, tmp_path / "undisturbed", mesh(dp_replicate=2))
    trainer = start(f"{TASKS}:slow", tmp_path / "killed", "--nproc", "2")
    trainer.wait_for(8)
    os.kill(ranks_of(trainer.process.pid)[1], signal.SIGKILL)
    trainer.slowed_by.unlink()
    code, result = trainer.end()
    assert (code, result["why"], result["steps"]) == (0, "finished", 28), trainer.errors.read_text()
    begins = [event["step"] for event in events(trainer.log) if event["event"] == "begin"]
    assert begins[0] == 0
    assert begins[1] in (3, 6, 7, 9, 12)  # of checkpoints, also those at the end of an epoch
    assert len(begins) == 2
    assert tasks.losses(tmp_path / "killed") == tasks.losses(tmp_path / "undisturbed")
    expected = model(tmp_path / "undisturbed")
    assert all(value.equal(expected[name]) for name, value in model(tmp_path / "killed").items())


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()]


@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGTERM, ()), pytest.param(signal.SIGINT, ("--nproc", "2"), marks=pytest.mark.long)]
)
def test_a_signal_saves_and_the_same_command_goes_on(
    number: signal.Signals, options: tuple[str, ...], start: Any, tmp_path: Path
) -> None:
    trainer = start(f"{TASKS}:slow", tmp_path / "parts", *options)
    trainer.wait_for(4)
    trainer.process.send_signal(number)
    code, result = trainer.end()
    trainer.slowed_by.unlink()
    assert (code, result["why"]) == (130, "interrupted"), trainer.errors.read_text()
    steps = result["steps"]
    assert 4 <= steps < 28
    assert (tmp_path / "parts" / "checkpoints" / f"step-{steps:08}").is_dir()
    end = shown("train", f"{TASKS}:slow", "--out", tmp_path / "parts", *EVERY_STEP)
    assert (end["why"], end["steps"]) == ("finished", 28)
    run(tmp_path / "whole")
    assert tasks.losses(tmp_path / "parts") == pytest.approx(tasks.losses(tmp_path / "whole"), abs=1e-5)


@pytest.mark.long
@pytest.mark.real
def test_a_rank_that_fails_ends_the_others_at_once_with_its_own_reason(start: Any, tmp_path: Path) -> None:
    trainer = start(f"{TASKS}:failing", tmp_path / "out", "--nproc", "2")
    code, result = trainer.end()  # within a fraction of the half hour for which a rank waits for another
    assert (code, result) == (2, None)  # the task's own fault
    assert max(tasks.losses(tmp_path / "out")) in (4, 5)
    said = trainer.errors.read_text()
    assert said.count("the task failed: ArithmeticError: no loss on rank 1 (") == 1
    assert "Traceback" not in said
    assert "find_unused_parameters" not in said
    assert "resuming from" not in said


OWN_FAULTS = {
    "model": ("def model():\n    raise RuntimeError('no model')\ntask = replace(tasks.task, model=model)", "no model"),
    "data": ("def data(site, split):\n    raise KeyError('rows')\ntask = replace(tasks.task, data=data)", "rows"),
    "loss": ("def loss(outputs, targets):\n    return outputs.none\ntask = replace(tasks.task, loss=loss)", "none"),
    "arguments": (
        "def loss(outputs):\n    return outputs\ntask = replace(tasks.task, loss=loss)",
        "takes 1 positional",
    ),
    "shape": (
        "import torch\ntask = replace(tasks.task, model=lambda: torch.nn.Linear(99, 3))",
        "shapes cannot be multiplied",
    ),
    "test data": (
        "def data():\n    raise ValueError('no tests')\ntask = replace(tasks.task, test_data=data)",
        "no tests",
    ),
    "file": ("def data(site, split):\n    open('/none')\ntask = replace(tasks.task, data=data)", "/none"),
    "row": (
        "import torch\nclass Short:\n    rows = torch.zeros(9, 6)\n    def __len__(self):\n        return 99\n"
        "    def __getitem__(self, index):\n        return self.rows[index], 0\n"
        "task = replace(tasks.task, data=lambda site, split: Short())",
        "is out of bounds for dimension 0",
    ),
    "gradient": (
        "import torch\nclass Model(torch.nn.Linear):\n    def forward(self, inputs):\n"
        "        found = super().forward(inputs).exp()\n        found.add_(1)\n        return found\n"
        "task = replace(tasks.task, model=lambda: Model(6, 2))",
        "modified by an inplace operation",
    ),
}


@pytest.mark.parametrize("what", OWN_FAULTS)
def test_a_fault_of_the_task_s_own_code_is_one_line_and_2(what: str, tmp_path: Path) -> None:
    code, words = OWN_FAULTS[what]
    (tmp_path / "own.py").write_text(
        f"from dataclasses import replace\nfrom tests.parallel.trainer import tasks\n{code}\n"
    )
    (line,) = (
        line
        for line in refused("train", tmp_path / "own.py:task", "--out", tmp_path / "out", "--set", "train.batch_size=8")
        if "TensorBoard" not in line
    )
    assert line.startswith(("the task failed: ", "the train data of sites "))
    assert words in line


def test_a_metric_that_is_no_sum_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (line,) = refused("train", f"{failing_tasks.__name__}:metric_number", "--out", tmp_path / "out")
    assert line.startswith("metric 'half': of 4 rows of the train data of sites 'a', 'b', 'c', 'd', ")
    assert "expected a tuple of numbers, got 0.5: a metric returns finite numbers of every batch" in line
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_metric_that_grows_later_is_left_out_alone_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training that it measures ends as without it, with the loss of all data."""
    monkeypatch.setattr(metrics, "_named", set[str]())
    given = ("--out", tmp_path / "out", "--set", "train.batch_size=8")
    found = shown("train", f"{failing_tasks.__name__}:metric_grows", *given)["metrics"]
    assert sorted(found) == [f"{group}/{part}" for group in ("sites", "test") for part in ("grows", "loss")]
    assert [found[f"{group}/grows"] for group in ("sites", "test")] == [None, None]
    assert min(found["sites/loss"], found["test/loss"]) > 0
    said = [record.getMessage() for record in caplog.records if "grows" in record.getMessage()]
    assert any("metric 'grows' is left out: " in line and "sums; return the same number" in line for line in said)
    assert model(tmp_path / "out")


@pytest.mark.parametrize(("name", "words"), [*failing_tasks.LOSSES.items(), ("infinite_mask", "persistent=False")])
def test_a_loss_or_a_value_that_cannot_be_trained_on_is_one_line_and_2(name: str, words: str, tmp_path: Path) -> None:
    (line,) = refused("train", f"{failing_tasks.__name__}:{name}", "--out", tmp_path / "out")
    assert words in line
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_training_whose_targets_are_all_ignored_ends_with_2_and_leaves_no_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nimport torch\nfrom torch.utils.data import TensorDataset\n"
        "from tests.cli import failing_tasks\n"
        "rows = TensorDataset(torch.ones(9, 3), torch.full((9,), -100))\n"
        "task = replace(failing_tasks.task, data=lambda site, split: rows, test_data=None)\n"
    )
    given = ("--set", "train.batch_size=12", "--epochs", "2")
    result = invoke("train", f"{tmp_path / 'own.py'}:task", "--out", tmp_path / "out", *given)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(
        "atoll: the targets of 6 steps have no units (every target is ignored), so nothing was trained"
    )
    assert not list((tmp_path / "out").glob("model*"))


def test_a_batch_norm_with_one_row_is_one_line_and_2(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom tests.cli import failing_tasks\n"
        "one = failing_tasks.lone_row\n"
        "task = replace(one, sites=('d',), test_data=None)\n"
    )
    (line,) = refused("train", f"{tmp_path / 'own.py'}:task", "--out", tmp_path / "out")
    assert line.startswith(f"the train data of site 'd': {failing_tasks.NOTHING_TO_TRAIN['lone_row']}")


def test_a_folder_in_which_another_training_runs_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with folder_lock(out):
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        for options in ([], ["--nproc", 2]):
            (line,) = refused("train", TASK, "--out", out, *options)
            assert line.startswith(f"--out: {out} is in use by another training (process {os.getpid()} on {node()}")
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert (
        invoke("train", TASK, "--out", out, "--fresh", *EVERY_STEP).exit_code == 0
    )  # a lock that is free is no training
