"""`atoll simulate` when something is wrong: a sentence for each fault, and the exit code says whose it is."""

import json
import re
from pathlib import Path

import pytest

from atoll.operations.task_failures import one_line
from tests.cli import failing_tasks
from tests.cli.invoking import invoke, refused, said
from tools.docs import commands

TASKS = failing_tasks.__name__
ALL = ("--set", "round.cohort_size=4", "--rounds", "1", "--set", "simulation.workers=1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failed(*arguments: object, code: int = 2) -> str:
    """The sentence of a run that fails."""
    result = invoke("simulate", *arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("atoll: "))
    return line.removeprefix("atoll: ")


@pytest.mark.real
@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_client_that_fails_is_named_with_what_its_task_raised(engine: str) -> None:
    told = failed(f"{TASKS}:bad_label", *ALL, "--engine", engine)
    assert told == "the training of client d failed: IndexError: Target 77 is out of bounds."


def test_an_exception_of_the_user_s_code_is_reported_with_its_line() -> None:
    told = failed(f"{TASKS}:own_mistake", *ALL, "--engine", "sequential")
    assert told.startswith("the train data of client 'b': the loss does not take a batch of the inputs float32 [4, 3]")
    assert f"({failing_tasks.__file__}, line " in told


@pytest.mark.parametrize("engine", ["sequential", "batched", pytest.param("processes", marks=pytest.mark.real)])
def test_task_code_that_ends_the_process_is_a_failure_of_the_run(engine: str) -> None:
    told = failed(f"{TASKS}:ends_the_process", *ALL, "--engine", engine)
    assert told.startswith("the task failed: SystemExit: 0")


def test_task_code_outside_of_a_training_that_ends_the_process_is_one_too(folder: Path) -> None:
    told = failed(f"{TASKS}:no_test_data", *ALL, "--engine", "sequential")
    assert told.startswith("the task failed: SystemExit: 0")
    (folder / "ends.py").write_text("import sys\nsys.exit()\n")
    assert failed(f"{folder}/ends.py:task") == f"{folder}/ends.py:task: cannot be loaded: SystemExit: "


def test_a_task_that_changes_the_current_folder_leaves_the_run_in_its_own(folder: Path) -> None:
    result = invoke("simulate", f"{TASKS}:moves_away", *ALL, "--engine", "sequential", "--out", "run")
    assert result.exit_code == 0, result.output
    assert Path.cwd() == folder
    assert json.loads((folder / "run" / "result.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("engine", ["sequential", "batched", "auto"])
@pytest.mark.parametrize(("name", "words"), failing_tasks.LOSSES.items())
def test_a_loss_that_is_no_single_number_is_one_sentence_in_every_engine(name: str, words: str, engine: str) -> None:
    told = failed(f"{TASKS}:{name}", *ALL, "--engine", engine)
    assert told.startswith("the train data of client 'b'")
    assert words in told


@pytest.mark.parametrize("engine", ["sequential", "batched", pytest.param("processes", marks=pytest.mark.real)])
@pytest.mark.parametrize(("name", "words"), failing_tasks.NOTHING_TO_TRAIN.items())
def test_a_site_whose_rows_give_no_training_is_named_in_every_engine(name: str, words: str, engine: str) -> None:
    told = failed(f"{TASKS}:{name}", *ALL, "--engine", engine)
    assert told.startswith(f"the training of client d failed: {words}")


def test_a_model_that_does_not_start_with_finite_numbers_is_refused_with_the_way_out(folder: Path) -> None:
    (fault,) = refused("simulate", f"{TASKS}:infinite_mask", *ALL, "--out", folder / "out")
    assert fault.startswith("mask starts with NaN, infinite values or values beyond float32")
    assert "persistent=False" in fault


@pytest.mark.parametrize(
    ("what", "raised"),
    [
        ("data", "RuntimeError: no data in the train data of site 'a'"),
        ("record", "KeyError: 'a record' in the train data of site 'c'"),
        ("model", "RuntimeError: no model"),
    ],
)
def test_task_code_that_fails_before_training_is_reported_with_its_line(what: str, raised: str) -> None:
    told = failed(f"{TASKS}:no_{what}", *ALL, "--engine", "sequential")
    assert told.startswith(f"the task failed: {raised} ({failing_tasks.__file__}, line ")


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.simulations.federation.setting._cohort_faults", None)
    with pytest.raises(TypeError):
        invoke("simulate", f"{TASKS}:task", "--check")


@pytest.mark.real
def test_a_killed_worker_ends_the_run_with_one_sentence() -> None:
    told = failed(f"{TASKS}:killed", *ALL, "--engine", "processes", "--set", "simulation.workers=2", code=1)
    assert told.startswith("worker process ")
    assert told.endswith(" was ended by signal 9")


def test_a_text_without_a_traceback_is_a_sentence_already() -> None:
    assert one_line("worker process 3\nended") == "worker process 3 ended"


def test_the_reason_of_a_client_s_failure_is_printed_and_recorded(folder: Path) -> None:
    settings = [*ALL, "--set", "round.retry=0", "--set", "round.quorum=4", "--engine", "sequential", "--out", folder]
    result = invoke("simulate", f"{TASKS}:not_finite", *settings)
    assert result.exit_code == 1
    reason = "not_finite: the update has NaN or infinite values in 0.bias"
    assert f"1 failed ({reason}" in result.stderr
    assert f"1 failure of clients: {reason}" in result.stdout
    (line,) = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    assert line["fates"]["b"] == "failed"
    assert list(line["failures"]) == ["b"]
    assert line["failures"]["b"].startswith(reason)


def test_the_site_and_the_metric_that_were_not_finite_are_in_the_closing_lines(folder: Path) -> None:
    settings = [*ALL, "--set", "evaluation.clients_every=1", "--engine", "sequential", "--out", folder / "out"]
    result = invoke("simulate", f"{TASKS}:undefined_at_c", *settings)
    assert result.exit_code == 0, result.output
    at = "(its sums are NaN, infinite or left out at c)"
    rounds = folder / "out" / "rounds.jsonl"
    assert f"not finite in 1 round: train.f1 {at}, clients.f1 {at} (all of them: {rounds})" in result.stdout
    assert f"not finite: train.f1 {at}" in result.stderr


def test_the_closing_lines_of_an_asynchronous_run_have_the_number_of_dropped_updates(folder: Path) -> None:
    settings = {"round.mode": "fedasync", "round.concurrency": 4, "round.max_staleness": 1, "rounds": 12}
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    made = ["--set", "devices.examples_per_s=5", "--engine", "sequential", "--out", folder / "out"]
    result = invoke("simulate", f"{TASKS}:task", *given, *made)
    assert result.exit_code == 0, result.output
    account = json.loads((folder / "out" / "result.json").read_text())["invitations"]
    assert account["too_old"] > 0
    lines = [json.loads(text) for text in (folder / "out" / "rounds.jsonl").read_text().splitlines()]
    assert account["too_old"] == sum(len(line["too_old"]) for line in lines)
    share = f"{account['too_old']} dropped as too old ({100 * account['too_old'] / account['invited']:.3g} %)"
    assert f"{account['invited']} invitations, {account['reported']} reported, {share}" in result.stdout


@pytest.mark.parametrize("command", ["simulate", "population"])
def test_damaged_data_is_the_operator_s_to_mend(folder: Path, command: str) -> None:
    (folder / "damaged").write_bytes(b"no IDX")
    (fault,) = refused(command, f"{TASKS}:damaged")
    assert fault.startswith("damaged: begins with 6e6f2049")


@pytest.mark.parametrize(
    ("attack", "fault"),
    [
        (("label_flip", "num_labels=1"), "attack.num_labels: got 1; allowed: integer >= 2"),
        (("label_flip", "malicious=9"), "attack.malicious: got 9; the run has 4 clients"),
        (("backdoor", "target=99"), "attack.target: got 99; allowed: a label of the data, 0 to 1"),
    ],
)
@pytest.mark.parametrize("only_check", [False, True])
def test_an_attack_that_does_not_suit_the_data_is_refused(
    attack: tuple[str, str], fault: str, only_check: bool
) -> None:
    kind, option = attack
    settings = ["--set", f"attack.kind={kind}", "--set", f"attack.{option}", "--set", "attack.malicious=2"]
    settings = settings[:4] if "malicious" in option else settings
    (told,) = refused("simulate", f"{TASKS}:task", *ALL, *settings, *(["--check"] if only_check else []))
    assert fault in told


@pytest.mark.parametrize("only_check", [False, True])
def test_a_backdoor_needs_labels_and_a_place_for_its_trigger(only_check: bool) -> None:
    attack = ("--set", "attack.kind=backdoor", "--set", "attack.trigger_size=20", "--set", "attack.malicious=2")
    assert refused("simulate", f"{TASKS}:no_labels", *ALL, *attack, *(["--check"] if only_check else [])) == [
        "attack.trigger_size: got 20; allowed: 1 to 8, for images of 8 x 8",
        "attack.kind: backdoor needs labels (integers) as targets, got torch.float32 of shape (1, 1)",
    ]


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (fault,) = refused("simulate", f"{TASKS}:task", *ALL, "--set", "simulation.device=cuda", "--check")
    assert fault.startswith("simulation.device: got 'cuda'; allowed here: \"cpu\"")


def test_all_mistakes_are_reported_at_once() -> None:
    wrong = {
        "round.cohort_size": 50,
        "attack.kind": "label_flip",
        "attack.malicious": 10,
        "devices.trace": "nofile.csv",
        "local.lr": -1,
        "cohort.sampler": "no.such:thing",
    }
    faults = refused("simulate", f"{TASKS}:task", *(part for key in wrong for part in ("--set", f"{key}={wrong[key]}")))
    told = ["no.such:thing", "local.lr", "attack.malicious", "nofile.csv", "round.cohort_size"]
    assert all(name in fault for name, fault in zip(told, faults, strict=True))


def test_no_help_text_loses_what_stands_in_brackets() -> None:
    """The help is printed by rich, to which [grid] is markup and \\[grid] is not."""
    texts = [
        (path, text)
        for path, command in commands()
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params))
    ]
    assert [(path, text) for path, text in texts if re.search(r"(?<!\\)\[[a-zA-Z/#@]", text or "")] == []
    assert "[grid]" in said("sweep", "--help")
    assert "[population]" in said("population", "--help")
