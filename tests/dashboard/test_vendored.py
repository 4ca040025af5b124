"""The files of other projects: named with version, licence and digest, and unchanged."""

import hashlib
import re

from atoll.dashboard.app import HERE

STATIC = HERE / "static"
OURS = {"VENDORED.md", "atoll.css", "icon.svg", "live.js", "streams.js"}
ROW = re.compile(r"^\| `([^`]+)` \| .+ \| (\d[\d.]*) \| .+ \(`([^`]+)`\) \| `([0-9a-f]{64})` \|$", re.MULTILINE)


def test_every_vendored_file_is_named_and_unchanged() -> None:
    rows = ROW.findall((STATIC / "VENDORED.md").read_text("utf-8"))
    assert rows
    for name, _, licence, digest in rows:
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest, name
        assert "permission" in (STATIC / licence).read_text("utf-8").lower()
    named = {name for row in rows for name in (row[0], row[2])}
    assert {path.name for path in STATIC.iterdir()} == named | OURS


def test_no_script_evaluates_text() -> None:
    for path in STATIC.glob("*.js"):
        assert not re.search(r"\beval\(|new Function\(", path.read_text("utf-8")), path.name
