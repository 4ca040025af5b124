"""The agent of a site, read from its state directory: what was asked of the site, and what it has decided."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.interface.arguments import check_whole, folder_of
from atoll.interface.errors import one_error
from atoll.interface.tables import Table
from atoll.operations import sites


class Agent:
    """A site's agent in its state directory, which may run. Each property is read at each use; nothing is written.

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
