"""`atoll run statistics`: what it refuses, and its tables; `atoll population --statistics`."""

from pathlib import Path
from typing import Any

import pytest

from atoll.cli.runs.statistics import say_statistics
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.statistics.results import keep
from tests.cli.invoking import invoke, shown

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Task

SITES = {"north": [1.0, 2.0, float("nan")], "south": [4.0]}


def data(site, split):
    rows = SITES[site]
    return TensorDataset(torch.tensor(rows), torch.arange(len(rows))) if split == "train" else None


task = Task(model=lambda: nn.Linear(1, 3), data=data, loss=nn.functional.cross_entropy, sites=list(SITES))
"""
NUMPY = """
class Plain:
    sites = ("a", "b")

    def initial(self, seed):
        return {}

    def train(self, parameters, instructions):
        raise NotImplementedError
"""


def moments(**fields: Any) -> dict[str, Any]:
    known = {
        "count": 3,
        "missing": 1,
        "infinite": 0,
        "sum": 7.0,
        "sum_of_squares": 21.0,
        "mean": 7 / 3,
        "variance": 4.0,
    }
    return known | fields


IID = ("--set", "population.kind=iid", "--set", "population.clients=2")
RESULT: dict[str, Any] = {
    "number": 1,
    "task": "digits:task",
    "asked": ["east", "north"],
    "answered": ["north"],
    "refused": {"east": "policy_refused: statistics: no statistics leave this site"},
    "ended_at": 0.0,
    "merged": {
        "train": {
            "examples": 4,
            "sites": 1,
            "labels": {"target": {"counts": {"0": 2, "1": 1}, "withheld": 1, "sites": 1}},
            "features": {"age": moments(sites=1)},
            "own": {"pairs": {"merge": "sum", "value": [1, None], "sites": 1}},
        }
    },
    "sites": {},
    "not_merged": {"train.features.weight": "1 site gives it, and sums of at least 2 are allowed"},
    "left_out": {"north": {"train.features.income": "fewer than 10 values, and more than none"}},
    "not_shown": {"north": "its policy allows only sums over several sites"},
}


def test_the_tables_have_the_sums_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    say_statistics(RESULT)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "no answer of east: policy_refused: statistics: no statistics leave this site",
        "all 4 1",
        "label of target all",
        "0 2",
        "1 label is left out by the sites: these counts are lower limits",
        "feature site values missing infinite mean std sites",
        "age all 3 1 0 2.33333 2 1",
        "pairs all sum [1, None] 1",
        "no sum of train.features.weight: 1 site gives it, and sums of at least 2 are allowed",
        "left out by north: train.features.income: fewer than 10 values, and more than none",
        "not shown: north: its policy allows only sums over several sites",
    ):
        assert line in lines, "\n".join(lines)


def test_a_secure_sum_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    age = moments(sites=3, outside=7)
    del age["infinite"]
    bins = {"age": {"counts": {"[0, 40)": 2, "[40, 90]": 1}, "withheld": 1, "sites": 3}}
    train = {"examples": 40, "sites": 3, "features": {"age": age}, "feature_bins": bins}
    found = RESULT | {
        "asked": ["a", "b", "c", "d"],
        "answered": ["a", "b", "c"],
        "refused": {"d": "session_lost"},
        "secure": {"sites": 3},
        "merged": {"train": train},
        "not_merged": {},
        "left_out": {},
        "not_shown": {},
    }
    say_statistics(found)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].endswith(": secure sum of 3 of 4 sites")
    for line in (
        "no answer of d: session_lost",
        "bin of age all",
        "[0, 40) 2",
        "1 bin is left out by the sites: these counts are lower limits",
        "feature site values missing outside mean std sites",
    ):
        assert line in lines, "\n".join(lines)
    lost = [{"sites": ["d", "e", "f"], "why": "attempt 1: 2 members; needed: 3"}]
    say_statistics(found | {"secure": {"sites": 3, "sessions": 1, "lost": lost}})
    said = capsys.readouterr().out
    assert ": 1 secure sum of 3 of 4 sites\n" in said
    assert "no secure sum of d, e, f: attempt 1: 2 members; needed: 3" in said
    say_statistics(found | {"answered": [], "secure": {"sites": 0}, "merged": {}})
    assert "no secure sum of 4 sites was opened" in capsys.readouterr().out


def test_a_long_table_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    merged = {"train": {"features": {f"x{k:02}": moments() for k in range(42)}}}
    say_statistics(RESULT | {"merged": merged})
    assert "... and 2 rows more; --json has all" in capsys.readouterr().out


def test_kept_results_are_shown_again(tmp_path: Path) -> None:
    StateDirectory.open(tmp_path / "state").close()
    ended = invoke("run", "statistics", "--show", "0", "--state", tmp_path / "state")
    assert ended.exit_code == 2
    assert "no statistics were requested yet" in ended.stderr
    keep(tmp_path / "state", 1, RESULT)
    assert shown("run", "statistics", "--show", "1", "--state", tmp_path / "state") == RESULT
    missing = invoke("run", "statistics", "--show", "7", "--state", tmp_path / "state")
    assert (missing.exit_code, "there are no statistics 7; there are 1 to 1" in missing.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name the task of the planned run, or its TOML"),
        (["t.py:task", "--show", "0"], "got t.py:task and --show 0: name the task of the planned run, or its TOML"),
        (["--show", "0", "--set", "seed=1"], "--set seed=1: a kept result does not change"),
        (["--show", "-1"], "got -1; allowed: at least 0"),
        (["--show", "0", "--deadline", "0"], "got 0; allowed: at least 0.1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], sentence: str) -> None:
    ended = invoke("run", "statistics", *arguments)
    assert ended.exit_code == 2
    assert sentence in " ".join(ended.stderr.split())


def test_the_sites_of_a_task_on_this_machine_have_the_same_form(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TASK)
    found = shown("population", f"{tmp_path / 't.py'}:task", "--statistics")
    part = found["merged"]["train"]
    assert (part["examples"], part["sites"], found["merged"].keys()) == (4, 2, {"train"})
    assert part["labels"]["target"]["counts"] == {"0": 2, "1": 1, "2": 1}
    age = part["features"]["inputs"]
    assert (age["count"], age["missing"], age["mean"], age["min"], age["max"]) == (3, 1, 7 / 3, 1.0, 4.0)
    assert age["variance"] == pytest.approx(14 / 9, rel=1e-15)
    assert found["sites"]["south"]["train"]["features"]["inputs"]["variance"] == 0.0
    pooled = shown("population", f"{tmp_path / 't.py'}:task", "--statistics", *IID)
    assert pooled["merged"]["train"]["features"]["inputs"] == age, "dealt anew, the sums are the same"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plot", "x.png"], "--plot draws the labels"),
        ([*IID], "an ArrayTask reads its data itself"),
        ([], "an ArrayTask gives them by `statistics` or `num_examples`"),
    ],
)
def test_what_a_population_cannot_give_is_refused(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "n.py").write_text(f"{NUMPY}\n\ntask = Plain()\n")
    ended = invoke("population", f"{tmp_path / 'n.py'}:task", "--statistics", *arguments)
    assert ended.exit_code in (1, 2)
    assert sentence in " ".join(ended.stderr.split())
