"""The file of the peers: strict, atomic, never replaced by an empty one; and fingerprints as people write them."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.client.site.fingerprint_list import list_fingerprint, list_text, parse_list
from atoll.client.site.peers import FILE, Peers, PeersFault, PeersFile, fingerprint_of, parse_peers
from atoll.ground.strict_json import ManifestError
from atoll.protocol.secure.site_key import shown
from atoll.protocol.settings import ConfigError

OTHER = "0123456789abcdef" * 2
names = st.text("azAZ09", min_size=1, max_size=1).flatmap(
    lambda first: st.text("azAZ09._-", max_size=20).map(lambda rest: first + rest)
)
digits = st.binary(min_size=16, max_size=16).map(bytes.hex)
pins = st.dictionaries(names, digits, max_size=8).filter(lambda each: len({*each.values()}) == len(each))


@given(pins, st.frozensets(names, max_size=5))
def test_what_is_written_is_read(pinned: dict[str, str], distrusted: frozenset[str]) -> None:
    peers = Peers(pinned, distrusted - pinned.keys())
    assert parse_peers(peers.encode()) == peers


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not JSON"),
        ("[]", "an object"),
        ("{}", "is missing"),
        ('{"pinned": {}, "distrusted": [], "more": 1}', "more"),
        ('{"pinned": {}, "pinned": {}, "distrusted": []}', "twice"),
        ('{"pinned": [], "distrusted": []}', "an object"),
        ('{"pinned": {"a": 1}, "distrusted": []}', "pinned.a: got 1"),
        (f'{{"pinned": {{"a": "{OTHER.upper()}"}}, "distrusted": []}}', "lower-case"),
        (f'{{"pinned": {{"a": "{OTHER} "}}, "distrusted": []}}', "32"),
        (f'{{"pinned": {{"": "{OTHER}"}}, "distrusted": []}}', "names of clients"),
        (f'{{"pinned": {{"a": "{OTHER}", "b": "{OTHER}"}}, "distrusted": []}}', "a and b have one fingerprint"),
        (f'{{"pinned": {{"a": "{OTHER}"}}, "distrusted": ["a"]}}', "that are not pinned"),
        ('{"pinned": {}, "distrusted": [1]}', "names of clients"),
        ('{"pinned": {}, "distrusted": {}}', "a list"),
        ("[" * 100_000, "not JSON"),
        ('{"pinned": {"é": ""}, "distrusted": []}', "ASCII"),
    ],
)
def test_another_form_is_refused(content: str, said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        parse_peers(content.encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_peers_or_refused(content: bytes) -> None:
    try:
        peers = parse_peers(content)
    except ManifestError:
        return
    assert parse_peers(peers.encode()) == peers


@given(st.fixed_dictionaries({"pinned": json_values, "distrusted": json_values}))
def test_any_values_in_its_fields_are_peers_or_refused(document: dict[str, Any]) -> None:
    try:
        peers = parse_peers(json.dumps(document).encode())
    except ManifestError:
        return
    assert all(len(each) == 32 for each in peers.pinned.values())


@given(pins, st.integers(0, 400), st.integers(0, 7))
def test_a_flipped_bit_never_pins_another_number_of_digits(pinned: dict[str, str], at: int, bit: int) -> None:
    content = bytearray(Peers(pinned).encode())
    content[at % len(content)] ^= 1 << bit
    try:
        found = parse_peers(bytes(content))
    except ManifestError:
        return
    assert all(len(each) == 32 and not each.strip("0123456789abcdef") for each in found.pinned.values())


def test_a_missing_file_has_no_peers_and_a_change_makes_it(tmp_path: Path) -> None:
    file = PeersFile(tmp_path)
    assert file.read() == Peers()
    with file.changing() as change:
        pass
    assert not (tmp_path / FILE).exists(), "nothing changed"
    with file.changing() as change:
        change.peers = change.peers.trusting({"a": OTHER})
    assert file.read().pinned == PeersFile(tmp_path).read().pinned == {"a": OTHER}
    assert sorted(os.listdir(tmp_path)) == [FILE, "peers.lock"]


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    file = PeersFile(tmp_path)
    with file.changing() as change:
        change.peers = change.peers.trusting({"a": OTHER})
    with pytest.raises(PeersFault, match="one fingerprint"), file.changing() as change:
        change.peers = change.peers.distrusting("a").trusting({"b": OTHER}).trusting({"c": OTHER})
    assert file.read().pinned == {"a": OTHER}


def test_two_commands_at_once_lose_neither_change(tmp_path: Path) -> None:
    def trusts(number: int) -> None:
        with PeersFile(tmp_path).changing() as change:
            change.peers = change.peers.trusting({f"site-{number}": f"{number:032x}"})

    threads = [threading.Thread(target=trusts, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(PeersFile(tmp_path).read().pinned) == 8


def test_an_unreadable_file_says_so_until_it_can_be_read(tmp_path: Path) -> None:
    file = PeersFile(tmp_path)
    (tmp_path / FILE).mkdir()
    assert "is a directory" in file.fault
    (tmp_path / FILE).rmdir()
    assert file.fault == ""
    (tmp_path / FILE).write_bytes(b"\xff\xfe")
    assert f"{tmp_path / FILE}: peers: not JSON in ASCII" in file.fault
    (tmp_path / FILE).write_bytes(Peers({"a": OTHER}).encode())
    assert file.read().pinned == {"a": OTHER}


# ------------------------------------------------------------ fingerprints and lists


@given(digits, st.data())
def test_a_fingerprint_may_be_written_with_any_spaces_in_either_case(text: str, data: st.DataObject) -> None:
    spaced = "".join(each + data.draw(st.sampled_from(["", " ", "  ", "\t"])) for each in text)
    assert fingerprint_of(data.draw(st.sampled_from([spaced, spaced.upper(), shown(text)]))) == text


@given(st.text(max_size=50))
def test_any_text_is_a_fingerprint_or_refused(text: str) -> None:
    said = ""
    try:
        assert len(fingerprint_of(text)) == 32
    except ValueError as error:
        said = str(error)
    assert not said or "allowed: 32 hexadecimal digits" in said


@given(pins.filter(bool), st.randoms(use_true_random=False))
def test_a_list_is_read_as_written_and_its_fingerprint_is_of_its_sites_alone(pinned: dict[str, str], draw: Any) -> None:
    found = parse_list(list_text(pinned).encode(), "list")
    assert found == pinned
    lines = [f"\t{name}   {each.upper()}  # said on Monday" for name, each in pinned.items()]
    draw.shuffle(lines)
    again = parse_list("\r\n".join(lines).encode("utf-8-sig"), "list")
    assert list_fingerprint(again) == list_fingerprint(pinned)
    name = min(pinned)
    assert list_fingerprint({**pinned, name: pinned[name][::-1] + "x"}) != list_fingerprint(pinned)


def test_the_fingerprint_of_a_list_is_sha_256_of_its_lines() -> None:
    """Oracle: printf 'a 00..00\\nb 01..01\\n' | sha256sum."""
    listed = {"b": "01" * 16, "a": "00" * 16}
    import hashlib

    text = "a " + "0" * 32 + "\nb " + "01" * 16 + "\n"
    assert list_fingerprint(listed) == hashlib.sha256(text.encode()).hexdigest()[:32]


@given(st.binary(max_size=300))
def test_any_bytes_are_a_list_or_refused(content: bytes) -> None:
    found, faults = {}, []
    try:
        found = parse_list(content, "list")
    except ConfigError as error:
        faults = [*error.faults]
    assert bool(found) != bool(faults)
    assert all(fault.startswith("list: ") for fault in faults)


def test_a_list_of_a_million_bytes_is_refused_unread() -> None:
    with pytest.raises(ConfigError, match="allowed: at most"):
        parse_list(b"x" * (2**20 + 1), "list")
