"""Pages of what other machines and interrupted programs have written: no fault, no unescaped text, and JSON for all."""

import json
import os
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from atoll.protocol.vocabulary import Version
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch, EvaluationRow
from atoll.server.journal.state_directory import StateDirectory
from benchmarks.pages import crawled
from tests.dashboard.conftest import HOSTILE, simulate
from tests.dashboard.test_control import Browser
from tests.server.views.test_history import IN_ROUND_4, write_history

NUMBERS = (float("nan"), float("inf"), -float("inf"), None, 1e308, -1e308, 5e-324, 0.5)
NO_FOLDER = HOSTILE.replace("\0", "").replace("/", "|")

DAMAGED: dict[str, Callable[[Path], object]] = {
    "toml": lambda folder: (folder / "run.toml").write_text('name = "si'),
    "no toml": lambda folder: (folder / "run.toml").unlink(),
    "empty toml": lambda folder: (folder / "run.toml").write_text(""),
    "bytes": lambda folder: (folder / "run.toml").write_bytes(b"\xff\0"),
    "result": lambda folder: (folder / "result.json").write_text('{"state": "fini'),
    "list": lambda folder: (folder / "result.json").write_text("[]"),
    "odd result": lambda folder: (folder / "result.json").write_text('{"state": [1], "cause": {"a": 1}}'),
    "population": lambda folder: (folder / "population.json").write_text("{"),
    "letter": lambda folder: appended(folder, '{"round": 2, "why": "é'.encode()[:-1]),
    "line": lambda folder: appended(folder, b"\n[1]\n{}\n"),
    "deep": lambda folder: appended(folder, b"\n" + b"[" * 100_000 + b"\n"),
    "empty": lambda folder: (folder / "rounds.jsonl").write_text(""),
    "gone": lambda folder: (folder / "rounds.jsonl").unlink(),
    "sums": lambda folder: (folder / "SHA256SUMS").write_text("x"),
    "pipe": lambda folder: ((folder / "rounds.jsonl").unlink(), os.mkfifo(folder / "rounds.jsonl")),
    NO_FOLDER: lambda folder: None,
}
"""Folders of simulations by name, and what was done to each."""


def appended(folder: Path, content: bytes) -> None:
    """Put another line in the place of one that is being written."""
    whole = (folder / "rounds.jsonl").read_bytes().rpartition(b"\n")[0]
    (folder / "rounds.jsonl").write_bytes(whole + content)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """A browser of a coordinator with 200 hostile metrics of each source, and of damaged simulations."""
    folder = tmp_path_factory.mktemp("hostile")
    with StateDirectory.open(folder / "state") as state:
        write_history(state, IN_ROUND_4)
        sources = ("server", "clients", "site:a", f"site:{HOSTILE}", f"training:{HOSTILE}")
        Journal(state).commit(Batch(evaluations=[evaluation(version, of) for version in (1, 2) for of in sources]))
    for name, damage in DAMAGED.items():
        simulate(folder / "results" / name, 1)
        damage(folder / "results" / name)
    wide = {f"{HOSTILE}-{number}": NUMBERS[number % len(NUMBERS)] for number in range(200)}
    simulate(folder / "results" / "wide", 2, server=wide, clients=wide)
    return Browser([str(folder / "state"), str(folder / "results")], is_controlled=True).client


def evaluation(version: int, source: str) -> EvaluationRow:
    values = {f"{HOSTILE}-{number}": NUMBERS[(number + version) % len(NUMBERS)] for number in range(200)}
    sums = {name: (0.0, 1.0) for name in values}
    return EvaluationRow("r", Version(version), source, sums, 1, HOSTILE, 1.0, values)  # type: ignore[arg-type]


def no_number(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def checked(client: TestClient, address: str) -> str:
    """Return a page, after a look at it and at its JSON."""
    answer = client.get(address)
    assert answer.status_code in (200, 404), address
    shown = unescape(re.sub("<[^>]*>", "", answer.text))
    assert not re.search("[\0\u202e\x1b]", shown), address
    assert "<script>alert" not in answer.text
    assert len(answer.content) < 1_000_000
    path, mark, query = address.partition("?")
    beside = client.get(("/runs" if path == "/" else path) + ".json" + mark + query)
    assert beside.status_code in (200, 404), address
    if beside.headers["content-type"] == "application/json":
        json.loads(beside.text, parse_constant=no_number)
    return answer.text


def test_every_page_of_hostile_names_and_numbers_is_sound(client: TestClient) -> None:
    found = crawled(lambda address: checked(client, address).encode())
    assert len(found) > 20
    for name in ("a", HOSTILE):
        checked(client, f"/runs/1/r/site?{urlencode({'name': name})}")
    page = checked(client, "/runs/1/r")
    assert "metrics left out" in page, "200 metrics are more than a page draws"


@pytest.mark.parametrize("name", [*DAMAGED, "wide"])
def test_a_damaged_simulation_says_so_and_hides_no_other(client: TestClient, name: str) -> None:
    rows: dict[str, Any] = {row["run"]: row for place in client.get("/runs.json").json() for row in place["runs"]}
    assert {"r", "wide", NO_FOLDER} <= set(rows)
    if name in ("gone", "pipe"):
        assert name not in rows
        return
    whole = ("no toml", "empty toml", "odd result", "letter", "empty", NO_FOLDER, "wide")
    assert (rows[name]["state"] == "unreadable") == (name not in whole), rows[name]
    segment = urlencode({"": name}).removeprefix("=").replace("+", "%20")
    for page in ("", "/rounds", "/rounds/1"):
        checked(client, f"/runs/2/{segment}{page}")
    for over in ("round", "bytes", "seconds"):
        runs = [("run", "2/wide"), ("run", f"2/{name}"), ("run", "1/r"), ("over", over)]
        checked(client, f"/compare?{urlencode(runs)}")
