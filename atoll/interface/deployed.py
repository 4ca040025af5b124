"""`atoll.connect`: the runs of a coordinator, from its state directory or over the network."""

import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.interface.arguments import check_between, check_text, check_whole, folder_of
from atoll.interface.errors import AtollError, number_of, one_error
from atoll.interface.following import Event, async_events, events
from atoll.interface.overrides import overrides_of, plain_of
from atoll.interface.tables import Page, Table, of_sites
from atoll.interface.tasks import reference_of
from atoll.operations.place import HERE, STATE, Named, acting_for, asking, is_elsewhere
from atoll.protocol.json_values import flat
from atoll.protocol.paging import ALL, COUNT_MAX, FILTERS, Paging
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

if TYPE_CHECKING:
    from atoll.operations.following import Ending
    from atoll.protocol.atoll_pb2 import RunReply
    from atoll.protocol.identity.names import Role
    from atoll.task.arrays import Arrays

Answer = TypeVar("Answer")

AWAY = 75
"""The code of an `AtollError` whose cause passes: a database or a coordinator is away."""


@one_error()
def connect(
    where: Path | str = "atoll-state", *, credential: Path | str | None = None, database: str = ""
) -> "Federation":
    """Return the federation of a coordinator.

    Args:
        where: the coordinator's state directory, read also while no process holds it; or its address `HOST:PORT`, asked
            with a credential. Where there is no such directory: the coordinator at which `atoll join` has enrolled this
            person.
        credential: the folder that `atoll join --identity` has made, for an address or for the address stored in it;
            None: this person's, which `ATOLL_IDENTITY` may name.
        database: the URL of the PostgreSQL database to read, instead of the one that the state directory names.

    Raises:
        AtollError: there is neither such a directory nor a joined coordinator, or no valid credential.
    """
    from atoll.operations.admin import credential_and_place
    from atoll.protocol.identity.join_code import is_address

    folder, address = folder_of("where", where), str(where) if is_address(str(where)) else ""
    if database or folder.exists():
        if credential is not None:
            raise AtollError(f"credential: got {str(credential)!r}, and {folder} is on this machine: leave it out")
        return Federation(folder, database, named=HERE)
    if address or (credential is not None and folder == STATE):
        named = Named(None if credential is None else Path(credential).expanduser(), address)
        with asking(named):
            credential_and_place()
        return Federation(folder, named=named)
    if credential is not None or not is_elsewhere(folder):
        raise AtollError(
            f"there is no state directory {folder}, and `atoll join` left no credential here: name the directory of "
            "the coordinator, or its address HOST:PORT and a credential, or join it"
        )
    return Federation(folder, named=Named())


def in_database(url: str) -> "Federation":
    """Return the federation of a coordinator that is read from its database, wherever its state directory is.

    Args:
        url: the URL of the PostgreSQL database.

    Raises:
        AtollError: it is no such URL.
    """
    from atoll.operations.views import checked_url
    from atoll.protocol.secrets import without_password

    with one_error():
        return Federation(Path(without_password(url)), checked_url(url, "place"), named=HERE)  # there is no such folder


