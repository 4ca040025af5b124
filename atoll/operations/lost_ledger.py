"""The acceptance of a lost ledger of a site's privacy budgets, in place of its agent."""

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.operations.faults import CommandError
from atoll.operations.local_audit import record_at_site

if TYPE_CHECKING:
    from atoll.client.policy.config import PrivacyPolicy


def privacy_of(policy: Path | None) -> "PrivacyPolicy | None":
    """Return the budgets of a policy file; None: there is no file.

    Raises:
        ConfigError: the file is not valid; all faults.
    """
    from atoll.client.policy.file import PolicyFile

    if policy is None:
        return None
    site = PolicyFile(policy).policy
    return None if site is None else site.privacy


def close_budgets(policy: Path | None, folder: Path) -> list[str]:
    """Begin a new ledger after a loss, in which all known names are closed; return those that are closed now.

    Args:
        policy: the site's policy, whose ledger and names are meant; None: the ledger of the state directory.
        folder: the agent's state directory.

    Raises:
        CommandError: the ledger cannot be used at all.
        ConfigError: the agent runs, or the policy is not valid.
    """
    from atoll.client.disk.state_directory import StateDirectory
    from atoll.client.policy.budgets.ledger import Ledger
    from atoll.client.policy.database import HistoryUnusable, PolicyDatabase

    of_site = privacy_of(policy)
    path = Path(of_site.ledger) if of_site is not None and of_site.ledger else folder
    names = [] if of_site is None else [budget.name for budget in of_site.data]
    with closing(StateDirectory(folder)):
        try:
            with closing(PolicyDatabase(path)) as database:
                closed = Ledger(database, folder).close_names(names, time.time())
        except HistoryUnusable as error:
            raise CommandError(str(error)) from None
    for name in closed:
        record_at_site(folder, "site.budget_closed", name, "its ledger was lost: all of its budget counts as spent")
    return closed
