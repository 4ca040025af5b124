"""A signal at a moment at which no command handles it: one line, the exit code of the pages, and no process left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.cli.command import Command
from tests.cli.federation import ATOLL
from tests.process_table import descendants, is_running
from tests.waiting import BOUND_S

MARK = "import os, sys, time\nfrom pathlib import Path\nmark = lambda: Path(os.environ['MARK']).touch()\n"
TASK = """
import numpy as np, torch
from torch import nn
from torch.utils.data import TensorDataset
from atoll import Task

def data(site, split):
    if os.environ.get("SLOW") == "data":
        mark(); time.sleep(600)
    return TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)) if split == "train" else None

task = Task(
    model=lambda: nn.Linear(4, 2),
    data=data,
    sites=["a", "b"],
    loss=nn.functional.cross_entropy,
    test_data=lambda: TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)),
)
"""
AT_IMPORT = f"{MARK}mark(); time.sleep(600)\n"
HARD_TO_STOP = f"{MARK}mark()\nwhile True:\n    try: time.sleep(600)\n    except BaseException: pass\n"
SWALLOWING = f"{MARK}mark()\ntry: time.sleep(600)\nexcept: pass\n{TASK}"
REPLACING = f"{MARK}mark()\ntry: time.sleep(600)\nexcept BaseException as e: raise ImportError('no library') from e\n"
LOGGING = f"""{MARK}import logging
mark()
try: time.sleep(600)
except BaseException: logging.getLogger('pool').error('while the connection is given back', exc_info=True); raise
"""
LONG_IN_PYTHONS_END = f"""{MARK}
class Slow:
    def __del__(self, sleep=time.sleep): sleep(600)
sys.slow = Slow()
mark(); time.sleep(600)
"""
IN_C = f"""{MARK}
import ctypes
taken = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(taken)
mark(); lock(taken)
"""
OF_ANOTHER_THREAD = f"""{MARK}
import signal, threading
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
mark(); time.sleep(600)
"""
WITHOUT_A_READER = f"""{MARK}
os.set_blocking(2, False)
try:
    while os.write(2, b"." * 512): pass
except BlockingIOError: os.set_blocking(2, True)
mark(); time.sleep(600)
"""
IN_THE_RANKS = f"{MARK}if 'LOCAL_RANK' in os.environ: mark(); time.sleep(600)\n{TASK}"

NOWHERE = ("--insecure", "--coordinator", "127.0.0.1:1")
FREE = ("--insecure", "--set", "coordinator.listen=127.0.0.1:0", "--set", "coordinator.admin=127.0.0.1:0")
BOTH = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
BEGUN = "before a round began; nothing was written"


@dataclass
class Started:
    """A running command, whose task notes that it is being imported."""

    process: "subprocess.Popen[str]"
    mark: Path

    def stopped_at_the_mark(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal once the task has reached its mark; return the exit code and standard error."""
        until = self._until_marked()
        children = descendants(self.process.pid)
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=BOUND_S)
        while left := [child for child in children if is_running(child)]:
            assert time.monotonic() < until, left
            time.sleep(0.05)
        return self.process.returncode, errors

    def stopped_unread(self) -> int:
        """Send SIGTERM once the task has reached its mark, and read nothing; return the exit code."""
        self._until_marked()
        self.process.terminate()
        return self.process.wait(BOUND_S)

    def _until_marked(self) -> float:
        until = time.monotonic() + BOUND_S
        while not self.mark.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        return until


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    """Yield a function that starts a command, `atoll` unless a program of Python is given, with the task at hand."""
    running = []

    def begin(source: str, *arguments: str, program: str = "", **environment: str) -> Started:
        (tmp_path / "slow.py").write_text(source)
        command = [sys.executable, "-c", program] if program else [str(ATOLL)]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=tmp_path,
            env=os.environ | {"MARK": str(tmp_path / "mark")} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return Started(process, tmp_path / "mark")

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def line(errors: str) -> str:
    """Return the only line of standard error beside the notes on waiting and on the start of a service."""
    (found,) = (text for text in errors.splitlines() if not re.search("waiting for |the .* starts", text))
    return found


