"""What a site reads of privacy: terms that a coordinator sends, and its ledgers on disk, which may have been edited.

A target reads, and hands what it has read to the account that counts it.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

from atoll.client.policy.budgets.account import Accounts, in_words
from atoll.client.policy.budgets.anchor import NAME, read_anchor
from atoll.client.policy.budgets.charge import Charge, Work
from atoll.client.policy.budgets.entries import (
    GENESIS,
    Charged,
    Closed,
    Content,
    Entry,
    Left,
    Opened,
    read_entry,
    text_of,
)
from atoll.client.policy.budgets.terms import spending_of
from atoll.client.policy.config import DataBudget
from atoll.ground.strict_json import refuse
from atoll.parallel.private.account import FILE, Account
from atoll.protocol.privacy import loss_distribution
from atoll.protocol.privacy.composition import Steps, epsilon_bound, kinds_of
from atoll.protocol.secure.privacy_terms import PrivacyTerms, read_privacy

_BUDGET = DataBudget(name="mri", tasks=["mri:*"], epsilon_max=8.0, delta=1e-6, unit="example")
_WORK = Work("f" * 32, "localhost:7070", "digits-1", 3, "mri:task")
_CHARGE = Charge("example", (Steps(1.5, 0.04, 15), Steps(4.0, 1.0, 1)), "site", "a" * 64)
_OPENED = Opened(8.0, 1e-6, "example")
_CONTENTS: tuple[tuple[str, Content], ...] = (
    ("opened", _OPENED),
    ("charged", Charged(1.5, _WORK, _CHARGE)),
    ("left", Left(2.5, 2, "ab" * 32)),
    ("closed", Closed(3.5)),
)
ROWS = [f"{kind}\0mri\0{text_of(content)}".encode() for kind, content in _CONTENTS]

TERMS = [
    json.dumps({f"privacy.{name}": value for name, value in terms.items()} | local).encode()
    for terms, local in (
        (
            {"unit": "example", "sample_rate": 0.04, "noise_multiplier": 1.5, "clip_norm": 1.0},
            {"epochs": {"kind": "linear", "end": 2, "rounds": 9}, "max_steps": 15},
        ),
        ({"unit": "client", "noise_by": "coordinator", "noise_multiplier": 4.0, "clip_norm": 1.0}, {"epochs": 1}),
    )
]
OF_SUMS = [
    PrivacyTerms("client", by, 8.0, 1e-6, 1.2, 10, 12, *honest).text().encode()
    for by, honest in (("clients", (8, 1)), ("coordinator", (0, 0)))
]
_MECHANISM = {"sample_rate": 0.04, "noise_multiplier": 1.5}
STEPS = [json.dumps({"steps": 30, "at": 15, "most": 20, "repeats": 1, "mechanism": _MECHANISM}).encode()]
ANCHORS = [
    json.dumps({"count": 12, "hash": "ab" * 32, "names": ["mri"]}).encode(),
    json.dumps({"count": 0, "hash": GENESIS.hex(), "names": []}).encode(),
]


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder of this process: one for each input takes twenty times as long as its parser."""
    return tempfile.TemporaryDirectory(prefix="atoll-fuzz-")


@contextmanager
def _folder_with(name: str, data: bytes) -> Iterator[Path]:
    """Yield a folder that has one file."""
    path = Path(_folder().name) / name
    path.write_bytes(data)
    try:
        yield path.parent
    finally:
        path.unlink()


def row(data: bytes) -> None:
    """Read a row of a site's ledger, and count it after the first charge of its name."""
    kind, _, rest = data.decode("utf-8", "surrogateescape").partition("\0")
    name, _, text = rest.partition("\0")
    entry = read_entry(kind, name, text)
    assert text_of(entry.content) == text
    first = Entry(entry.data, Charged(1.0, _WORK, _CHARGE))
    accounts = Accounts([Entry(entry.data, _OPENED), first, entry])
    account = accounts.account(entry.data)
    with patch.object(loss_distribution, "is_installed", return_value=False):
        spent = account.spent(_BUDGET)
        account.objection(_BUDGET, _CHARGE)
        in_words(first, account, _BUDGET)
    assert not math.isnan(spent)
    alone = epsilon_bound(kinds_of(_CHARGE.steps), _BUDGET.delta)
    assert spent >= alone * (1.0 - 1e-9), "a row has refunded a charge"


def terms(data: bytes) -> None:
    """Read the terms of a training, and count what it spends."""
    spending = spending_of(data.decode("utf-8", "surrogateescape"))
    assert all(0.0 < part.sample_rate <= 1.0 and part.steps >= 1 for part in spending.steps)
    assert epsilon_bound(kinds_of(spending.steps), 1e-6) > 0.0


def of_sum(data: bytes) -> None:
    """Read the privacy of a sum's terms, of which there is one form."""
    text = data.decode("ascii", "replace")
    found = read_privacy(text)
    if found is None:
        refuse("terms.privacy", text, "a guarantee")
    assert found is not None
    assert found.text() == text
    assert (found.sum_min >= 1) == (found.noise_by == "clients")


def steps(data: bytes) -> None:
    """Read the account of a private training."""
    with _folder_with(FILE, data) as folder:
        account = Account(folder, _MECHANISM)
    assert account.steps >= 0
    assert account.repeats >= 0


def anchor(data: bytes) -> None:
    """Read an agent's memory of its ledger; what is not one allows nothing."""
    with _folder_with(NAME, data) as folder:
        found, fault = read_anchor(folder)
    if fault:
        assert found.count == 0
        refuse(NAME, fault, "a memory")
    assert found.count >= 1 or (found.hash, found.names) == (GENESIS.hex(), ()), "of an emptied ledger"
