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
    counted = reported(tmp_path, "tumours-1")  # a clinic that came after the linger is not in its round
    uses = {clinic: sum(clinic in clinics for clinics in counted) for clinic in CLINICS}
    assert (claim["unit"], claim["uses"], claim["noise_by"]) == ("example", 10 * max(uses.values()), "site")
    assert 1.5 < claim["epsilon"] <= 2.0
    log = (tmp_path / "coast.log").read_text()
    spent = [float(value) for value in re.findall(r"spent now epsilon ([\d.]+) of 2.2", log)]
    in_second = reported(tmp_path, "tumours-2")
    assert len(spent) >= uses["coast"] + sum("coast" in clinics for clinics in in_second), "each training that began"
    assert spent == sorted(spent)
    assert spent[-1] <= 2.2
    if "loss distributions" in claim["accountant"] and len(spent) == len(counted) + 1 and uses["coast"] == len(counted):
        assert spent[-2] == pytest.approx(claim["epsilon"], rel=1e-4), "the site counts what the run counts"
    assert in_second[-1] == CLINICS - {"coast"}
    assert "the budget of data set 'tumours-1993' is spent" in told
    assert max(float(value) for value in re.findall(r"accuracy ([\d.]+)", told)) > 0.9


def reported(folder, run):
    """Return the clinics whose updates each round of a run counted."""
    rows = shown(folder, "round", "list", "--run", run)
    rounds = [shown(folder, "round", "show", str(row["round"]), "--run", run) for row in rows]
    return [{name for name, row in of["clients"].items() if row["fate"] == "reported"} for of in rounds]
