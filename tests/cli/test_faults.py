"""The operator's mistakes: all at once, one line each, exit code 2, nothing started."""

import os
import re
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from atoll.operations.task_failures import one_line
from atoll.protocol.signals import ExitCode
from atoll.server.journal.state_directory import StateDirectory
from atoll.training.worker.operations import detail_of
from tests.cli.invoking import TINY, faults_in, invoke, refused
from tests.waiting import BOUND_S

MODEL = Path(__file__).parents[1] / "parallel" / "trainer" / "tasks.py"


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f'task = "{TINY}:task"\n[coordinator]\nlisten = "127.0.0.1:0"\nstate = "{tmp_path / "state"}"\n')
    return path


def test_all_mistakes_of_a_run_are_reported_at_once(run_toml: Path) -> None:
    run_toml.write_text(run_toml.read_text() + "[round]\ncohort_sise = 3\nquorum = 'six'\n")
    faults = refused("coordinator", run_toml, "--set", "round.retry=-1", "--set", "seed=one")
    keys = [fault.split(": ")[1] for fault in faults]
    assert sorted(keys) == ["round.cohort_sise", "round.quorum", "round.retry", "seed"]
    assert any(
        fault.startswith(f"{run_toml}: round.cohort_sise: unknown key (did you mean cohort_size?") for fault in faults
    )
    assert "--set: round.retry: got -1; allowed: integer >= 0, <= 1000000" in faults
    assert not (run_toml.parent / "state").exists()


@pytest.mark.parametrize("command", [["coordinator"], ["run", "start"]])
def test_a_task_that_is_not_there_is_named_with_its_absolute_path(command: list[str], tmp_path: Path) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text('task = "nowhere.py:task"\n[cohort]\nsampler = "neither.py:draw"\n')
    assert refused(*command, run_toml) == [
        f"{run_toml}: task: there is no file {tmp_path / 'nowhere.py'}",
        f"{run_toml}: cohort.sampler: there is no file {tmp_path / 'neither.py'}",
    ]


@pytest.mark.parametrize(
    "command",
    [["new"], ["simulate", f"{TINY}:task", "--out"], ["train", f"{MODEL}:task", "--out"], ["coordinator", "--state"]],
)
def test_a_folder_that_cannot_be_made_is_named_with_the_reason(command: list[str], tmp_path: Path) -> None:
    folder = tmp_path / ("n" * 300)
    (fault,) = refused(*command, folder)
    assert fault.removeprefix("--out: ").startswith(str(folder))
    assert ": file name too long" in fault.lower()
    assert "Errno" not in fault
    assert re.search("(name|choose) another (path|folder)$", fault)


def test_a_database_that_is_away_is_worth_another_try(tmp_path: Path) -> None:
    """A unit starts a coordinator again after this exit code, and not after that of an operator's mistake."""
    pytest.importorskip("psycopg")
    where = ["--set", "coordinator.database=postgresql://127.0.0.1:1/atoll", "--set", "coordinator.listen=127.0.0.1:0"]
    result = invoke("coordinator", "--state", tmp_path / "state", *where)
    assert result.exit_code == ExitCode.AWAY == 75
    assert "cannot be reached" in result.stderr
    assert "Traceback" not in result.output


def test_what_is_no_task_is_refused_with_the_two_forms(tmp_path: Path) -> None:
    assert refused("coordinator", "digits") == [
        "task: got 'digits': allowed: module:attribute or path/to/file.py:attribute"
    ]
    assert refused("coordinator", f"{TINY}:tusk", "--check")[0].endswith("(tasks there: task)")
    assert refused("agent", "digits", "--site", "north")[0].startswith("'digits' is neither module:attribute nor")


