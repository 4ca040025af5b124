"""The agent of a site in its state directory: what was asked of the site, and what it has decided and decides."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.interface.arguments import check_text, check_whole, folder_of
from atoll.interface.errors import AtollError, one_error
from atoll.interface.tables import Table
from atoll.operations import sites
from atoll.operations.reporter import Reporter, reporting_to

STANDINGS = ("", "undecided", "approved", "rejected")
"""The standings that a run may have; empty: any."""


class Agent:
    """A site's agent in its state directory, which may run. Each property is read at each use.

    Nothing is written but by `approve` and `reject`.

    Args:
        folder: the state directory.

    Raises:
        AtollError: from every method, when the directory has no agent's state, or it cannot be read.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder_of("folder", folder)
        with one_error():
            sites.agent_folder(self.folder)

    @property
    def runs(self) -> Table:
        """The runs that have asked this site, with the decision on each, as `atoll site list --json`."""
        with one_error():
            return Table(sites.requests_at(self.folder, read_only=True))

    def request(self, run_id: str) -> Mapping[str, Any]:
        """Return one of `runs`.

        Raises:
            AtollError: it has not asked.
        """
        for row in self.runs:
            if row["run"] == run_id:
                return row
        raise AtollError(f"run {run_id!r} has not asked here, or was forgotten")

    def approve(self, run_id: str, *, terms: str = "", seen: str = "", by: str = "") -> str:
        """Approve a run that has asked, as `atoll site approve` does, and return the decision as a sentence.

        Args:
            run_id: its id.
            terms: the `terms` of its row, which alone are approved; empty: any.
            seen: the `standing` of its row, which alone is changed; empty: any.
            by: the person for whom this process decides, for the log of decisions; empty: its user.

        Raises:
            AtollError: the run has not asked, asks on other terms, or was decided about since.
        """
        return self._decided(run_id, "approved", terms, seen, by)

    def reject(self, run_id: str, *, seen: str = "", by: str = "") -> str:
        """Reject a run that has asked, whatever its terms, as `atoll site reject` does; otherwise as `approve`."""
        return self._decided(run_id, "rejected", "", seen, by)

    def _decided(self, run_id: str, standing: str, terms: str, seen: str, by: str) -> str:
        for name, value in {"run_id": run_id, "terms": terms, "seen": seen, "by": by}.items():
            check_text(name, value)
        if seen not in STANDINGS:
            raise AtollError(f"seen: got {seen!r}; allowed: {', '.join(STANDINGS[1:])}")
        notes = list[str]()
        with one_error(), reporting_to(Reporter(notes.append)), sites.opened_requests(self.folder) as history:
            found = sites.decide(history, run_id, standing, terms=terms, seen=seen, by=by)
        return "; ".join([sites.decision_in_words(found), *notes])

    @property
    def peers(self) -> Table:
        """The sites that are pinned or distrusted here, as `atoll site peers --json`."""
        with one_error():
            return Table(sites.peers_at(self.folder, read_only=True))

    @property
    def spool(self) -> Table:
        """The finished updates that wait for the coordinator's answer: run, round, num_bytes, is_masked, at."""
        with one_error():
            return Table(sites.spool_at(self.folder))

    @property
    def alerts(self) -> Table:
        """The conditions that the agent reports (`[notify]`), as far as they last; or that no agent runs."""
        with one_error():
            return Table(sites.conditions_at(self.folder))

    def budgets(self, policy: Path | str | None = None) -> Mapping[str, Any]:
        """Return the privacy budgets of this site's data, as `atoll site budgets --json`.

        Args:
            policy: the site's policy, with the budgets; None: those of the ledger.
        """
        with one_error():
            path = None if policy is None else folder_of("policy", policy)
            return sites.budgets_at(self.folder, path, read_only=True)

    def decisions(self, *, count: int = 20, action: str = "", actor: str = "", before: int = 0) -> Mapping[str, Any]:
        """Return the newest decisions with their rules, as `atoll audit show --json` of the files in `decisions`.

        Args:
            count: the largest number of lines.
            action: such as `train.refused`, or `train`; empty: any.
            actor: the run that has asked; empty: any.
            before: the number of the line before which they lie; 0: at the end.
        """
        from atoll.operations.audit import newest_events

        check_whole("count", count, 1)
        check_whole("before", before, 0, 2**53)
        with one_error(), sites.opened_decisions(self.folder) as source:
            return newest_events(source, count, action=action, actor=actor, before=before)

    def decisions_verdict(self) -> Mapping[str, Any]:
        """Verify the whole log of decisions; return the verdict, as `atoll audit verify --json` of its files."""
        from atoll.operations.audit import verified_log

        with one_error(), sites.opened_decisions(self.folder) as source:
            return verified_log(source)[1]

    def __repr__(self) -> str:
        return f"Agent({str(self.folder)!r})"
