"""The documentation is held against the code: everything with a name is explained, and nothing that is not there."""

import re
import tomllib
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from atoll.aggregation.optimizers import FedAdam
from atoll.aggregation.rules.coordinate import TrimmedMean
from atoll.cli.sections import Section, described
from atoll.client.session import events as client_events
from atoll.ground.process import crash_points
from atoll.parallel.mesh_client import crash_points as rank_crash_points
from atoll.protocol import vocabulary
from atoll.protocol.settings import load_text
from atoll.protocol.signals import ExitCode
from atoll.server.audit.actions import Action
from atoll.server.config.extensions import CUSTOM_RULE
from atoll.server.config.run import RunFile
from atoll.server.rounds import events as server_events
from atoll.server.rounds.events import (
    Aggregated,
    ClientJoined,
    CohortDrawn,
    DrawCohort,
    Effect,
    Event,
    RoundDue,
    RunStarted,
    TimePassed,
    Update,
    UpdateReceived,
    UploadBegun,
)
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.selection.oort import Oort
from atoll.task.local import Local
from atoll.tensors.codecs.chunks import encoded_bytes
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS
from atoll.tensors.codecs.names import parse_codec
from tests.server.rounds.test_buffer_round import Flow, buffered, invited
from tests.server.rounds.test_cohort_round import released
from tools import docs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {page: (DOCS / page).read_text("utf-8") for page in (*docs.PAGES, "audit.md", "running.md")}
ENUMS = [
    kind
    for kind in vars(vocabulary).values()
    if isinstance(kind, type) and issubclass(kind, StrEnum) and kind is not StrEnum
]


def undocumented(names: "list[str]", page: str) -> list[str]:
    """Those that are not explained as `name` in a row of a table."""
    explained = set(re.findall(r"^\| `([^`]+)` +\|", PAGES[page], re.MULTILINE))
    return [name for name in names if name not in explained]


def of_union(union: object) -> list[str]:
    return [kind.__name__ for kind in get_args(union)]


NAMED = {
    **{f"settings of {s}": ("configuration.md", [x.key for x in described(s)]) for s in Section},
    "events": ("protocol.md", of_union(server_events.Event)),
    "effects": ("protocol.md", of_union(server_events.Effect)),
    "client events": ("protocol.md", of_union(client_events.Event)),
    "client effects": ("protocol.md", of_union(client_events.Effect)),
    "crash steps": ("faults.md", [name for name, _ in crash_points.STEPS]),
    "crash steps of ranks": ("faults.md", [name for name, _ in rank_crash_points.STEPS]),
    "audit actions": ("audit.md", [str(action) for action in Action]),
    **{kind.__name__: ("protocol.md", [str(word) for word in kind]) for kind in ENUMS},
}


@pytest.mark.parametrize("what", NAMED)
def test_everything_with_a_name_is_explained(what: str) -> None:
    page, names = NAMED[what]
    assert names
    assert undocumented(names, page) == []


def test_the_check_bites() -> None:
    assert undocumented(["round.quorum", "round.moonphase"], "configuration.md") == ["round.moonphase"]
    assert undocumented(["ClientJoined", "ClientDrowned"], "protocol.md") == ["ClientDrowned"]
    assert undocumented(["not_finite", "not_nice"], "protocol.md") == ["not_nice"]


@pytest.mark.parametrize("kind", ENUMS)
def test_the_table_of_each_enumeration_has_its_words_and_no_others(kind: type[StrEnum]) -> None:
    table = re.search(rf"^`{kind.__name__}`,[^|]*((?:^\|.*\n)+)", PAGES["protocol.md"], re.MULTILINE)
    assert table is not None, f"protocol.md has no table of {kind.__name__}"
    assert re.findall(r"^\| `([^`]+)`", table[1], re.MULTILINE) == [str(word) for word in kind]


@pytest.mark.parametrize("page", docs.PAGES)
def test_the_generated_parts_are_up_to_date(page: str) -> None:
    assert docs.parts(PAGES[page])
    assert docs.render(PAGES[page]) == PAGES[page], "run `python -m tools.docs`"


