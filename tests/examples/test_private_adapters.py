"""The story of `examples/adapters`: LoRA with a guarantee for each row, in secure sums of sites with pinned keys."""

import json
import os
import re
from pathlib import Path

import pytest

from benchmarks.processes import free_address
from tests.federation.processes import ATOLL
from tests.federation.test_story import executed, shown

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
SITES = {"south", "east", "west"}


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_pinned_sites_train_adapters_under_both_and_the_loss_falls(tmp_path):
    environment = {**os.environ, "ADDRESS": free_address(), "PATH": f"{Path(ATOLL).parent}:{os.environ['PATH']}"}
    told = executed(["bash", ADAPTERS / "story.sh", tmp_path], {**environment, "OMP_NUM_THREADS": "1"})
    for number in range(1, 5):
        record = shown(tmp_path, "round", "show", str(number), "--run", "adapters-1")
        assert record["phase"] == "committed"
        assert {name for name, row in record["clients"].items() if row["fate"] == "reported"} == SITES
        assert [each["stage"] for each in record["sums"]] == ["opened"]
        assert {row["num_examples"] for row in record["clients"].values()} == {1}, "nothing of a single site"
    claim = shown(tmp_path, "privacy", "show", "adapters-1")
    assert (claim["unit"], claim["uses"], claim["noise_by"]) == ("example", 24, "site")
    assert 1.5 < claim["epsilon"] <= 2.0
    measured = shown(tmp_path, "run", "show", "adapters-1")["metrics"]
    losses = [measured[version]["server"]["loss"] for version in sorted(measured, key=int)]
    assert losses[-1] < losses[0] - 0.02, losses
    spent = re.findall(r"spent now epsilon ([\d.]+) of 4", (tmp_path / "south.log").read_text())
    assert len(spent) == 4
    if "loss distributions" in claim["accountant"]:
        assert float(spent[-1]) == pytest.approx(claim["epsilon"], rel=1e-4), "the site counts what the run counts"
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"]) == ("LORA", 4)
    assert "noise multiplier 0.8" in told
