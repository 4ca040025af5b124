"""The speed of this checkout against an earlier commit, in turns on one machine: that no change makes Atoll slow.

    python -m benchmarks.guard [--base COMMIT] [--only NAME ..] [--turns N] [--seconds S]

The base is a commit, by default the one at which this branch left origin/main; on main itself, or without such a
branch, it is the commit before HEAD, or HEAD if files have changed since. It is checked out into a temporary worktree,
which ends with this command, also after a signal. Both run with this interpreter:

    simulation   `atoll simulate`: rounds of the digits MLP, 100 of 100 clients, batched in one process
    fold         4 updates of 25 M float32 from files to a durable version
    step         steps of `atoll train`, a decoder of 6.6 M parameters on one thread
    sharded      the same under `fully_shard`, and the growth of its memory
    latency      empty rounds of 10 agents over mutual TLS
    data_plane   64 MB down, and up until they are durable

In each turn the base, the checkout and a second process of the base work for some seconds each, in changing order. The
figure is the median over the turns of base / checkout, in processor seconds of all of a side's processes for a unit of
work (more than 1: the checkout is faster), because other work on the machine moves real time much more; that is
printed, too. The base against itself says how far noise goes: where the 95 % interval of its median leaves 0.97 to
1 / 0.97, a figure below the bar is "noise", and to be measured again on a machine with less other work.

A measurement for which the base lacks a script or a function is left out, with the reason.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from benchmarks.report import Bar, conclude, interval, say, spread

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.97
MARK = "@ "
WORKTREE = "atoll-guard-"
ANSWER_MAX_S = 240.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

SIDE = [sys.executable, "-P", str(Path(__file__).with_name("guard_side.py"))]
COMMANDS = {
    "simulation": [sys.executable, "-m", "benchmarks.simulation_side", "atoll", "digits-mlp", "batched", "1"],
    "fold": [*SIDE, "fold"],
    "step": [*SIDE, "step"],
    "sharded": [*SIDE, "sharded"],
    "latency": [*SIDE, "latency"],
    "data_plane": [*SIDE, "data_plane"],
}
BASE, CHECKOUT, AGAIN = "base", "checkout", "base again"


class NotMeasured(RuntimeError):
    """A side that cannot be measured; the message has the last line of its errors."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The cost of a unit of work on one side, in one turn."""

    cpu_s: float
    real_s: float
    num_bytes: float


class Side:
    """A process that works on demand, in a tree.

    Args:
        name: of the side.
        command: its command.
        tree: whose code runs.
    """

    def __init__(self, name: str, command: Sequence[str], tree: Path) -> None:
        self.name, self.turns = name, list[Turn]()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - `__exit__` closes it
        self._process = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_until_ready(self) -> Self:
        """Wait until the side can work."""
        self._answer()
        return self

    def work(self, seconds: float) -> Turn:
        """Let the side work for at least this time, and add the turn."""
        assert self._process.stdin is not None
        before = processor_s(self._process.pid)
        with suppress(BrokenPipeError):  # `_answer` says why
            self._process.stdin.write(f"run {seconds}\n")
            self._process.stdin.flush()
        found = self._answer()
        units = found.get("units") or found["rounds"]
        cpu_s = found.get("cpu_s", processor_s(self._process.pid) - before)
        self.turns.append(Turn(cpu_s / units, found["seconds"] / units, found.get("bytes", 0.0)))
        return self.turns[-1]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        patience = threading.Timer(ANSWER_MAX_S, self._process.kill)
        patience.daemon = True  # a signal may come before it is cancelled
        patience.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return found
        finally:
            patience.cancel()
        code = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["no error"])[-1]
        raise NotMeasured(f"{self.name} ended with exit code {code}: {last}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # a side that waits for a request ends
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def processor_s(pid: int) -> float:
    """Return the processor seconds of a process and its living descendants, and of their children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended in between
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_PER_S + sum(processor_s(int(child)) for child in children)


@dataclass(slots=True)
class Found:
    """The figures of one measurement."""

    speed: list[float] = field(default_factory=list)
    """Base over checkout, in processor time, of each turn; the base's is the mean of its two processes."""
    real: list[float] = field(default_factory=list)
    """The same in real time."""
    itself: list[float] = field(default_factory=list)
    """The base over the base."""
    memory: list[float] = field(default_factory=list)
    """Base over checkout in bytes; empty: not measured."""

    @property
    def is_noise(self) -> bool:
        """The answer whether the base differs from itself by more than the bar allows."""
        low, high = interval(self.itself)
        return low < BAR or high > 1 / BAR

    @property
    def verdict(self) -> str:
        """The word for the figure: ok, slower, noise."""
        if median(self.speed) >= BAR:
            return "ok"
        return "noise" if self.is_noise else "slower"

    def summary(self) -> dict[str, Any]:
        """Return the figures for the last line."""
        low, high = interval(self.itself)
        return {
            "verdict": self.verdict,
            "speed": spread(self.speed, 3),
            "speed_in_real_time": spread(self.real, 3),
            "base_against_itself": spread(self.itself, 3) | {"interval_95": [round(low, 3), round(high, 3)]},
        } | ({"memory": spread(self.memory, 3)} if self.memory else {})


def found_of(base: Sequence[Turn], checkout: Sequence[Turn], again: Sequence[Turn]) -> Found:
    """Return the ratios of the turns of three sides."""
    found = Found()
    for first, ours, second in zip(base, checkout, again, strict=True):
        found.speed.append((first.cpu_s + second.cpu_s) / 2 / ours.cpu_s)
        found.real.append((first.real_s + second.real_s) / 2 / ours.real_s)
        found.itself.append(first.cpu_s / second.cpu_s)
        if first.num_bytes and ours.num_bytes:
            found.memory.append((first.num_bytes + second.num_bytes) / 2 / ours.num_bytes)
    return found


def measure(name: str, tree: Path, turns: int, seconds: float) -> Found:
    """Measure one thing in this checkout and in the tree of the base.

    Raises:
        NotMeasured: a side cannot do it.
    """
    places = {BASE: tree, CHECKOUT: ROOT, AGAIN: tree}
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(side, COMMANDS[name], place)) for side, place in places.items()]
        for side in sides:
            side.wait_until_ready()
        for number in range(1 + turns):
            for side in sides[number % 3 :] + sides[: number % 3]:
                side.work(seconds)
        return found_of(*(side.turns[1:] for side in sides))  # the first turn warms up