@pytest.mark.real
@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["simulate", "slow.py:task"], BEGUN),
        (["train", "slow.py:task"], "before the first step; nothing was written"),
        (["train", "slow.py:task", "--nproc", "2"], "before the first step; nothing was written"),
        (["compare", "slow.py:task"], BEGUN),
        (["sweep", "grid.toml"], "before a cell began; nothing was written"),
        (["population", "slow.py:task"], ""),
        (["coordinator", "slow.py:task", *FREE, "--check"], "before it listened"),
        (["agent", "slow.py:task", "--site", "a", *NOWHERE, "--check"], "before it dialled"),
    ],
)
def test_a_signal_while_the_task_is_imported(
    arguments: list[str], told: str, number: signal.Signals, start, tmp_path: Path
) -> None:
    (tmp_path / "grid.toml").write_text('task = "slow.py:task"\n[grid]\nseed = [1, 2]\n')
    code, errors = start(AT_IMPORT, *arguments).stopped_at_the_mark(number)
    assert (code, line(errors)) == (130, f"atoll: stopped by {number.name} {told}".rstrip())
    assert {path.name for path in tmp_path.iterdir()} <= {"slow.py", "grid.toml", "mark", "__pycache__"}


@pytest.mark.real
@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["coordinator", "slow.py:task", *FREE], "the coordinator ends"),
        (["agent", "slow.py:task", "--site", "a", *NOWHERE], "the agent ends, and finished updates wait in its spool"),
    ],
)
def test_a_service_that_loads_its_task_ends_in_order_at_once(
    arguments: list[str], told: str, number: signal.Signals, start
) -> None:
    command = start(AT_IMPORT, *arguments)
    code, errors = command.stopped_at_the_mark(number)
    assert code == 0
    assert f"stopped by {number.name}: {told}" in errors
    assert "Traceback" not in errors


@pytest.mark.real
@pytest.mark.parametrize(
    ("module", "arguments", "code", "told"),
    [
        ("typer", ["train", "slow.py:task"], 130, "before it began; nothing was written"),
        ("torch", ["train", "slow.py:task"], 130, "before the first step; nothing was written"),
        ("torch", ["plan", "llama-8b", "--dry-run", "0"], 130, "before the plan was complete; nothing was written"),
        ("grpc", ["coordinator", *FREE], 0, "before it listened"),
        ("grpc", ["agent", "slow.py:task", "--site", "a", *NOWHERE], 0, "before it dialled"),
        ("grpc", ["aggregator", "--rank", "0", "--of", "1", "--state", "s", *NOWHERE], 0, "before it dialled"),
        ("grpc", ["authority", "serve", "ca", "--coordinator", "127.0.0.1:1"], 0, "before it dialled"),
    ],
)
def test_a_signal_while_a_library_is_imported(module: str, arguments: list[str], code: int, told: str, start) -> None:
    program = f"""{MARK}
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}: mark(); time.sleep(600)
sys.meta_path.insert(0, Slow())
from atoll.cli.main import run
run()
"""
    found, errors = start("", *arguments, program=program).stopped_at_the_mark(signal.SIGTERM)
    assert (found, line(errors)) == (code, f"atoll: stopped by SIGTERM {told}")


@pytest.mark.real
def test_a_dry_run_that_is_still_starting_ends_with_the_plan(start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"""{MARK}
class Slow:  # the process from which the dry run is forked loads these modules first
    def find_spec(self, name, path=None, target=None):
        if name == "torch.utils.flop_counter": mark(); time.sleep(3)
sys.meta_path.insert(0, Slow())
"""
    )
    command = start("", "plan", "llama-8b", "--dry-run", "0", PYTHONPATH=str(tmp_path))
    begun = time.monotonic()
    code, errors = command.stopped_at_the_mark(signal.SIGTERM)
    assert (code, line(errors)) == (130, "atoll: stopped by SIGTERM before the plan was complete; nothing was written")
    assert time.monotonic() - begun < 60  # the dry run alone takes longer


