"""A federation that uses a GPU in all places: the sum, an agent, a crew over NCCL. `make test-cuda` runs this."""

import numpy as np
import pytest
import torch

from atoll.tensors.safetensors_file import read
from tests.federation.crew.exact_task import moved
from tests.federation.crew.test_federation import TASK
from tests.federation.processes import federation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda")


def test_the_model_has_the_bits_of_three_plain_clients(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(rounds=3, round__cohort_size=3, round__deadline=600, aggregation__device="cuda")
        it.agent("a", device="cpu")
        it.agent("b", device="cuda")
        it.agent("c", device="cuda", **{"crew.mesh": "dp_shard=1", "crew.plan.zero": 3})
        assert it.wait_for_end() == 0, it.log("coordinator")
        assert it.wait_for_end("c") == 0, it.log("c")
        for number, record in enumerate(it.rounds(), start=1):
            assert [client.fate for client in record.clients.values()] == ["reported"] * 3
            w = read(it.state / "runs" / "trouble-1" / "versions" / f"{number:06d}.safetensors")["w"]
            np.testing.assert_array_equal(w, number * moved().numpy())
        assert "of memory on a rank" in it.log("c")