def test_a_generated_part_that_was_edited_is_noticed() -> None:
    page = PAGES["faults.md"]
    edited = re.sub(r"(\| `upload\.before_check` \| ).*( \|)", r"\1nothing\2", page)
    assert edited != page
    assert docs.render(edited) == docs.render(page)


def examples() -> str:
    """The lines of the code blocks of the page of commands."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGES["commands.md"], re.MULTILINE | re.DOTALL)
    return "".join(blocks)


@pytest.mark.parametrize("command", [path for path, _ in docs.commands()])
def test_every_command_is_explained_with_an_example(command: str) -> None:
    assert PAGES["commands.md"].count(f"\n### `{command}`\n") == 1
    assert re.search(rf"^{command}( |$)", examples(), re.MULTILINE), f"no example of {command}"


def test_a_part_of_an_unknown_command_is_noticed() -> None:
    with pytest.raises(KeyError, match="dance"):
        docs.render("<!-- begin generated: command dance -->\n<!-- end generated -->")


def rows_of(command: str) -> dict[str, str]:
    """The default of each argument of a command, as the page has it."""
    section = PAGES["commands.md"].partition(f"\n### `{command}`\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| `(.+?)` \| (.+?) \|", section, re.MULTILINE))


def test_the_reference_of_a_command_has_its_arguments_options_and_defaults() -> None:
    assert rows_of("atoll audit show") == {
        "[FILE]...": "-",
        "--last N": "`20`",
        "--before SEQ": "`0`",
        "--action A": "-",
        "--actor NAME": "-",
        "--archive DIR": "-",
        "--state DIR": "`atoll-state`",
        "--json": "-",
    }
    assert rows_of("atoll client invite")["--role ROLE"] == "`client`"
    assert rows_of("atoll client invite")["NAME"] == "required"
    assert rows_of("atoll sweep")["--plot/--no-plot"] == "`--plot`"
    assert rows_of("atoll simulate")["--fresh/--resume"] == "-"


@pytest.mark.parametrize("command", [command for _, command in docs.commands()])
def test_every_command_and_option_has_a_help(command: object) -> None:
    assert len(command.help) > 20  # type: ignore[attr-defined]
    for parameter in command.params:  # type: ignore[attr-defined]
        assert parameter.name == "help" or len(parameter.help or "") > 10, parameter.name


def test_every_exit_code_is_explained() -> None:
    assert re.findall(r"^\| (\d+) \|", PAGES["running.md"], re.MULTILINE) == [str(code) for code in ExitCode]


def links(text: str) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))], ids=lambda path: path.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links(page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text("utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, target


# ---------------------------------------------------------------- the worked example


class Clocked:
    """The run's machine of the example, with ten clients, at the beginning of its first round."""

    def __init__(self, text: str) -> None:
        policy = load_text(RunFile, text, ["task=m:task"], name="example").round
        self.machine = RunMachine(RunRules(policy, rounds=9))
        self.clients = [vocabulary.ClientId(f"c{k}") for k in range(10)]
        self.at(0, RunStarted(vocabulary.Digest("d0")))
        for client in self.clients:
            self.at(0, ClientJoined(client, "s"))
        self.open_round(0)

    def at(self, now: float, event: Event) -> tuple[Effect, ...]:
        return self.machine.receive(event, now)

    def open_round(self, now: float) -> None:
        (draw,) = (e for e in self.at(now, RoundDue()) if isinstance(e, DrawCohort))
        self.at(now, CohortDrawn(draw.round_id, tuple(c.client_id for c in draw.candidates[: draw.count])))

    def reports(self, k: int, now: float, round_id: int = 1) -> None:
        base = vocabulary.Version(round_id - 1)
        digest = vocabulary.Digest(f"{round_id} {k} {now}")
        update = Update(self.clients[k], vocabulary.RoundId(round_id), base, digest, num_examples=10, work=1.0)
        self.at(now, UpdateReceived(update))

    @property
    def phase_and_reason(self) -> tuple[str, str]:
        record = self.machine.record_of(vocabulary.RoundId(1))
        assert record is not None
        return str(record.phase), str(record.abandon_reason or record.close_reason or "")

    def fates(self) -> list[str]:
        record = self.machine.record_of(vocabulary.RoundId(1))
        assert record is not None
        return [str(record.clients[client].fate) for client in self.clients]