@pytest.mark.real
def test_a_process_that_the_task_has_forked_is_ended_without_a_word(start) -> None:
    forks = f"""{MARK}
import multiprocessing, signal
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
child.start()
child.terminate()
child.join()
assert child.exitcode == -signal.SIGTERM, child.exitcode
mark()
time.sleep(600)
"""
    code, errors = start(forks, "simulate", "slow.py:task").stopped_at_the_mark(signal.SIGTERM)
    assert (code, line(errors)) == (130, f"atoll: stopped by SIGTERM {BEGUN}")


@pytest.mark.real
@pytest.mark.parametrize("source", [HARD_TO_STOP, SWALLOWING, REPLACING, LOGGING, LONG_IN_PYTHONS_END])
def test_a_task_that_is_hard_to_stop_ends_all_the_same(source: str, start, tmp_path: Path) -> None:
    code, errors = start(source, "simulate", "slow.py:task").stopped_at_the_mark(signal.SIGTERM)
    assert (code, line(errors)) == (130, f"atoll: stopped by SIGTERM {BEGUN}")
    assert not (tmp_path / "atoll-sim-slow").exists()


@pytest.mark.real
@pytest.mark.parametrize("source", [IN_C, OF_ANOTHER_THREAD])
def test_a_main_thread_that_does_not_come_to_handle_a_signal_ends_all_the_same(source: str, start) -> None:
    code, errors = start(source, "train", "slow.py:task").stopped_at_the_mark(signal.SIGTERM)
    assert (code, line(errors)) == (130, "atoll: stopped by SIGTERM before the first step; nothing was written")


@pytest.mark.real
def test_a_command_whose_output_nobody_reads_ends_all_the_same(start) -> None:
    command = start(WITHOUT_A_READER, "simulate", "slow.py:task")
    assert command.stopped_unread() == 130


@pytest.mark.real
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "slow.py:task"], "before a step was made; the same command resumes it"),
        (["simulate", "slow.py:task"], "before a round began; the same command resumes it"),
    ],
)
def test_a_signal_while_the_data_are_loaded(arguments: list[str], told: str, start) -> None:
    code, errors = start(f"{MARK}{TASK}", *arguments, SLOW="data").stopped_at_the_mark(signal.SIGINT)
    assert (code, line(errors)) == (130, f"atoll: stopped by SIGINT {told}")


@pytest.mark.real
def test_ranks_that_still_load_the_task_end_at_once(start) -> None:
    command = start(IN_THE_RANKS, "train", "slow.py:task", "--nproc", "2")
    code, errors = command.stopped_at_the_mark(signal.SIGTERM)
    assert code == 130
    told = [text for text in errors.splitlines() if text.startswith("atoll: ")]
    assert told == ["atoll: stopped by SIGTERM before it was saved; the same command resumes it"]
    assert "Traceback" not in errors


@pytest.mark.real
def test_a_signal_that_the_parent_ignores_stays_ignored(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from atoll.cli.command import Command
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for a command in the background
with Command():
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("the exit code stands", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert done.stdout.splitlines() == ["still here", "the exit code stands"]


@pytest.mark.real
def test_a_thread_of_the_task_that_does_not_end_is_told_and_ends_with_the_first_signal() -> None:
    program = """
import threading, time
from atoll.cli import command
command.TELL_S = 1.0  # until then Python waits for the thread: a signal just before the wait is seen after it
with command.Command():
    threading.Thread(target=time.sleep, args=(600,), name="prefetch").start()
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            told = process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 130
        finally:
            process.kill()
    assert told.startswith("atoll: the command has finished, and waits for threads that the task has started")
    assert told.endswith(": prefetch\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("coordinator run.toml", 0),
        ("coordinator run.toml --check", 130),
        ("agent task.py:task --site a", 0),
        ("aggregator --rank 0", 0),
        ("authority serve ca", 0),
        ("authority issue ca main", 130),
        ("simulate agent", 130),
        ("--version", 130),
        ("", 130),
    ],
)
def test_the_exit_code_is_that_of_the_pages(arguments: str, code: int) -> None:
    assert Command(arguments.split()).code_if_stopped == code
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text("utf-8")
    assert re.search(rf"^\| {code} \|.*signal", page, re.MULTILINE)