@pytest.mark.real
def test_a_task_whose_code_raises_is_refused_with_what_it_raised(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no data here')\n")
    place = tmp_path / "broken.py"
    assert refused("coordinator", f"{place}:task", "--check") == [
        f"{place}:task: cannot be loaded: RuntimeError: no data here"
    ]
    started = invoke(
        "coordinator", f"{place}:task", "--state", tmp_path / "state", "--set", "coordinator.listen=localhost:0"
    )
    assert started.exit_code == 2, started.stderr
    assert faults_in(started.stderr) == [f"the task cannot be used: RuntimeError: no data here ({place}, line 1)"]
    assert not (tmp_path / "state").exists()


def test_overrides_of_the_local_training_are_tried_by_check(tmp_path: Path) -> None:
    invoke("new", tmp_path / "project")
    faults = refused(
        "coordinator", tmp_path / "project" / "run.toml", "--check", "--set", "local.ir=1", "--set", "local.lr=-1.0"
    )
    assert [fault.split(":")[0] for fault in faults] == ["local.ir", "local.lr"]


FAULTY_LOCAL = ("--set", "local.ir=1", "--set", "local.lr=-1.0")


@pytest.mark.real
def test_a_start_refuses_local_settings_as_check_does_and_leaves_nothing(tmp_path: Path) -> None:
    invoke("new", tmp_path / "project")
    start = ("coordinator", tmp_path / "project" / "run.toml", *FAULTY_LOCAL, "--set=coordinator.listen=localhost:0")
    faults, state = refused(*start, "--check"), tmp_path / "state"
    assert refused(*start, "--state", state) == faults
    assert not state.exists()
    StateDirectory.open(state).close()
    assert refused(*start, "--state", state) == faults
    assert not any((state / "runs").iterdir())


@pytest.mark.real
def test_a_task_that_is_not_in_its_file_leaves_no_state_directory(tmp_path: Path) -> None:
    start = ("coordinator", f"{TINY}:nope", "--set=coordinator.listen=127.0.0.1:0")
    assert refused(*start, "--state", tmp_path / "state") == refused(*start, "--check")
    assert not (tmp_path / "state").exists()


def test_a_run_is_not_started_with_settings_of_the_coordinator(tmp_path: Path) -> None:
    start = ("run", "start", f"{TINY}:task", "--state", tmp_path)
    (fault,) = refused(*start, "--set", "coordinator.max_runs=9", "--set", "rounds=2")
    assert fault.startswith("--set: coordinator.max_runs: is a setting of the coordinator, which is running already")
    both = refused(*start, "--set", "coordinator.max_runs=9", "--set", "rounds=none", "--set", "local.nonsense.x=1")
    assert len(both) == 3, "the other mistakes are said at once"
    both = refused("simulate", f"{TINY}:task", "--set", "coordinator.max_runs=9", "--set", "rounds=none")
    assert [fault.partition(":")[0] for fault in both] == ["coordinator.max_runs", "--set"]


def test_ports_that_clash_are_found_by_check() -> None:
    settings = [f"--set=coordinator.{name}=127.0.0.1:17070" for name in ("listen", "enrol", "admin")]
    assert all("127.0.0.1:17070 are the same port" in fault for fault in refused("coordinator", "--check", *settings))


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (["client", "invite", "bob", "--hours", "1000"], "got 1000; allowed: at least 0.001, at most 720"),
        (["client", "invite", "bob", "--hours", "nan"], "got nan; allowed: at least 0.001, at most 720"),
        (["audit", "show", "--last", "-3"], "got -3; allowed: at least 1"),
        (["authority", "issue", "ca", "main", "--out", "a", "--days", "0"], "got 0; allowed: at least 0.001, at most"),
        (["plan", "--top", "0", "task.py:task"], "got 0; allowed: at least 1"),
        (["population", "--rows", "-1", "run.toml"], "got -1; allowed: at least 0"),
        (["sweep", "sweep.toml", "--jobs", "0"], "got 0; allowed: at least 1"),
        (["round", "show", "0"], "got 0; allowed: at least 1"),
        (["model", "export", "--out", "m", "--", "-1"], "got -1; allowed: at least 0"),
    ],
)
def test_a_number_out_of_range_is_named(command: list[str], fault: str) -> None:
    result = invoke(*command)
    assert result.exit_code == 2
    assert fault in result.stderr


