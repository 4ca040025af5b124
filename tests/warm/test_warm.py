"""A warm start gives a command what a cold one does."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process_table import descendants, is_running
from tests.waiting import BOUND_S
from tests.warm.commands import Program, hides_nothing, program_of
from tests.warm.start import COLD, is_zygote

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
ATOLL = str(Path(sys.executable).with_name("atoll"))
PROBE = [sys.executable, "-m", "tests.warm.probe"]


@pytest.fixture(autouse=True)
def no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test says itself which start it means."""
    monkeypatch.delenv(COLD, raising=False)


def both(command: list[str], *, env: dict[str, str] | None = None, **how: Any) -> Iterator[dict[str, Any]]:
    """Yield what the probe finds after a cold and after a warm start."""
    for cold in ({COLD: "1"}, {COLD: ""}):
        environment = (dict(os.environ) if env is None else env) | cold
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S, **how)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["environment"].pop(COLD) == cold[COLD]
        yield answer


def assert_same(command: list[str], **how: Any) -> dict[str, Any]:
    cold, warm = both(command, **{"cwd": ROOT, "input": "", **how})
    assert warm == cold
    return warm


def test_a_warm_process_is_a_child_with_what_a_cold_one_has() -> None:
    found = assert_same(PROBE)
    assert found["parent"] == os.getpid()
    assert found["leads"] == [False, False]


def test_flags_arguments_and_standard_input_are_the_same() -> None:
    flags = ["-P", "-X", "faulthandler"]
    found = assert_same([sys.executable, *flags, "-m", "tests.warm.probe"], input="three words here\n", cwd="/")
    assert (found["input"], found["options"]) == ("three words here\n", {"faulthandler": True})


def test_the_environment_is_replaced_and_the_time_zone_with_it() -> None:
    few = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS", "LANG", "LC_ALL") if name in os.environ}
    found = assert_same(PROBE, env={**few, "TZ": "Asia/Tokyo", "GIVEN": "x"})
    assert (found["environment"]["GIVEN"], found["zone"][0]) == ("x", "JST")


def test_folders_are_put_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "a_plugin.py").write_text("")
    path = os.pathsep.join([str(tmp_path), str(ROOT), "/no/such/folder"])
    for flags in ([], ["-P"]):
        command = [sys.executable, *flags, "-m", "tests.warm.probe"]
        assert str(tmp_path) in assert_same(command, env={**os.environ, "PYTHONPATH": path})["path"][:2]


@pytest.mark.parametrize("name", ["json.py", "numpy/__init__.py", "sitecustomize.py", "torch.pyc", "grpc.so"])
def test_a_folder_that_hides_a_module_needs_an_exec(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    assert hides_nothing(str(tmp_path))
    (tmp_path / name).write_text("")
    assert not hides_nothing(str(tmp_path))
    assert not hides_nothing(f"{ROOT}{os.pathsep}{tmp_path}")


def test_relative_folders_need_an_exec_and_folders_of_the_path_do_not() -> None:
    assert not hides_nothing("tests")
    assert not hides_nothing(f"{ROOT}{os.pathsep}")
    assert hides_nothing(str(ROOT))


def test_a_crash_point_kills_a_warm_process(tmp_path: Path) -> None:
    command = [ATOLL, "coordinator", "tests.federation.quadratics_task:task", "--state", str(tmp_path / "state")]
    command += ["--set=coordinator.listen=127.0.0.1:0", "--set=coordinator.enrol=127.0.0.1:0"]
    for cold in ("1", ""):
        environment = {**os.environ, COLD: cold, "ATOLL_CRASH_AT": "journal.before_write"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S)
        assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_session_of_its_own_is_one() -> None:
    assert assert_same(PROBE, start_new_session=True)["leads"] == [True, True]


def test_ignored_and_blocked_signals_and_the_umask_are_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    old, mask = signal.signal(signal.SIGUSR2, signal.SIG_IGN), os.umask(0o027)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        found = assert_same(PROBE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGUSR2, old)
        os.umask(mask)
    assert {"SIGUSR2", "SIGPIPE"} <= set(found["ignored"])
    assert "SIGUSR1" in found["blocked"]
    assert found["umask"] == "0o27"


def test_a_descriptor_that_is_passed_keeps_its_number_and_no_other_is_there() -> None:
    for cold in ("1", ""):
        reading, writing = os.pipe()
        high = fcntl.fcntl(writing, fcntl.F_DUPFD, 57)
        os.close(writing)
        command = [*PROBE, str(high)]
        with subprocess.Popen(
            command, cwd=ROOT, pass_fds=[high], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, COLD: cold},
        ) as process:  # fmt: skip
            os.close(high)
            assert process.wait(BOUND_S) == 0
        assert os.read(reading, 10) == b"here"
        assert os.read(reading, 10) == b"", "nobody else holds the other end"
        os.close(reading)


def test_exit_codes_and_signals_are_those_of_a_child(tmp_path: Path) -> None:
    assert subprocess.run([ATOLL, "no-such-command"], capture_output=True).returncode == 2
    command = [ATOLL, "coordinator", "--state", str(tmp_path / "state"), "--set=coordinator.listen=127.0.0.1:0"]
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            assert any("atoll coordinator on" in line for line in process.stdout)
            process.send_signal(number)
            assert process.wait(BOUND_S) == code


def test_a_signal_that_comes_before_the_command_begins_is_not_lost() -> None:
    for _ in range(5):
        with subprocess.Popen([*PROBE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == -signal.SIGTERM


def test_a_folder_that_is_not_there_is_an_error_of_the_start() -> None:
    with pytest.raises(FileNotFoundError):
        subprocess.run(PROBE, cwd="/no/such/folder")


def test_what_a_warm_process_starts_is_its_child_and_its_zygote_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'task = "tests.simulations.federation.line_task:task"\nrounds = 1_000_000\n[round]\ncohort_size = 4\n'
        '[simulation]\nengine = "sequential"\n[grid]\nseed = [1]\n'
    )
    command = [sys.executable, "-m", "atoll", "sweep", "run.toml", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as sweep:
        until = time.monotonic() + BOUND_S
        while not (cells := descendants(sweep.pid)):
            assert time.monotonic() < until
            time.sleep(0.05)
        children = [int(pid) for pid in Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()]
        zygotes = [pid for pid in children if is_zygote(pid)]
        assert zygotes
        assert set(cells) <= set(children)
        sweep.kill()
    while any(map(is_running, [*zygotes, *cells])):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-c", "print()"],
        [sys.executable, "-m", "pytest"],
        [sys.executable, "-B", "-m", "atoll"],
        ["/another/python", "-m", "atoll"],
        [sys.executable],
        ["sleep", "1"],
    ],
)
def test_what_a_fork_would_not_do_the_same_is_none_of_it(command: list[str]) -> None:
    assert program_of(command) is None


def test_a_command_of_atoll_is_recognised() -> None:
    assert program_of([ATOLL, "run", "list"]) == Program([], "script", ATOLL, ["run", "list"])
    flags = ["-P", "-X", "faulthandler"]
    command = [sys.executable, *flags, "-m", "atoll.training.worker.main"]
    assert program_of(command) == Program(flags, "-m", "atoll.training.worker.main", [])


def test_a_zygote_outlives_the_thread_that_started_it() -> None:
    program = (
        "import os, subprocess, sys, threading, time; from tests.warm import start; start.install();"
        "run = lambda: subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL);"
        "thread = threading.Thread(target=run); thread.start(); thread.join(); time.sleep(0.1); run()"
    )
    command = [sys.executable, "-c", program, *PROBE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S)
    assert (done.returncode, done.stderr) == (0, "")
