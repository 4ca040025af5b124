"""Every block of every page is executed or checked, or the page says why not."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from atoll.client.site.security import JOINED, LEFT, OPENED, SIGNED
from atoll.ground.process.crash_points import STEPS as STEPS_OF_A_ROUND
from atoll.parallel.mesh_client.crash_points import STEPS
from atoll.protocol.audit.chain import LineFault, read_line
from atoll.server.audit.actions import Action
from atoll.simulations.devices.traces import read_availability, read_speeds
from tests.pages.blocks import EXAMPLES, PAGES, ROOT, Block, blocks_of, parse
from tests.pages.command_lines import commands_in, fault_of, setting_keys
from tests.pages.test_python import LANGUAGE as PYTHON
from tests.pages.test_sessions import is_of_a_session
from tests.pages.test_toml import LANGUAGE as TOML

BLOCKS = [block for page in (*PAGES, *EXAMPLES) for block in blocks_of(page)]
CHECKED = (PYTHON, TOML, "json", "csv", "sql", "yaml")


def undeclared(blocks: list[Block]) -> list[str]:
    """Return the blocks that nothing looks at, with file and line, and what to do."""
    return [
        f"{block.place}: nothing looks at this block: name its language, or write <!-- output --> or "
        "<!-- not run: REASON --> above it"
        for block in blocks
        if not (block.reason or block.language in CHECKED or is_of_a_session(block))
    ]


def test_every_block_is_looked_at_or_says_why_not() -> None:
    assert len(BLOCKS) > 100
    assert undeclared(BLOCKS) == []


def test_a_block_that_nothing_looks_at_is_named_with_its_line() -> None:
    page = "one\n\n```\na drawing\n```\n\n<!-- not run: a drawing -->\n```\na drawing\n```\n\n```rust\nfn\n```\n"
    assert [fault.partition(": ")[0] for fault in undeclared(parse("a.md", page))] == ["a.md:3", "a.md:12"]


def test_an_indented_block_of_commands_is_one_too() -> None:
    blocks = parse("a.md", "one\n\n    atoll run list\n    atoll run show 1\n\ntwo\n\n    x <- x + y\n")
    assert [(block.line, block.language, block.text) for block in blocks] == [
        (3, "bash", "atoll run list\natoll run show 1\n")
    ]


def test_a_reason_is_a_sentence() -> None:
    for block in BLOCKS:
        assert block.comment.startswith("not run: ") <= (len(block.reason.split()) > 2), block.place


# ---------------------------------------------------------------- commands


UNKNOWN = ("No such command", "No such option", "there is no setting")
"""The faults of a command that a sentence mentions, often without its arguments: `atoll run resume --set rounds=N`."""

NO_COMMANDS = {"atoll audit checkpoint"}
"""Spans that are no commands: the text under a checkpoint's signature."""


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES])
def test_the_command_line_takes_every_command_of_a_page(page: str) -> None:
    scripts = [block.text for block in blocks_of(page) if block.language == "bash"]
    assert [fault for script in scripts for words in commands_in(script) if (fault := fault_of(words))] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_command_line_knows_every_command_that_a_sentence_mentions(page: str) -> None:
    spans = re.findall(r"(?<!`)`(atoll [^`|]+)`(?!`)", (ROOT / page).read_text("utf-8"))
    whole = [" ".join(span.split()) for span in spans if "COMMAND" not in span]
    faults = [fault_of(words) for span in {*whole} - NO_COMMANDS for words in commands_in(span)]
    assert [fault for fault in faults if any(part in fault for part in UNKNOWN)] == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("atoll agent a.py:task --sight north", "No such option"),
        ("atoll rund list", "No such command 'rund'"),
        ("for site in a b; do atoll agent t.py:t --site $site --join $(atoll client invit x) & done", "'invit'"),
        ("atoll backup one", "Missing argument"),
        ("A=1 atoll coordinator run.toml --set round.moon=1 &", "there is no setting round.moon"),
        ("atoll round show three", "valid integer"),
    ],
)
def test_a_command_that_the_command_line_refuses_is_noticed(line: str, fault: str) -> None:
    faults = [fault_of(words) for words in commands_in(line)]
    assert any(fault in found for found in faults), faults


# ---------------------------------------------------------------- data and names


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=lambda b: b.place)
def test_a_line_of_json_is_one_of_the_audit_log(block: Block) -> None:
    written = block.text.replace("…", "0" * 60).encode()
    try:
        line = read_line(written)
    except LineFault as fault:
        pytest.fail(f"{block.place}: {fault}")
    assert line.event is not None
    assert json.loads(written)["seq"] > 0


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "csv"], ids=lambda b: b.place)
def test_a_csv_is_a_trace_of_devices(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(block.text)
    if "from_s" in block.text:
        assert read_availability(path, ["north", "south"])
    else:
        assert read_speeds(path, ["north", "south"], np.zeros(2))


NO_SETTINGS = {
    *map(str, Action),
    *(name for name, _ in STEPS),
    "train.allowed",
    "evaluate.waiting",
    "optimizer.inner",
    "privacy.key",
}
NO_SETTINGS |= {name for name, _ in STEPS_OF_A_ROUND}
NO_SETTINGS |= {JOINED, SIGNED, LEFT, OPENED}
"""Words with a dot that begin as a table of settings does: actions, steps of a rank, an attribute in Python, a file."""


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    tables = {key.partition(".")[0] for key in setting_keys() if "." in key}
    named = set(re.findall(rf"`((?:{'|'.join(tables)})\.[a-z_.]+)(?:`| = )", text))
    assert {
        name for name in named if not name.endswith((".json", ".jsonl", ".log", ".toml", ".safetensors", ".sh"))
    } - setting_keys() <= NO_SETTINGS