@pytest.mark.real
def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from atoll.cli.main import run; run()", "settings", "run"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=BOUND_S)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("round.quorum", "--set: got 'round.quorum'; allowed: key=value, with a key such as round.quorum"),
        ("round.quorun=3", "--set: round.quorun: unknown key (did you mean quorum?"),
        (
            "coordinator.listen=0.0.0.0",
            "--set: coordinator.listen: got '0.0.0.0': allowed: host:port",
        ),
        ("coordinator.state=3", "--set: coordinator.state: got 3; allowed: path"),
    ],
)
def test_a_wrong_override_is_refused(run_toml: Path, override: str, fault: str) -> None:
    assert refused("coordinator", run_toml, "--set", override)[0].startswith(fault)


def test_a_coordinator_without_a_run_takes_no_settings_of_one() -> None:
    assert refused("coordinator", "--set", "rounds=3") == ["--set: rounds: unknown key (known: coordinator, notify)"]


def test_a_file_that_is_not_there_or_no_toml_is_refused(tmp_path: Path) -> None:
    assert refused("coordinator", tmp_path / "no.toml") == [f"there is no {tmp_path / 'no.toml'}"]
    (tmp_path / "a.toml").mkdir()
    assert refused("coordinator", tmp_path / "a.toml") == [f"{tmp_path / 'a.toml'} is a directory: name a file"]
    (tmp_path / "bad.toml").write_text("task = \n")
    assert refused("run", "start", tmp_path / "bad.toml")[0].startswith(f"{tmp_path / 'bad.toml'}: not TOML")


def test_a_state_directory_in_use_is_refused(run_toml: Path) -> None:
    with StateDirectory.open(run_toml.parent / "state"):
        (fault,) = refused("coordinator", run_toml)
    assert "is in use by another process (" in fault


@pytest.mark.real
def test_a_port_in_use_is_refused(run_toml: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (fault,) = refused("coordinator", run_toml, "--set", f"coordinator.listen={address}")
    assert fault == f"cannot listen on {address}: the port is in use, or not allowed"


def test_all_mistakes_of_an_agent_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text("threads = -1\nsight = 'north'\n")
    faults = refused(
        "agent", tmp_path / "no.py:task", "--coordinator", "example.org", "--config", tmp_path / "agent.toml"
    )
    assert faults[0] == f"there is no file {tmp_path / 'no.py'}"
    assert sorted(fault.split(": ")[1] for fault in faults[1:]) == ["coordinator", "sight", "site", "threads"]


def test_an_agent_s_check_prints_what_it_would_run_with(tmp_path: Path) -> None:
    result = invoke("agent", f"{TINY}:task", "--site", "a", "--check")
    assert result.exit_code == 0, result.output
    assert 'state = "atoll-agent-a"' in result.stdout.splitlines()


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_no_command_prints_the_path_of_a_webhook(tmp_path: Path, form: tuple[str, ...]) -> None:
    """It is the secret of the webhook, and the journal of a service has what `ExecStartPre` prints."""
    (tmp_path / "notify.toml").write_text('[notify]\nurl = "https://hooks.example.org/s3cret"\n')
    run = tmp_path / "run.toml"
    run.write_text(f'task = "{TINY}:task"\nrounds = 1\n{(tmp_path / "notify.toml").read_text()}')
    state = ("--state", tmp_path / "state")
    for command in (
        ("coordinator", tmp_path / "notify.toml", *state),
        ("coordinator", run, *state),
        ("agent", f"{TINY}:task", "--site", "a", "--config", tmp_path / "notify.toml", *state),
        ("simulate", run, "--out", tmp_path / "out"),
    ):
        result = invoke(*command, "--check", *form)
        assert result.exit_code == 0, result.output
        assert "https://hooks.example.org/(hidden)" in result.stdout
        assert "s3cret" not in result.output
    if not form:
        assert invoke("simulate", run, "--out", tmp_path / "out").exit_code == 0
        assert "s3cret" not in (tmp_path / "out" / "run.toml").read_text(), "others may read it"


@pytest.mark.real
def test_a_mistake_of_ours_keeps_its_traceback_and_ends_with_70() -> None:
    program = "from atoll.cli.command import Command\nwith Command(): 1 / 0"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=BOUND_S)
    assert done.returncode == 70
    assert done.stderr.startswith("Traceback")
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["round", "list"], "is not a state directory: there is no state.db in it"),
        (["model", "export", "--out", "x"], "is not a state directory: there is no state.db in it"),
        (["run", "stop", "digits-1"], "no coordinator holds"),
    ],
)
def test_a_command_without_its_state_says_what_is_missing(tmp_path: Path, arguments: list[str], fault: str) -> None:
    assert fault in refused(*arguments, "--state", tmp_path / "none")[0]


