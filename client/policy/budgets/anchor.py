"""An agent's memory of the ledger of budgets that it has used: `budgets.json` in its state directory.

    {"count": 12, "hash": "...", "names": ["mri-2026"]}

A ledger without the entry of this number and hash was put back from an older copy, emptied or removed: it allows
nothing. The memory is written after the ledger and before the work that is charged; a longer ledger is no fault. Before
the first charge of an agent it is written, too: so one that is missing, although the ledger or the log of decisions has
a charge of this agent, was removed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from atoll.client.policy.budgets.entries import GENESIS
from atoll.ground.durable import write_atomically
from atoll.ground.folders import in_words
from atoll.ground.strict_json import (
    ManifestError,
    fields_of,
    integer,
    items_of,
    read_object,
    refuse,
    sha256_hex,
    text,
)

NAME = "budgets.json"
_BYTES_MAX = 1 << 20
_NAMES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Anchor:
    """The end of the ledger as this agent last saw it, and the names of its data sets."""

    count: int = 0
    hash: str = ""
    names: tuple[str, ...] = ()


def read_anchor(folder: Path) -> tuple[Anchor, str]:
    """Return an agent's memory of its ledger, and the sentence about a file that cannot be read; empty: it can.

    The memory is `Anchor()` if there is no file.
    """
    path = folder / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Anchor(), ""
    except OSError as error:
        return Anchor(), in_words(error)
    try:
        found = fields_of(
            read_object(content, num_bytes_max=_BYTES_MAX, what=NAME), NAME, keys=frozenset(("count", "hash", "names"))
        )
        count = integer(found["count"], f"{NAME}.count", low=0, high=2**63 - 1)
        names = [
            text(each, f"{NAME}.names", num_max=200) for each in items_of(found["names"], NAME, num_max=_NAMES_MAX)
        ]
        hash_ = sha256_hex(found["hash"], f"{NAME}.hash")
        if not count and (hash_ != GENESIS.hex() or names):  # else a smaller number would forget an emptied ledger
            refuse(f"{NAME}.count", count, "the number of the entry with this hash")
        return Anchor(count, hash_, tuple(names)), ""
    except ManifestError as error:
        return Anchor(), f"{path} has been changed: {error}"


def write_anchor(folder: Path, anchor: Anchor) -> None:
    """Make an agent's memory of its ledger durable.

    Raises:
        OSError: it cannot be written.
    """
    document = {"count": anchor.count, "hash": anchor.hash, "names": list(anchor.names)}
    write_atomically(folder / NAME, json.dumps(document, sort_keys=True).encode())
