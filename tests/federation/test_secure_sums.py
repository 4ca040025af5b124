"""Secure sums as a user runs them: processes, sockets, certificates, kill -9. The model is the plain one's."""

import numpy as np

from atoll.tensors.safetensors_file import read
from tests.federation.processes import federation

SECURE = {
    "secure__clip_norm": 1000.0,
    "secure__examples_max": 1000,
    "round__cohort_size": 4,
    "round__quorum": 3,
    "secure__stage_timeout": 20,
}


def model(it, version):
    return read(it.state / "runs" / "trouble-1" / "versions" / f"{version:06d}.safetensors")["w"]


def started(it, sites="abcd", environment=(), **settings):
    it.coordinator(environment=environment, **{**SECURE, **settings})
    for site in sites:
        it.agent(site)


def test_a_secure_run_has_the_model_of_a_plain_one_and_no_single_update(tmp_path):
    with federation(tmp_path) as it:
        started(it, rounds=3)
        assert it.wait_for_end() == 0
        for site in "abcd":
            assert it.wait_for_end(site) == 0
        np.testing.assert_allclose(model(it, 3), np.full(50_000, 3, np.float32), rtol=1e-3)
        for record in it.rounds():
            assert record.phase == "committed"
            assert [record.clients[site].fate for site in "abcd"] == ["reported"] * 4
            assert record.sums[0].stage == "opened"
            assert {row.num_examples for row in record.clients.values()} == {1}
        told = str(it.show("round", "show", "1"))
        assert "a takes part" not in told
        assert "it has sent keys, shares, its masked update, its signature" in told