def blocks_of(language: str) -> list[str]:
    """The code blocks of configuration.md."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES["configuration.md"], re.MULTILINE | re.DOTALL)


def test_the_example_of_an_aggregation_is_a_run_s_and_its_own_rule_is_taken(tmp_path: Path) -> None:
    [text] = [block for block in blocks_of("toml") if "norm_bound" in block]
    run = load_text(RunFile, f"task = 'm:t'\n{text}", [], name="the page").run
    assert isinstance(run.optimizer.build(), FedAdam)
    assert run.aggregation.norm_bound == "median"
    assert isinstance(run.aggregation.build(), TrimmedMean)
    (code,) = blocks_of("python")
    (tmp_path / "task.py").write_text(code)
    least = CUSTOM_RULE.load(f"{tmp_path}/task.py:least").reduce(np.array([[3.0, 1.0], [2.0, 5.0]], np.float32))
    assert least.tolist() == [2.0, 1.0]


def test_the_example_of_a_sampler_is_a_run_s_and_what_candidates_tell_is_complete() -> None:
    [text] = [block for block in blocks_of("toml") if "oort" in block]
    assert load_text(RunFile, f"task = 'm:t'\n{text}", [], name="the page").run.cohort.build() == Oort(
        exploration_min=0.1
    )
    sentence = PAGES["configuration.md"].partition("sees the same of each candidate:")[2].partition(".\n")[0]
    assert tuple(re.findall(r"`(\w+)`", sentence)) == server_events.Candidate._fields


def test_the_example_of_a_codec_is_a_run_s_and_the_table_of_bytes_is_true() -> None:
    [text] = [block for block in blocks_of("toml") if "codec" in block]
    assert load_text(RunFile, f"task = 'm:t'\n{text}", [], name="the page").run.aggregation.codec_name == "topk:0.01"
    rows = re.findall(r"^\| `(bf16|fp16|qsgd8|sign)` \|[^|]*\| ([0-9,]+) \|", PAGES["configuration.md"], re.MULTILINE)
    assert len(rows) == 4
    for name, size in rows:
        assert int(size.replace(",", "")) == encoded_bytes(parse_codec(name), CHUNK_ELEMENTS)


def test_every_block_of_the_page_of_algorithms_is_a_run_s_and_every_example_is_there() -> None:
    page = (DOCS / "algorithms.md").read_text("utf-8")
    texts = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    runs = [load_text(RunFile, f"task = 'm:t'\n{text}", [], name="the page").run for text in texts]
    assert [run.aggregation.algorithm for run in runs] == [
        "fedavg",
        "fedavg",
        "fednova",
        "scaffold",
        "fedavg",
        "fedavg",
        "fedavg",
    ]
    assert [run.aggregation.rule for run in runs] == [*["mean"] * 6, "concatenate"]
    locals_ = [Local().with_overrides(run.local) for run in runs]
    assert [local.batch_size for local in locals_[:1]] == [None]
    assert (locals_[1].prox_mu, locals_[4].keep, locals_[5].keep_optimizer) == (0.1, "batchnorm", True)
    linked = re.findall(r"\]\(\.\./(examples/[^)#]+)", page)
    assert len(linked) == 7
    assert all((ROOT / path).is_file() for path in linked)
    keys = {setting.key for setting in described(Section.RUN)}
    assert {key for key in re.findall(r"`((?:aggregation|round)\.[a-z_]+)", page)} <= keys
    names = {field.name for field in fields(Local)}
    assert {key for key in re.findall(r"`local\.([a-z_]+)", page)} <= names


@pytest.fixture
def clocked() -> Clocked:
    text, *_ = blocks_of("toml")
    assert tomllib.loads(text)["round"]["linger"] == 20.0
    return Clocked(text)


def test_the_worked_example_of_a_quick_round_is_true(clocked: Clocked) -> None:
    for k in range(8):
        clocked.reports(k, 23 + k / 100)
    assert clocked.phase_and_reason == ("aggregating", "enough")
    assert clocked.fates() == ["reported"] * 8 + ["released"] * 2


def test_the_worked_example_of_a_round_that_lingers_is_true(clocked: Clocked) -> None:
    for k, now in enumerate((12, 17, 20, 24, 30, 41)):
        clocked.reports(k, now)
    assert clocked.machine.deadline == 44
    clocked.at(44, TimePassed())
    assert clocked.phase_and_reason == ("aggregating", "linger_over")
    assert clocked.fates() == ["reported"] * 6 + ["released"] * 4
    clocked.at(45, Aggregated(vocabulary.RoundId(1), vocabulary.Digest("d1")))
    clocked.open_round(46)
    clocked.reports(6, 52)
    assert clocked.fates()[6] == "carried"
    for k in range(8):
        if k != 6:
            clocked.reports(k, 60, round_id=2)
    clocked.reports(8, 60, round_id=2)
    record = clocked.machine.record_of(vocabulary.RoundId(2))
    assert record is not None
    assert [round(carried.scale, 2) for carried in record.carried] == [0.71]


def test_the_worked_example_of_a_round_at_its_deadline_is_true(clocked: Clocked) -> None:
    for k in range(3):
        clocked.reports(k, 20)
    clocked.at(59, UploadBegun(clocked.clients[3], vocabulary.RoundId(1)))
    clocked.at(60, TimePassed())
    assert clocked.machine.deadline == 75
    clocked.reports(3, 63)
    assert clocked.phase_and_reason == ("aggregating", "deadline")
    assert clocked.fates() == ["reported"] * 4 + ["straggler"] * 6


def test_the_worked_example_of_a_round_below_its_quorum_is_true(clocked: Clocked) -> None:
    for k in range(3):
        clocked.reports(k, 20)
    clocked.at(59, UploadBegun(clocked.clients[3], vocabulary.RoundId(1)))
    clocked.at(60, TimePassed())
    clocked.at(75, TimePassed())
    assert clocked.phase_and_reason == ("abandoned", "below_quorum")


def test_the_worked_example_of_a_buffer_is_true() -> None:
    [text] = [block for block in blocks_of("toml") if "fedbuff" in block]
    policy = StragglerPolicy(**tomllib.loads(text)["round"])
    assert (policy.mode, policy.num_wanted, policy.quorum_count) == ("fedbuff", 4, 4)
    flow = Flow(buffer_size=2, concurrency=3, max_staleness=8, deadline=120.0)
    assert invited(flow.join("abc", at=0)) == {"a": 0, "b": 0, "c": 0}
    assert flow.row("c").deadline == 1120.0
    assert invited(flow.update("a", at=9)) == {}
    assert buffered(flow.update("b", at=11)) == [("a", 0, 1.0), ("b", 0, 1.0)]
    effects = flow.commit(at=12)
    assert (invited(effects), released(effects)) == ({"a": 1, "b": 1}, {})
    flow.update("a", at=21)
    assert buffered(flow.update("c", at=26, round_id=1)) == [("a", 1, 1.0), ("c", 0, 0.707107)]


@pytest.mark.parametrize("name", ["polynomial", "hinge", "constant"])
def test_the_discounts_of_the_page_are_those_of_the_policy(name: str) -> None:
    row = next(line for line in PAGES["configuration.md"].splitlines() if line.startswith(f'| `"{name}"` |'))
    shown = [float(number) for number in row.split("|")[3].partition("(")[0].split(",")]
    policy = StragglerPolicy(mode="fedbuff", staleness=name)  # type: ignore[arg-type]
    assert [float(f"{policy.discount(t):.3g}") for t in (0, 1, 3, 8)] == shown


def test_the_reference_has_a_section_of_every_public_name() -> None:
    import atoll

    sections = re.findall(
        r"^<!-- begin generated: python (\w+) -->$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(sections) == sorted(name for name in atoll.__all__ if name != "__version__")
