"""`atoll.connect`: the runs of a coordinator, from its state directory or over the network."""

import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.interface.overrides import overrides_of
from atoll.interface.tables import Table, of_sites
from atoll.protocol.json_values import flat

if TYPE_CHECKING:
    from atoll.parallel.task.arrays import Arrays

Answer = TypeVar("Answer")


class Refused(ValueError):
    """A call that the coordinator, or the state directory, refuses; the message has all reasons."""


def connect(state: Path | str = "atoll-state", *, database: str = "") -> "Federation":
    """Return the federation of a coordinator.

    Args:
        state: the coordinator's state directory, read also while no process holds it. Where there is no such directory:
            the coordinator at which `atoll join` has enrolled this person (`ATOLL_IDENTITY` names another credential).
        database: the URL of the PostgreSQL database to read, instead of the one that the state directory names.

    Raises:
        Refused: there is neither such a directory nor a joined coordinator.
    """
    from atoll.cli.runs.elsewhere import is_elsewhere

    folder = Path(state)
    if not database and not folder.exists() and not _quietly(lambda: is_elsewhere(folder)):
        raise Refused(
            f"there is no state directory {folder}, and `atoll join` has enrolled nobody here: name the directory of "
            "the coordinator, or join it"
        )
    return Federation(folder, database)


class Federation:
    """The runs and the members of a coordinator; `connect` returns one."""

    def __init__(self, state: Path, database: str = "") -> None:
        self._state, self._database = state, database

    @property
    def runs(self) -> Table:
        """All runs, the newest last: state, version, cause."""
        return Table(self._view("runs"))

    def run(self, name: str = "") -> "DeployedRun":
        """Return a run by its id or name; without one the newest.

        Raises:
            Refused: there is no such run; the message says which there are.
        """
        found = self._view("runs") if not name else [self._view("run", run=name)["document"]]
        if not found:
            raise Refused(f"{self._state} has no run yet")
        return DeployedRun(self, str(found[-1]["run"]))

    def start(self, what: Path | str, *, set: Mapping[str, Any] | None = None) -> "DeployedRun":
        """Start a run, as `atoll run start` does.

        Args:
            what: a run's TOML, or a task's reference; on the coordinator's machine.
            set: settings by their keys.

        Raises:
            ConfigError: the settings have faults; with all of them.
            Refused: the coordinator refuses the run, or none answers.
        """
        from atoll.cli.files import load_run
        from atoll.cli.runs import admin
        from atoll.cli.runs.elsewhere import is_elsewhere
        from atoll.protocol.settings import effective

        file = load_run(str(what), overrides_of(set or {}), is_elsewhere=lambda _: is_elsewhere(self._state))
        reply = _quietly(lambda: admin.start(self._state, effective(file.run)))
        return DeployedRun(self, reply.run_id)

    def statistics(
        self, what: Path | str = "", *, set: Mapping[str, Any] | None = None, deadline: float = 300.0, number: int = 0
    ) -> Mapping[str, Any]:
        """Return statistics of the sites' data, as `atoll run statistics --json` does.

        Args:
            what: the TOML of a planned run, or a task's reference: its connected sites are asked. Empty: no site is
                asked, and a kept result is returned.
            set: settings by their keys, of a request.
            deadline: seconds in which sites may answer.
            number: the kept result; 0: the newest.

        Raises:
            ConfigError: the settings have faults; with all of them.
            Refused: no site can be asked, there is no such result, or no coordinator answers.
        """
        from atoll.cli.files import load_run
        from atoll.cli.runs import admin
        from atoll.cli.runs.elsewhere import is_elsewhere
        from atoll.protocol.settings import effective

        if what:
            file = load_run(str(what), overrides_of(set or {}), is_elsewhere=lambda _: is_elsewhere(self._state))
            number = _quietly(lambda: admin.collect_statistics(self._state, effective(file.run), deadline))
        found: Mapping[str, Any] = self._view("statistics", number=number)
        return found

    def invite(self, name: str, *, role: str = "client", hours: float = 24.0) -> str:
        """Return a join code, which makes its bearer a member under this name, once; errors as `start`."""
        from atoll.cli.runs import admin
        from atoll.protocol.identity.names import Role

        if role not in [str(each) for each in Role]:
            raise Refused(f"role: got {role!r}; allowed: {', '.join(map(str, Role))}")
        reply = _quietly(lambda: admin.invite(self._state, Role(role), name, hours * 3600))
        return str(reply.join_code)

    def _view(self, view: str, *, run: str = "", number: int = 0) -> Any:
        from atoll.cli.runs.views import read_view

        return _quietly(lambda: read_view(view, self._state, self._database, run=run, number=number))

    def __repr__(self) -> str:
        return f"Federation({str(self._state)!r})"

    def _repr_html_(self) -> str:
        return self.runs._repr_html_()