def test_all_faults_of_task_sampler_and_rule_are_named_at_once(tmp_path: Path) -> None:
    for name in ("task", "draw", "rule"):
        (tmp_path / f"{name}.py").write_text("")
    run_toml = tmp_path / "run.toml"
    run_toml.write_text('task = "task.py:a"\n[cohort]\nsampler = "draw.py:b"\n[aggregation]\nrule = "rule.py:c"\n')
    told = refused("coordinator", "--check", run_toml)
    for name in ("task", "draw", "rule"):  # each is found beside the file, whatever the current directory is
        assert any(str(tmp_path / f"{name}.py") in line for line in told), told


def test_settings_of_the_coordinator_that_a_simulation_does_not_use_are_said_or_refused(tmp_path: Path) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text('task = "tests.simulations.federation.line_task:task"\n[coordinator]\nkeep_versions = 9\n')
    result = invoke("simulate", "--check", run_toml)
    assert result.exit_code == 0, result.output
    assert f"{run_toml}: not used here, of [coordinator]: keep_versions = 9; " in result.stderr
    run_toml.write_text('task = "tests.simulations.federation.line_task:task"\n[coordinator]\nlease = 9.0\n')
    assert "not used" not in invoke("simulate", "--check", run_toml).stderr
    assert refused("simulate", "--check", run_toml, "--set", "coordinator.keep_versions=9") == [
        "coordinator.keep_versions: a simulation has no coordinator's process: leave it out"
    ]


@pytest.mark.parametrize(("command", "grid"), [("sweep", "[grid]\nseed = [1, 2]\n"), ("compare", "")])
def test_experiments_say_or_refuse_what_only_a_coordinator_uses(tmp_path: Path, command: str, grid: str) -> None:
    file, task = tmp_path / "file.toml", 'task = "tests.simulations.federation.line_task:task"\n'
    file.write_text(f"{task}[coordinator]\nkeep_versions = 9\nlease = 9.0\n{grid}")
    stops = ["--check"] if command == "sweep" else ["--metric", "server/none"]  # before anything is trained
    noted = invoke(command, file, *stops).stderr
    assert f"{file}: not used here, of [coordinator]: keep_versions = 9; " in noted
    assert "federated" not in noted.splitlines()
    no_process = "coordinator.keep_versions: a simulation has no coordinator's process: leave it out"
    file.write_text(f"{task}{grid}")
    assert refused(command, file, *stops, "--set", "coordinator.keep_versions=9") == [no_process]
    if command == "sweep":
        file.write_text(f'{task}{grid}"coordinator.keep_versions" = [1, 2]\n')
        assert refused(command, file, *stops) == [no_process]


