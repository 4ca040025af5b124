"""`atoll plan`: what it prints, and what it refuses."""

from pathlib import Path

import pytest

from tests.cli.invoking import refused, said, shown

TINY = "layers=4,hidden=64,heads=4,vocab=128,sequence=32"


@pytest.mark.slow
def test_the_plans_are_shown_with_their_costs_and_reasons() -> None:
    text = said("plan", "gpt3", "--cluster", "h200-141,nodes=8", "--batch", 512)
    head, *rest = text.split("\n\n")
    assert head.startswith("gpt3: 174.6 B parameters, 96 blocks of width 12288\n64 devices (8 x 8) of 150.7 GB")
    first, second = rest[0].splitlines()[:2]
    assert first.split() == [
        *("#", "pp", "rep", "shard", "tp", "zero", "m", "x", "b"),
        *("recompute", "memory", "bubble", "step", "tokens/s", "MFU"),
    ]
    assert second.startswith("1  ")
    titles = [part.splitlines()[0] for part in rest[1:]]
    assert titles == [
        "Why the other meshes rank lower",
        "The fastest plan",
        "Memory of the rank with the largest need",
        "Traffic of the first rank of the first stage in a step",
        "Time of a step",
    ]
    assert "2794 GB, 20.6 times the 135.6 GB of one device" in text
    assert "tensor parallelism would cross nodes (tp=16 with 8 devices in a node)" in text
    assert max(map(len, text.split("\n\nThe fastest")[0].splitlines())) <= 120


def test_the_lecture_s_figures_are_those_of_its_convention() -> None:
    one = "h100-80,per_node=1,memory=120e9"
    found = shown(
        *("plan", "gpt2-xl", "--cluster", one, "--batch", 32, "--precision", "fp32", "--count", "lecture"),
    )
    memory = found["plans"][0]["memory"]
    assert [memory[name] for name in ("parameters", "gradients", "optimizer")] == [6e9, 6e9, 18e9]
    assert memory["activations"] == 56.25 * 2**30


def test_a_script_gets_everything() -> None:
    found = shown("plan", TINY, "--cluster", "cpu,nodes=2", "--batch", 8)
    assert found.keys() == {
        *("model", "cluster", "training", "plans", "why", "traffic", "refused", "dry_runs"),
    }
    plan = found["plans"][0]
    assert plan["lost"] == ""
    degrees = plan["mesh"]
    assert degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"] == 4
    parts = {name: value for name, value in plan["memory"].items() if name != "total"}
    assert plan["memory"]["total"] == pytest.approx(sum(parts.values()))
    assert found["training"] == {"batch": 8, "precision": "bf16", "optimizer": "adamw", "counted": "engine"}


@pytest.mark.slow
def test_a_toml_may_hold_it_all_and_options_win(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        '[model]\npreset = "llama-1b"\nsequence = 1024\n[cluster]\npreset = "a100-80"\n[training]\nbatch = 16\n'
    )
    found = shown("plan", file)
    assert (found["model"]["sequence"], found["cluster"]["flops"], found["training"]["batch"]) == (1024, 312e12, 16)
    assert shown("plan", file, "--batch", 32)["training"]["batch"] == 32


def test_one_mesh_can_be_asked_for() -> None:
    found = shown("plan", TINY, "--cluster", "cpu,nodes=2", "--batch", 8, "--mesh", "pp=2,dp=2")
    (plan,) = found["plans"]
    assert plan["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 1}


@pytest.mark.real
def test_a_dry_run_stands_beside_the_prediction() -> None:
    arguments = ("plan", TINY, "--cluster", "cpu,nodes=2", "--batch", 8, "--mesh", "dp=2,tp=2", "--dry-run", "3")
    (run,) = shown(*arguments)["dry_runs"]
    assert run["rank"] == 3
    exact = [row for row in run["compared"] if not row["is_estimate"]]
    assert {row["what"] for row in exact} >= {"parameters", "gradients", "optimizer", "tp all_gather, calls"}
    assert all(row["measured"] == row["predicted"] for row in exact)
    text = said(*arguments)
    assert "Dry run of rank 3: one step of the engine" in text
    assert "DIFFERENT" not in text


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    faults = refused("plan", "gpt5", "--cluster", "h100-80,node=2", "--batch", -1, "--optimizer", "adamax")
    assert [fault.partition(":")[0] for fault in faults] == [
        *("model", "cluster.node", "training.batch", "training.optimizer"),
    ]
    assert refused("plan", TINY, "--cluster", "cpu", "--dry-run", "2,x") == [
        "--dry-run: ranks must be whole numbers below 2, got 2, x"
    ]
    assert refused("plan", TINY, "--cluster", "cpu", "--mesh", "dp=4") == [
        "mesh: pp=1 x dp_replicate=1 x dp_shard=4 x tp=1 = 4 ranks, but there are 2"
    ]
    file = tmp_path / "plan.toml"
    file.write_text("[model]\npreset = 'llama-1b'\n[modell]\n")
    assert refused("plan", file) == [f"{file}: modell: unknown (tables: model, cluster, training)"]
    assert refused("plan", tmp_path / "none.toml")[0] == f"there is no {tmp_path / 'none.toml'}"


def test_what_cannot_be_trained_is_refused_with_the_reasons() -> None:
    first, *reasons = refused("plan", "gpt3", "--cluster", "h100-80")
    assert first == "no mesh of this cluster can train the model"
    assert any("more memory than the 76.95 GB" in reason for reason in reasons)


def test_the_needs_of_a_site_are_shown_with_the_seconds_on_its_line() -> None:
    words = ("plan", "llama-8b", "--mesh", "dp_shard=8", "--client", "--line", "2Gbit", "--codec", "bf16")
    text = said(*words)
    client = text.partition("The needs of a site with this plan")[2]
    assert "version, down  32.1 GB  2.1 min" in client
    assert "update, up     16.1 GB  64.2 s" in client
    assert "spool_max_bytes must be at least 32121044992 (its default is 8 GiB)" in client
    found = shown(*words)["client"]
    assert found["seconds"]["down"] == 8 * found["down"] / 2e9 == 8 * 4 * 8_030_261_248 / 2e9
    assert [row["ranks"] for row in found["ranks"]] == [list(range(8))]


def test_options_of_a_site_are_refused_before_the_search() -> None:
    lines = refused("plan", TINY, "--client", "--line", "3", "--codec", "zip", "--lora", 0)
    assert [line.partition(": got")[0].partition(": codec")[0] for line in lines] == ["--line", "--codec", "--lora"]
    assert refused("plan", TINY, "--line", "1Mbit") == [
        "--line: applies only to a site's needs: add --client, or leave it out"
    ]