class DeployedRun:
    """A run of a coordinator; `Federation.run` returns one. Each property is read anew."""

    def __init__(self, federation: Federation, run_id: str) -> None:
        self._federation, self.run_id = federation, run_id

    @property
    def document(self) -> Mapping[str, Any]:
        """All of the run but its settings, as `atoll run show --json`."""
        found: Mapping[str, Any] = self._view("run")["document"]
        return found

    @property
    def state(self) -> str:
        """The state of the run, such as running, paused, finished."""
        return str(self.document["state"])

    @property
    def cause(self) -> str:
        """The cause of its state."""
        return str(self.document["cause"])

    @property
    def version(self) -> int:
        """The version of the global model."""
        return int(self.document["version"])

    @property
    def settings(self) -> str:
        """The settings of the run, as TOML."""
        return str(self._view("run")["toml"])

    @property
    def rounds(self) -> Table:
        """The rounds, a row each."""
        return Table(self._view("rounds")["rows"])

    @property
    def versions(self) -> Table:
        """The versions, a row each, with metrics by `metrics.clients.accuracy` and alike."""
        return Table([flat(row) for row in self._view("versions")["rows"]])

    @property
    def clients(self) -> Table:
        """The clients, a row each: connected, invited, used, the last failure."""
        return Table([flat(row) for row in self._view("clients")["rows"]])

    @property
    def sites(self) -> Table:
        """The metrics of each site by its evaluations, as far as its policy lets them leave."""
        return of_sites(self._view("sites")["evaluation"])

    def round(self, number: int = 0) -> "DeployedRound":
        """Return a round; without a number the newest."""
        return DeployedRound(self._view("round", number=number))

    def model(self, version: int | str = "newest") -> "Arrays":
        """Return the tensors of a version by name: of its number, of the `newest`, or of the `best` one.

        Raises:
            Refused: the version is not kept, or damaged.
        """
        from atoll.aggregation.tensors import safetensors_file

        with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
            path = Path(folder) / "model.safetensors"
            _quietly(lambda: self._export(version, path))
            return safetensors_file.read(path)

    def _export(self, version: int | str, out: Path) -> None:
        from atoll.cli.runs import model_export

        number = None
        if version == "best":
            number = model_export.best_version(self._view("versions"))
        elif version != "newest":
            number = int(version)
        federation = self._federation
        model_export.export(federation._state, self.run_id, number, out, database=federation._database)

    def pause(self, reason: str = "") -> None:
        """Pause the run before its next round; errors as `Federation.start`."""
        from atoll.cli.runs import admin

        _quietly(lambda: admin.pause(self._federation._state, self.run_id, reason))

    def stop(self, reason: str = "") -> None:
        """Stop the run, for a reason that its record keeps; errors as `Federation.start`."""
        from atoll.cli.runs import admin

        _quietly(lambda: admin.stop(self._federation._state, self.run_id, reason))

    def resume(self, *, rounds: int | None = None, set: Mapping[str, Any] | None = None) -> None:
        """Continue a paused run, or reopen an ended one; errors as `Federation.start`.

        Args:
            rounds: the rounds of the run from now on; None: as before.
            set: other settings that change from the next round on.
        """
        from atoll.cli.runs import admin

        settings = {**({} if rounds is None else {"rounds": rounds}), **(set or {})}
        _quietly(lambda: admin.resume(self._federation._state, self.run_id, overrides_of(settings)))

    def _view(self, view: str, *, number: int = 0) -> Any:
        return self._federation._view(view, run=self.run_id, number=number)

    def __repr__(self) -> str:
        return f"DeployedRun({self.run_id!r})"

    def _repr_html_(self) -> str:
        found = self.document
        cause = f": {found['cause']}" if found["cause"] else ""
        title = f"<p>{self.run_id} is {found['state']}{cause}; version {found['version']} of {found['rounds']}</p>"
        return title + self.rounds[-10:]._repr_html_()


class DeployedRound:
    """A round of a run.

    Args:
        record: as `atoll round show --json`.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = record

    @property
    def sentences(self) -> list[str]:
        """The round in sentences: a decision and its reason each."""
        return list(self.record["sentences"])

    @property
    def clients(self) -> Table:
        """The invited clients, a row each."""
        return Table([{"client": name, **client} for name, client in sorted(self.record["clients"].items())])

    def __repr__(self) -> str:
        return f"DeployedRound({self.record['round_id']}, {self.record['phase']})"

    def _repr_html_(self) -> str:
        return "".join(f"<p>{sentence}</p>" for sentence in self.sentences)


def _quietly(call: Callable[[], Answer]) -> Answer:
    """Return the answer of a call that prints nothing, on a thread of its own: this one may run a loop of asyncio.

    Raises:
        Refused: the operator's mistakes that the call reports.
    """
    from atoll.cli.faults import CommandError
    from atoll.cli.printing import silent

    def answer() -> Answer:
        with silent():
            return call()

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(answer).result()
        except CommandError as error:
            raise Refused(str(error)) from error
