"""The page that a caller asks for: what it may hold, and the sentence for each fault."""

import pytest

from atoll.protocol.paging import ALL, Paging
from atoll.protocol.vocabulary import Fate


@pytest.mark.parametrize(
    ("view", "paging"),
    [
        ("rounds", ALL),
        ("run", Paging(whole=True)),
        ("rounds", Paging(1)),
        ("rounds", Paging(1000, "17", last=True, state="committed", fate="lost", client="site", text="x")),
        ("clients", Paging(1000, "site", state="away", prefix="s", text="x")),
        ("versions", Paging(5, "0")),
    ],
)
def test_a_sound_page_has_no_fault(view: str, paging: Paging) -> None:
    assert [*paging.faults(view)] == []


@pytest.mark.parametrize(
    ("view", "paging", "faults"),
    [
        ("rounds", Paging(0), ["count: got 0; allowed: 1 to 1,000"]),
        ("rounds", Paging(1001), ["count: got 1001; allowed: 1 to 1,000"]),
        ("rounds", Paging(after="3"), ["a cursor or a filter needs a count; allowed: 1 to 1,000"]),
        ("clients", Paging(state="away"), ["a cursor or a filter needs a count; allowed: 1 to 1,000"]),
        ("runs", Paging(5), ["the view 'runs' is not read by pages; allowed: rounds, clients, versions"]),
        ("rounds", Paging(5, "three"), ["after: got 'three'; allowed: the number of a row, 0 to 2147483647"]),
        ("rounds", Paging(5, "-1"), ["after: got '-1'; allowed: the number of a row, 0 to 2147483647"]),
        ("rounds", Paging(5, "\u0663"), ["after: got '\u0663'; allowed: the number of a row, 0 to 2147483647"]),
        (
            "versions",
            Paging(5, "9" * 5000),
            [
                f"after: got '{'9' * 256}'; allowed: the number of a row, 0 to 2147483647",
                "after has 5000 characters; allowed: at most 256",
            ],
        ),
        (
            "clients",
            Paging(5, last=True),
            ["last: clients are listed by name; name the one after which the page begins"],
        ),
        (
            "clients",
            Paging(5, fate="lost"),
            ["fate: the view 'clients' has no such filter; allowed: state, prefix, text"],
        ),
        ("clients", Paging(5, state="gone"), ["state: got 'gone'; allowed: connected, away, failed"]),
        ("versions", Paging(5, text="x"), ["text: the view 'versions' has no such filter; allowed: none"]),
        (
            "rounds",
            Paging(0, fate="sad"),
            [
                "count: got 0; allowed: 1 to 1,000",
                f"fate: got 'sad'; allowed: {', '.join(Fate)}",
            ],
        ),
    ],
)
def test_each_fault_is_a_sentence_with_what_is_allowed(view: str, paging: Paging, faults: list[str]) -> None:
    assert [*paging.faults(view)] == faults
