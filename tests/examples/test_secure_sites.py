"""The operators' story of `examples/secure`: five sites pin each other's keys, one of them is killed in a sum."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from atoll.tensors import safetensors_file
from benchmarks.processes import free_address
from tests.federation.processes import ATOLL
from tests.federation.test_story import executed, shown

SECURE = Path(__file__).parents[2] / "examples" / "secure"
SITES = {"north", "south", "east", "west", "harbour"}


@pytest.mark.real
def test_five_pinned_sites_of_which_one_is_killed_open_their_sums(tmp_path):
    environment = {**os.environ, "ADDRESS": free_address(), "PATH": f"{Path(ATOLL).parent}:{os.environ['PATH']}"}
    told = executed(["bash", SECURE / "story.sh", tmp_path], environment)
    lists = re.findall(r"fingerprint of the list: ([0-9a-f ]{39})$", told, re.MULTILINE)
    assert (len(lists), len({*lists})) == (5, 1)
    rounds = {number: shown(tmp_path, "round", "show", str(number), "--run", "prices-1") for number in range(1, 6)}
    assert {record["phase"] for record in rounds.values()} == {"committed"}

    def sent(record):
        return {
            name for name, row in record["clients"].items() if row["fate"] == "reported" and not row["unused_because"]
        }

    assert sent(rounds[1]) == SITES
    assert sent(rounds[2]) >= SITES - {"west"}, "its masked update may leave before it is killed"
    assert (rounds[2]["clients"]["west"]["sum"] or {"revealed_at": None})["revealed_at"] is None
    assert sent(rounds[5]) == SITES
    assert rounds[5]["training"]["in_sums"]["members"] == 5
    for record in rounds.values():
        assert {row["num_examples"] for row in record["clients"].values()} <= {0, 1}, "nothing of a single site"
    found = safetensors_file.read(tmp_path / "prices.safetensors")
    np.testing.assert_allclose([*found["weights"], found["price"]], [3.0, -1.2, 2.0], atol=0.3)