class Federation:
    """The runs and the members of a coordinator; `connect` returns one."""

    def __init__(self, state: Path, database: str = "", *, named: Named | None = None, user: str = "") -> None:
        self._state, self._database, self._named, self._user = state, database, named, user

    def acting_for(self, user: str) -> "Federation":
        """Return the same federation, whose changes name a user in the audit log beside the caller, whose rights count.

        Args:
            user: the name; empty: none.
        """
        check_text("user", user)
        return Federation(self._state, self._database, named=self._named, user=user)

    @property
    def runs(self) -> Table:
        """All runs, the newest last: state, version, cause."""
        return Table(self._view("runs"))

    @property
    def members(self) -> Table:
        """The members with role, standing and the end of the certificate, as `atoll client members --json`."""
        from atoll.operations.members import members_of

        return Table(self._answer(lambda: members_of(self._state, self._database)))

    def known_run(self, run_id: str) -> "DeployedRun":
        """Return a run by its id, without asking whether there is one: what is read of it says so."""
        check_text("run_id", run_id)
        return DeployedRun(self, run_id)

    def run(self, name: str = "") -> "DeployedRun":
        """Return a run by its id or name; without one the newest.

        Raises:
            AtollError: there is no such run; the message says which there are.
        """
        check_text("name", name)
        found = self._view("runs") if not name else [self._view("run", run=name, paging=Paging(bare=True))["document"]]
        if not found:
            raise AtollError(f"{self._state} has no run yet")
        return DeployedRun(self, str(found[-1]["run"]))

    def start(self, what: Path | str | Task | ArrayTask, *, set: Mapping[str, Any] | None = None) -> "DeployedRun":
        """Start a run, as `atoll run start` does.

        Args:
            what: a run's TOML, a task in a file, or its reference. The file must be on the coordinator's machine.
            set: settings by their keys.

        Raises:
            AtollError: the settings have faults, the coordinator refuses the run, or none answers.
        """
        from atoll.operations.runs import start_run

        with one_error():
            what = str(what) if isinstance(what, Path | str) else reference_of(what)
            overrides = overrides_of(set)
        return DeployedRun(self, self._answer(lambda: start_run(what, self._state, overrides)).run_id)

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
            AtollError: the settings have faults, no site can be asked, there is no such result, or no coordinator
                answers.
        """
        from atoll.operations.runs import collect

        check_between("deadline", deadline, 0.1, 86_400)
        check_whole("number", number, 0)
        if what:
            with one_error():
                overrides = overrides_of(set)
            _, number = self._answer(lambda: collect(str(what), self._state, overrides, deadline))
        self._check_folder("results of statistics")
        found: Mapping[str, Any] = self._view("statistics", number=number)
        return found

    @property
    def alerts(self) -> Table:
        """The conditions that hold now, the critical ones first: condition, subject, run, level, sentence, docs.

        They are the rules of `docs/operations/rules.yml` on the coordinator's records, and what `[notify]` reports.
        """
        try:
            return Table(self._view("alerts"))
        except AtollError as error:
            if error.code != AWAY:
                raise
            row = {"condition": "AtollJournalAway", "subject": str(self._state), "run": "", "level": "critical"}
            return Table([row | {"sentence": " ".join(error.faults), "docs": "docs/monitoring.md#atolljournalaway"}])

    def audit(self, *, count: int = 20, action: str = "", actor: str = "", before: int = 0) -> Mapping[str, Any]:
        """Return the newest events of the audit log and its newest checkpoint, as `atoll audit show --json`.

        Args:
            count: the largest number of events.
            action: the action of the events, or a part of it up to a dot; empty: any.
            actor: the actor of the events; empty: any.
            before: the number of the line before which the events lie; 0: at the end.

        Raises:
            AtollError: there is no log, or the coordinator refuses.
        """
        from atoll.operations.audit import newest_events, opened_log

        check_whole("count", count, 1)
        check_whole("before", before, 0, 2**53)

        def read() -> Mapping[str, Any]:
            with opened_log(self._state) as source:
                return newest_events(source, count, action=action, actor=actor, before=before)

        self._check_folder("an audit log")
        return self._answer(read)

    def audit_verdict(self) -> Mapping[str, Any]:
        """Verify the whole audit log; return the verdict, as `atoll audit verify --json`; errors as `audit`."""
        from atoll.operations.audit import opened_log, verified_log

        def read() -> Mapping[str, Any]:
            with opened_log(self._state) as source:
                return verified_log(source)[1]

        self._check_folder("an audit log")
        return self._answer(read)

    def invite(self, name: str, *, role: str = "client", hours: float = 24.0) -> str:
        """Return a join code, which makes its bearer a member under this name, once; errors as `start`."""
        from atoll.operations import admin

        check_text("name", name)
        check_between("hours", hours, 0.001, 720)
        of = _role(role)
        reply = self._answer(lambda: admin.invite(self._state, of, name, hours * 3600))
        return str(reply.join_code)

    def revoke(self, name: str, *, role: str = "client") -> None:
        """Revoke a member: its certificates and join codes become invalid, its open calls end; errors as `start`."""
        from atoll.operations.members import revoke_member

        check_text("name", name)
        of = _role(role)
        self._answer(lambda: revoke_member(self._state, of, name))

    def _check_folder(self, what: str) -> None:
        """Check that the state directory, whose files have something, is known; raises AtollError."""
        if self._database and not self._state.exists():
            raise AtollError(
                f"a database does not have {what}: name its coordinator's state directory, or HOST:PORT of it"
            )

    def _view(self, view: str, *, run: str = "", number: int = 0, paging: Paging = ALL) -> Any:
        from atoll.operations.views import read_view

        place = (view, self._state, self._database)
        return self._answer(lambda: read_view(*place, run=run, number=number, paging=paging))

    def _answer(self, call: Callable[[], Answer]) -> Answer:
        """Return the answer of a call, on another thread: this one may run an asyncio loop."""

        def answer() -> Answer:
            with asking(self._named), acting_for(self._user):
                return call()

        with ThreadPoolExecutor(1) as thread, one_error():
            return thread.submit(answer).result()

    def __repr__(self) -> str:
        named = self._named or HERE
        found = named.address or str(named.folder or self._state)
        return f"Federation({found!r})"

    def _repr_html_(self) -> str:
        return self.runs._repr_html_()


def _role(role: str) -> "Role":
    """Check that there is such a role, and return it; raises AtollError."""
    from atoll.protocol.identity.names import Role

    if role not in [str(each) for each in Role]:
        raise AtollError(f"role: got {role!r}; allowed: {', '.join(map(str, Role))}")
    return Role(role)


class DeployedRun:
    """A run of a coordinator; `Federation.run` returns one. Each property is read again at each use."""

    def __init__(self, federation: Federation, run_id: str) -> None:
        self._federation, self.run_id = federation, run_id

    @property
    def document(self) -> Mapping[str, Any]:
        """All of the run but its settings, as `atoll run show --json`."""
        found: Mapping[str, Any] = self._view("run")["document"]
        return found

    @property
    def facts(self) -> Mapping[str, Any]:
        """`document` without the metrics, for which every evaluation is read."""
        found: Mapping[str, Any] = self._bare()["document"]
        return found

    def shown(self) -> tuple[Mapping[str, Any], str]:
        """Return `document` and `settings`, read once."""
        found = self._view("run")
        return found["document"], str(found["toml"])

    @property
    def state(self) -> str:
        """The state of the run, such as running, paused, finished."""
        return str(self.facts["state"])

    @property
    def cause(self) -> str:
        """The cause of its state."""
        return str(self.facts["cause"])

    @property
    def version(self) -> int:
        """The version of the global model."""
        return int(self.facts["version"])

    @property
    def settings(self) -> str:
        """The settings of the run, as TOML."""
        return str(self._bare()["toml"])

    @property
    def rounds(self) -> Table:
        """The rounds, a row each; of a run of messages its exchanges."""
        return Table(self._rows("rounds"))

    @property
    def versions(self) -> Table:
        """The versions, a row each, with metrics by `metrics.clients.accuracy` and the like."""
        return Table([flat(row) for row in self._rows("versions")])

    @property
    def clients(self) -> Table:
        """The clients, a row each: connected, invited, used, the last failure."""
        return Table([flat(row) for row in self._rows("clients")])

    def page(
        self, of: str, *, count: int = 100, after: str = "", last: bool = False, where: Mapping[str, str] | None = None
    ) -> Page:
        """Return a page of the `rounds`, `versions` or `clients` of the run, as the commands' `--json` has the rows.

        Args:
            of: the list.
            count: the largest number of rows, at most 1,000.
            after: the cursor; empty: from the first row, or with `last` from the newest.
            last: read from the newest row to older ones; the rows of a page are in the order of the list all the same.
            where: the filters: of rounds `state`, `fate`, `client` and `text`; of clients `state`, `prefix` and `text`.

        Raises:
            AtollError: there is no such list, run or filter.
        """
        from atoll.operations.views import read_pages

        check_whole("count", count, 1, COUNT_MAX)
        filters = dict(where or {})
        for name, value in {"after": after, **filters}.items():
            check_text(name, value)
        if of not in FILTERS:
            raise AtollError(f"page: got {of!r}; allowed: {', '.join(FILTERS)}")
        if unknown := sorted(filters.keys() - FILTERS[of]):
            raise AtollError(f"where: got {', '.join(unknown)}; allowed for {of}: {', '.join(FILTERS[of]) or 'none'}")
        state, fate, client, text, prefix = (
            filters.get(name, "") for name in ("state", "fate", "client", "text", "prefix")
        )
        at, paging = self._federation, Paging(count, after, last, state, fate, client, text, prefix)
        seen = at._answer(lambda: read_pages(of, at._state, at._database, run=self.run_id, paging=paging, most=count))
        return Page(seen["rows"], seen["next"])

    def fates(self, rounds: int = 24) -> Mapping[str, Any]:
        """Return the fates of the clients in the newest rounds: the `rounds`, and `clients` by name and round."""
        check_whole("rounds", rounds, 1, 300)
        found: Mapping[str, Any] = self._view("fates", number=rounds)
        return found

    def sums(self, rounds: int = 24) -> Table:
        """Return the secure sums of the newest rounds, a row each: stage, members, and how many have sent what."""
        check_whole("rounds", rounds, 1, 300)
        return Table(self._view("sums", number=rounds)["rows"])

    @property
    def site_metrics(self) -> Mapping[str, Any]:
        """The metrics and meshes of single sites, as `atoll run show --sites --json`."""
        found: Mapping[str, Any] = self._view("sites")
        return found

    @property
    def sites(self) -> Table:
        """The metrics of each site by its evaluations, as far as its policy lets them leave."""
        return of_sites(self._view("sites", paging=Paging(whole=True))["evaluation"])

    @property
    def privacy(self) -> Mapping[str, Any] | None:
        """The guarantee so far with its `sentence`, `epsilon` and `epsilon_max`; None: the run has no privacy."""
        found: Mapping[str, Any] | None = self.facts.get("privacy")
        return found

    def round(self, number: int = 0) -> "DeployedRound":
        """Return a round, or an exchange of a run of messages; without a number the newest."""
        check_whole("round", number, 0)
        return DeployedRound(self._view("round", number=number))

    def model(self, version: int | str = "newest") -> "Arrays":
        """Return the tensors of a version by name: of its number, of the `newest`, or of the `best` one.

        Raises:
            AtollError: the version is not kept, or damaged.
        """
        from atoll.tensors import safetensors_file

        with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
            path = Path(folder) / "model.safetensors"
            self._federation._answer(lambda: self._export(version, path))
            return safetensors_file.read(path)

    def _export(self, version: int | str, out: Path) -> None:
        from atoll.operations import model_export

        number = None
        if version == "best":
            number = model_export.best_version(self._view("versions"))
        elif version != "newest":
            number = number_of(version)
        federation = self._federation
        model_export.export(federation._state, self.run_id, number, out, database=federation._database)

    def plot(self, metric: str | None = None) -> Any:
        """Return a figure of matplotlib with a metric over the versions.

        Args:
            metric: `accuracy`, or with its source `server/accuracy`; None: the first one that is no loss.

        Raises:
            AtollError: matplotlib is not installed, or the run has not measured it.
        """
        from atoll.interface.figures import line, main_of, metric_of

        table, names = self.versions, self._metrics()
        chosen = metric_of(list(names), metric or main_of(list(names)))
        points = {row["version"]: row[names[chosen]] for row in table if row.get(names[chosen]) is not None}
        return line(points, chosen, "version")

    def _metrics(self) -> dict[str, str]:
        """Return the measured metrics, SOURCE/NAME, with their columns in `versions`; the server's first."""
        columns = [name for name in self.versions.columns if name.startswith("metrics.")]
        parts = {column: column.removeprefix("metrics.").partition(".") for column in columns}
        ordered = sorted(columns, key=lambda column: parts[column][0] != "server")
        return {f"{parts[column][0]}/{parts[column][2]}": column for column in ordered}

    def follow(self, *, after: int | None = None) -> Generator[Event]:
        """Yield the events of the run as they come, until it has ended; a coordinator that dies is waited for.

        Args:
            after: the entry after which to continue, an earlier `Event.seq`; 0: from the beginning; None: from the
                beginning of the open round.

        Raises:
            AtollError: there is no such run, or the coordinator refuses.
        """
        return events(lambda ending: self._items(after, ending))

    def afollow(self, *, after: int | None = None) -> AsyncGenerator[Event]:
        """Yield the events as `follow` does, for `async for`: the asyncio loop keeps running."""
        return async_events(lambda ending: self._items(after, ending))

    def _items(self, after: int | None, ending: "Ending") -> Generator[dict[str, Any]]:
        from atoll.operations.following import items

        federation = self._federation
        if after is not None:
            check_whole("after", after, 0, 2**53)
        with asking(federation._named):
            yield from items(self.run_id, federation._state, federation._database, after, ending=ending)

    def pause(self, reason: str = "") -> str:
        """Pause the run before its next round, and return its state as a sentence; errors as `Federation.start`."""
        from atoll.operations import admin

        check_text("reason", reason)
        return self._changed(lambda: admin.pause(self._federation._state, self.run_id, reason))

    def stop(self, reason: str = "") -> str:
        """Stop the run, for a reason that its record keeps; returns and raises as `pause`."""
        from atoll.operations import admin

        check_text("reason", reason)
        return self._changed(lambda: admin.stop(self._federation._state, self.run_id, reason))

    def resume(self, *, rounds: int | None = None, set: Mapping[str, Any] | None = None) -> str:
        """Continue a paused run, or reopen an ended one; returns and raises as `pause`.

        Args:
            rounds: the rounds of the run from now on; None: as before.
            set: other settings that change from the next round on.
        """
        from atoll.operations.runs import resume_run

        if rounds is not None:
            check_whole("rounds", rounds, 1)
        with one_error():
            overrides = overrides_of(set)
        state = self._federation._state
        return self._changed(lambda: resume_run(self.run_id, state, overrides, rounds=plain_of(rounds)))

    def statistics(self, *, deadline: float = 300.0) -> Mapping[str, Any]:
        """Ask the connected sites of the run's task for statistics of their data, by the settings of the run.

        Args:
            deadline: seconds in which sites may answer.

        Raises:
            AtollError: no site can be asked, or no coordinator answers.
        """
        from atoll.operations.runs import collect_again

        check_between("deadline", deadline, 0.1, 86_400)
        at = self._federation
        number = at._answer(lambda: collect_again(self.run_id, at._state, at._database, deadline))
        return at.statistics(number=number)

    def _changed(self, call: "Callable[[], RunReply]") -> str:
        """Return the answer to a change as a sentence."""
        from atoll.operations.runs import sentence_of

        return sentence_of(self._federation._answer(call))

    def _bare(self) -> Any:
        return self._view("run", paging=Paging(bare=True))

    def _view(self, view: str, *, number: int = 0, paging: Paging = ALL) -> Any:
        return self._federation._view(view, run=self.run_id, number=number, paging=paging)

    def _rows(self, view: str, *, paging: Paging = ALL, most: int | None = None) -> list[Mapping[str, Any]]:
        """Return rows of a view, read by pages."""
        from atoll.operations.views import read_pages

        federation = self._federation
        place = (view, federation._state, federation._database)
        found = federation._answer(lambda: read_pages(*place, run=self.run_id, paging=paging, most=most))
        rows: list[Mapping[str, Any]] = found["rows"]
        return rows

    def __repr__(self) -> str:
        return f"DeployedRun({self.run_id!r})"

    def _repr_html_(self) -> str:
        found = self.facts
        cause = f": {found['cause']}" if found["cause"] else ""
        exchanges = found.get("exchanges")
        at = f"version {found['version']} of {found['rounds']}" if exchanges is None else f"exchange {exchanges}"
        title = f"<p>{self.run_id} is {found['state']}{cause}; {at}</p>"
        return title + Table(self._rows("rounds", paging=Paging(last=True), most=10))._repr_html_()


class DeployedRound:
    """A round of a run, or an exchange of a run of messages.

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
        """The invited clients, a row each; of an exchange its messages."""
        if "messages" in self.record:
            return Table(self.record["messages"])
        return Table([{"client": name, **client} for name, client in sorted(self.record["clients"].items())])

    def __repr__(self) -> str:
        return f"DeployedRound({self.record['round_id']}, {self.record['phase']})"

    def _repr_html_(self) -> str:
        return "".join(f"<p>{sentence}</p>" for sentence in self.sentences)