# ------------------------------------------------------------ the base


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return what a git command prints."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def base_of(given: str | None, root: Path = ROOT) -> str:
    """Return the commit of the base, as the module describes."""
    if given:
        return git("rev-parse", "--verify", f"{given}^{{commit}}", root=root)
    head = git("rev-parse", "HEAD", root=root)
    left = git("for-each-ref", "--format=%(objectname)", "refs/remotes/origin/main", root=root)
    base = git("merge-base", "HEAD", left, root=root) if left else head
    has_changed = bool(git("status", "--porcelain", "--untracked-files=no", root=root))
    return base if base != head or has_changed else git("rev-parse", "HEAD^", root=root)


@contextmanager
def worktree(commit: str, root: Path = ROOT) -> Iterator[Path]:
    """Check a commit out into a temporary worktree for a block; those that killed guards have left are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{WORKTREE}tree-*"):
        if not Path(f"/proc/{old.name.split('-')[3]}").exists():
            _remove(old, root)
    place = Path(tempfile.mkdtemp(prefix=f"{WORKTREE}tree-{os.getpid()}-"))
    try:
        git("worktree", "add", "--detach", str(place / "base"), commit, root=root)
        yield place / "base"
    finally:
        _remove(place, root)


def _remove(place: Path, root: Path) -> None:
    unlock = ["git", "-C", str(root), "worktree", "unlock", str(place / "base")]  # locked while git makes it
    subprocess.run(unlock, capture_output=True, check=False)
    shutil.rmtree(place, ignore_errors=True)
    git("worktree", "prune", root=root)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table and the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", help="commit to compare with; by default see the module's docstring")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="least seconds of each side in a turn")
    given = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the worktree is removed
    base, head = base_of(given.base or None), git("rev-parse", "--short=8", "HEAD")
    say(f"checkout {head} against {base[:8]}, {given.turns} turns; more than 1: the checkout is better")
    found, left_out = dict[str, Found](), dict[str, str]()
    with worktree(base) as tree:
        for name in given.only:
            try:
                found[name] = measure(name, tree, given.turns, given.seconds)
            except NotMeasured as error:
                left_out[name] = str(error)
                say(f"{name:<11} not measured: {error}")
                continue
            say(line_of(name, found[name]))
    bars = [bar for name, one in found.items() for bar in bars_of(name, one)]
    ours = {"checkout": head, "base": base} | {name: one.summary() for name, one in found.items()}
    return conclude("guard", bars, ours=ours | {"not_measured": left_out}, theirs={"base": base})


def bars_of(name: str, found: Found) -> list[Bar]:
    """Return the bars of one measurement; a name says where a figure below the bar is noise."""
    note = " (noise)" if found.verdict == "noise" else ""
    bars = [Bar.at_least(f"{name}: speed over the base's{note}", median(found.speed), BAR)]
    if found.memory:
        bars.append(Bar.at_least(f"{name}: the base's memory over ours", median(found.memory), BAR))
    return bars


def line_of(name: str, found: Found) -> str:
    """Return the line of one measurement in the table."""
    low, high = interval(found.itself)
    memory = f", memory {median(found.memory):.3f}" if found.memory else ""
    return (
        f"{name:<11} {median(found.speed):.3f} ({min(found.speed):.3f} to {max(found.speed):.3f}), real time "
        f"{median(found.real):.3f}{memory}; the base against itself {low:.3f} to {high:.3f}: {found.verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
