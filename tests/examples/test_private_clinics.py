"""The story of `examples/private`: a run ends by its budget, and a clinic leaves the next run by its own."""

import os
import re
from pathlib import Path

import pytest

from benchmarks.processes import free_address
from tests.federation.processes import ATOLL
from tests.federation.test_story import executed, shown

PRIVATE = Path(__file__).parents[2] / "examples" / "private"
CLINICS = {"university", "county", "coast"}


@pytest.mark.real
def test_a_run_ends_by_its_budget_and_a_clinic_leaves_the_next_one_by_its_own(tmp_path):
    environment = {**os.environ, "ADDRESS": free_address(), "PATH": f"{Path(ATOLL).parent}:{os.environ['PATH']}"}
    told = executed(["bash", PRIVATE / "story.sh", tmp_path], environment)
    first, second = (shown(tmp_path, "run", "show", run) for run in ("tumours-1", "tumours-2"))
    assert first["cause"].startswith("the privacy budget is spent: epsilon"), first["cause"]
    assert second["cause"].startswith("the privacy budget is spent: epsilon"), second["cause"]
    assert 5 <= first["version"] < 100
    claim = shown(tmp_path, "privacy", "show", "tumours-1")
    assert (claim["unit"], claim["uses"], claim["noise_by"]) == ("example", 10 * first["version"], "site")
    assert 1.5 < claim["epsilon"] <= 2.0
    log = (tmp_path / "coast.log").read_text()
    spent = [float(value) for value in re.findall(r"spent now epsilon ([\d.]+) of 2.2", log)]
    assert len(spent) == first["version"] + 1, "each training that began, over both runs"
    assert spent == sorted(spent)
    assert spent[-1] <= 2.2
    if "loss distributions" in claim["accountant"]:
        assert spent[-2] == pytest.approx(claim["epsilon"], rel=1e-4), "the site counts what the run counts"
    rounds = [shown(tmp_path, "round", "show", str(number), "--run", "tumours-2") for number in (1, second["version"])]
    of_rounds = [{name for name, row in each["clients"].items() if row["fate"] == "reported"} for each in rounds]
    assert of_rounds == [CLINICS, CLINICS - {"coast"}]
    assert "the budget of data set 'tumours-1993' is spent" in told
    assert max(float(value) for value in re.findall(r"accuracy ([\d.]+)", told)) > 0.9