def test_a_run_that_is_started_says_which_of_its_files_coordinator_settings_it_leaves(tmp_path: Path) -> None:
    """The note comes before the coordinator is asked, which is not there."""
    file = tmp_path / "run.toml"
    file.write_text('task = "tests.simulations.federation.line_task:task"\n[coordinator]\nkeep_versions = 9\n')
    result = invoke("run", "start", file, "--state", tmp_path / "state")
    assert f"{file}: not used here, of [coordinator]: keep_versions = 9; the coordinator is running" in result.stderr


@pytest.mark.parametrize(
    ("command", "option", "value", "key", "other"),
    [
        ("simulate", "--rounds", 1, "rounds", "2"),
        ("simulate", "--clients", 3, "population.clients", "4"),
        ("simulate", "--seed", 1, "seed", "2"),
        ("simulate", "--engine", "sequential", "simulation.engine", "batched"),
        ("simulate", "--drop-empty", None, "population.drop_empty", "false"),
        ("population", "--drop-empty", None, "population.drop_empty", "false"),
        ("train", "--epochs", 1, "train.epochs", "2"),
        ("train", "--steps", 1, "train.steps", "2"),
        ("train", "--zero", 1, "plan.zero", "2"),
        ("compare", "--epochs", 1, "train.epochs", "2"),
        ("coordinator", "--state", "one", "coordinator.state", "two"),
    ],
)
def test_an_option_and_an_override_that_differ_are_refused(run_toml: Path, command, option, value, key, other) -> None:
    given = [option] if value is None else [option, value]
    (fault,) = refused(command, run_toml, *given, "--set", f"{key} = {other}")
    assert fault.startswith(f"{key}: got ")
    assert fault.endswith(f" by its option and {other} by --set: give one of them, or equal ones")


def test_an_option_and_an_override_may_be_equal(run_toml: Path) -> None:
    equal = ["--rounds", 4, "--set", "rounds=4", "--engine", "sequential", "--set", 'simulation.engine="sequential"']
    assert "rounds = 4" in invoke("simulate", run_toml, *equal, "--check").stdout


def test_two_join_codes_are_refused_without_showing_them(run_toml: Path) -> None:
    (fault,) = refused("agent", f"{TINY}:task", "--site", "north", "--join", "secret-1", "--set", "join=secret-2")
    assert fault == "join: two codes, by its option and by --set: give one of them, or equal ones"


def test_a_simulation_starts_from_a_run_of_the_state_directory_in_its_file(run_toml: Path) -> None:
    (run_toml.parent / "state").mkdir()
    (fault,) = refused("simulate", run_toml, "--set", "model.start=run:one", "--out", run_toml.parent / "out")
    why = f"{run_toml.parent / 'state'} is not a state directory: there is no state.db in it"
    assert fault.startswith(f"model.start: got 'run:one': {why}; the run's coordinator.state names")


def test_the_check_of_a_simulation_loads_the_rule(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def rule(:\n")
    (fault,) = refused("simulate", f"{TINY}:task", "--set", f"aggregation.rule={tmp_path}/broken.py:rule", "--check")
    assert "invalid syntax" in fault


def test_an_exception_without_words_gives_way_to_its_cause() -> None:
    """Torch's pipeline raises one whose words are all indented, as the lines of a traceback."""

    def fail() -> None:
        try:
            raise ValueError("a batch of another length")
        except ValueError as error:
            raise RuntimeError("\n        Failed to run stage backward:\n        Stage output: ...") from error

    def fail_twice() -> None:
        try:
            fail()
        except RuntimeError as error:
            raise RuntimeError from error

    for raising in (fail, fail_twice):
        with pytest.raises(RuntimeError) as failure:
            raising()
        text = "the task failed:\n" + "".join(traceback.format_exception(failure.value))
        assert one_line(text).startswith("the task failed: ValueError: a batch of another length (")
        assert "ValueError: a batch of another length" in detail_of(failure.value)
    assert (
        one_line("the task failed:\n" + "".join(traceback.format_exception(AssertionError())))
        == "the task failed: AssertionError"
    )
