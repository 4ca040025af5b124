"""The runs in folders: of `atoll simulate`, of `atoll train`, and the cells of `atoll sweep`."""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.exports.rows import About, Row, State, row_of_event, row_of_round
from atoll.protocol.json_values import flat
from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.report import ROUNDS, RunReport, read_run
from atoll.simulations.federation.report import NOISE_COHORT

LOG = "log.jsonl"
SITES_MAX = 100
"""The largest number of sites whose values are exported without being asked for."""

MAY_DIFFER = ("rounds", "simulation.", "train.epochs", "train.steps")
"""The settings that a resumed run may change without becoming another run."""

NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def identity(name: str, *parts: Any) -> str:
    """Return the identity of a run: its name, and a digest of what distinguishes it from others of the name."""
    text = json.dumps(parts, sort_keys=True, default=str, ensure_ascii=False)
    return f"{safe(name)[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def safe(name: str) -> str:
    """Replace the characters of a run's name that file names and identities exclude."""
    return NO_NAME.sub("-", name).strip(".-") or "run"


@dataclass
class SimulatedFolder:
    """The source of an export: the run in a folder of `atoll simulate`.

    Args:
        folder: the folder.
        group: the name of the group; empty: the run's name in its settings.
        sites: whether to export the values of each site; None: of at most `SITES_MAX`.
    """

    folder: Path
    group: str = ""
    sites: bool | None = None
    _has_sites: bool | None = field(default=None, repr=False)

    def about(self) -> About:
        """Return the description of the run."""
        report = self._report()
        settings = flat(report.settings)
        name = safe(self.folder.absolute().name)
        begun = _begun(self.folder / ROUNDS, report.rounds[-1]["real_s"] if report.rounds else 0.0)
        group = self.group or str(settings.get("name") or settings.get("task") or name)
        return About(identity(name, _decisive(settings), self.folder.resolve()), name, safe(group), begun, settings)

    def rows(self) -> Iterator[Row]:
        """Return a row for each round."""
        report = self._report()
        if not report.rounds:
            return
        begun = _begun(self.folder / ROUNDS, report.rounds[-1]["real_s"])
        with_sites = self.with_sites(report)
        for line in report.rounds:
            yield row_of_round(line, begun + line["real_s"], with_sites=with_sites)

    def state(self) -> State:
        """Return the state of the run."""
        result = self._report().result
        best = result.get("best") or {}
        facts = {name: result[name] for name in ("cause", "version", "rounds") if result.get(name) is not None}
        facts |= {f"best_{name}": value for name, value in best.items()}
        facts |= {} if result.get("privacy") is None else {"privacy": result["privacy"]["sentence"]}
        state = str(result.get("state", "running"))
        return State("running" if state == "interrupted" else state, facts)

    def row_of(self, line: Mapping[str, Any]) -> Row:
        """Return the row of a round that has just ended."""
        return row_of_round(line, time.time(), with_sites=self.with_sites())

    def with_sites(self, report: RunReport | None = None) -> bool:
        """Return whether the rows have the values of each site."""
        if self.sites is not None:
            return self.sites
        if self._has_sites is None:
            self._has_sites = (report or self._report()).num_clients <= SITES_MAX
        return self._has_sites

    def note(self) -> str:
        """Return the sentence about what the export leaves out; empty: nothing."""
        if self.sites is None and not self.with_sites():
            return f"{self.folder}: leaves out the values of more than {SITES_MAX} sites: --sites exports them"
        return ""

    def _report(self) -> RunReport:
        return read_run(self.folder)


@dataclass
class TrainingFolder:
    """The source of an export: the training in a folder of `atoll train`."""

    folder: Path

    def about(self) -> About:
        """Return the description of the training."""
        events = self._events()
        begin = next((event for event in events if event["event"] == "begin"), {})
        settings = flat({key: begin[key] for key in ("task", "train", "local", "plan") if key in begin})
        name = safe(self.folder.absolute().name)
        key = identity(name, _decisive(settings), self.folder.resolve())
        return About(
            key, name, safe(str(begin.get("task") or name)), _begun(self.folder / LOG, _last(events)), settings
        )

    def rows(self) -> Iterator[Row]:
        """Return a row for each logged step and each evaluation; of several of one step the last counts."""
        events = self._events()
        begun, at = _begun(self.folder / LOG, _last(events)), 0.0
        found: dict[tuple[str, int], Row] = {}
        for event in events:
            at = event.get("seconds", at)
            if (row := row_of_event(event, begun + at)) is not None:
                found[event["event"], row.step] = row
        yield from found.values()

    def state(self) -> State:
        """Return the state of the training."""
        ends = [event for event in self._events() if event["event"] in ("begin", "end")]
        if not ends or ends[-1]["event"] == "begin" or ends[-1]["why"] == "interrupted":
            return State("running")
        return State(str(ends[-1]["why"]), {"steps": ends[-1]["step"]})

    def row_of(self, event: Mapping[str, Any]) -> Row | None:
        """Return the row of an event that has just been logged; None: it has no numbers."""
        return row_of_event(event, time.time())

    def note(self) -> str:
        """Return "": the export leaves out nothing."""
        return ""

    def _events(self) -> list[dict[str, Any]]:
        """Return the events of the log, without a line that is being written."""
        try:
            lines = (self.folder / LOG).read_text("utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]


FolderSource = SimulatedFolder | TrainingFolder


def sources_in(folder: Path, *, sites: bool | None = None) -> list[FolderSource]:
    """Return the runs in a folder: of a simulation or a training one, of a sweep its cells.

    Raises:
        ConfigError: the folder has no run.
    """
    if (folder / ROUNDS).exists():
        return [SimulatedFolder(folder, sites=sites)]
    if (folder / LOG).exists():
        return [TrainingFolder(folder)]
    cells = sorted(path.parent for path in folder.glob(f"*/{ROUNDS}"))
    if not cells:
        raise ConfigError(
            [f"{folder}: has no {ROUNDS} and no {LOG}; allowed: a folder of `atoll simulate`, `train` or `sweep`"]
        )
    return [SimulatedFolder(cell, group=folder.absolute().name, sites=sites) for cell in cells]


def _decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key == NOISE_COHORT or not key.startswith(MAY_DIFFER)}


def _begun(log: Path, seconds: float) -> float:
    """Return the instant at which a log's clock began: the time of its last change less the seconds in it."""
    try:
        return log.stat().st_mtime - seconds
    except FileNotFoundError:
        return 0.0


def _last(events: list[dict[str, Any]]) -> float:
    return max((float(event.get("seconds") or 0.0) for event in events), default=0.0)
