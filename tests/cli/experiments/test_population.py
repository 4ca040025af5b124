"""`atoll population`: what it prints, and what it refuses."""

import re
from pathlib import Path

import pytest

from atoll.protocol.settings import load_text
from atoll.simulations.federation.config import SimulationFile
from tests.cli.invoking import TINY, invoke, refused, said, shown, told

ROOT = Path(__file__).parents[3]
DIGITS = f"{ROOT}/examples/digits.py:task"
SHARDS = ("--set", "population.kind=shards", "--set", "population.clients=30")


def test_the_task_s_own_sites_are_shown_client_by_client() -> None:
    text = said("population", DIGITS)
    head, rows = text.split("\n\n")
    assert head.splitlines()[0] == "natural: 5 clients, 1299 examples to train on, seed 0"
    columns, north, *_ = rows.splitlines()
    assert columns.split() == ["client", "examples", "test", *map(str, range(10))]
    assert north.split()[:3] == ["north", "186", "20"]
    assert sum(int(count) for count in north.split()[3:] if count != "-") == 186


@pytest.mark.slow
def test_a_script_gets_every_client() -> None:
    found = shown("population", DIGITS, *SHARDS)
    assert [row["client"] for row in found["clients"]] == [f"c{k:04d}" for k in range(30)]
    assert sum(row["examples"] for row in found["clients"]) == found["examples"] == 1299
    assert found["labels"]["total_variation_mean"] > 0.6


def test_a_long_table_is_cut_and_says_so() -> None:
    result = invoke("population", DIGITS, *SHARDS, "--rows", 2)
    assert len(result.stdout.split("\n\n")[1].splitlines()) == 3
    note, more = told(result.stderr)
    assert note.startswith("the data of 5 sites are pooled and split among 30 clients")
    assert more == "and 28 more: --rows 30, or --json"


@pytest.mark.slow
def test_settings_come_from_a_run_s_toml_which_may_have_the_task(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(f"task = '{DIGITS}'\nseed = 5\n[population]\nkind = 'iid'\nclients = 4\n")
    assert shown("population", toml)["seed"] == 5
    assert shown("population", toml)["num_clients"] == 4
    other = shown("population", DIGITS, "--config", toml, "--set", "population.clients=6")
    assert other["num_clients"] == 6
    assert shown("population", toml, "--set", "population.seed=5") == shown("population", toml)
    assert shown("population", toml, "--set", "seed=6") != shown("population", toml)


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    text = said("population", DIGITS, *SHARDS, "--plot", tmp_path / "who.png")
    assert text.endswith(f"drawn in {tmp_path}/who.png\n")
    assert (tmp_path / "who.png").stat().st_size > 5000


@pytest.mark.slow
def test_mistakes_are_refused_one_a_line(tmp_path: Path) -> None:
    kind, client = refused("population", DIGITS, "--set", "population.kind=shard", "--set", "population.client=3")
    kinds = '"natural" | "iid" | "dirichlet" | "shards" | "quantity" | "feature" | module:function'
    assert kind.startswith(f"--set: population.kind: got 'shard': allowed: {kinds}")
    assert client.startswith("--set: population.client: unknown key (did you mean clients? known: kind, clients, ")
    assert refused("population", DIGITS, "--set", "population.kind=dirichlet", "--set", "population.sigma=1.0") == [
        "population: sigma is not an option of dirichlet (allowed: alpha, balanced, clients)",
        "population: dirichlet needs alpha, clients",
    ]
    assert refused("population", DIGITS, *SHARDS, "--set", "population.clients=2000") == [
        "population: 2000 clients: 2000 examples needed, and the task has 1299"
    ]
    assert refused("population", f"{TINY}:task") == [
        f"{TINY}:task is an ArrayTask, which reads its data itself; only the data of a Task is split"
    ]
    fault, *_ = refused("population", DIGITS, "--plot", tmp_path / "who.doc")
    assert fault.startswith(f"{tmp_path}/who.doc: Format 'doc' is not supported")
    assert "is a run's TOML already" in refused("population", "a.toml", "--config", "b.toml")[0]


def test_the_example_of_the_page_is_a_run_s_and_says_what_it_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "populations.md").read_text("utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert load_text(SimulationFile, text, [], name="the page").population.clients == 40
    toml = tmp_path / "run.toml"
    toml.write_text(text.replace("digits.py", f"{ROOT}/examples/digits.py"))
    output = re.findall(r"^    (.*examples.*)$", page, re.MULTILINE)
    assert len(output) == 2
    assert said("population", toml).splitlines()[:2] == output


@pytest.mark.parametrize("kind", ["natural", "iid", "dirichlet", "shards", "quantity", "feature"])
def test_every_kind_is_explained(kind: str) -> None:
    page = (ROOT / "docs" / "populations.md").read_text("utf-8")
    assert re.search(rf"^\| `{kind}`", page, re.MULTILINE)
