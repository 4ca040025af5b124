"""Audits by canaries through the operation: below the claim when all is right, above it for each planted fault."""

import random
from typing import Any

import numpy as np
import pytest
import torch

import atoll.parallel.audits.examples as of_examples
import atoll.parallel.private.passes as private_passes
import atoll.training.private.captured_gradients as captured
from atoll.operations.faults import CommandError
from atoll.operations.privacy.audit import PrivacyAudit, audit
from atoll.operations.requests import PrivacyAuditRequest
from atoll.parallel.audits.examples import Canaries, scores_of_examples
from atoll.parallel.trainer.job import Job
from atoll.simulations.attacks.membership import auc

TASK = "tests/operations/audited.py:task"
MECHANISM = {"unit": "example", "noise_multiplier": 2.0, "clip_norm": 0.01, "sample_rate": 1.0, "delta": 1e-5}
FOR_CLIENTS = ("privacy.epsilon=8", "privacy.delta=1e-5", "privacy.clip_norm=1", "aggregation.weighting=uniform")


def examples(monkeypatch: pytest.MonkeyPatch) -> tuple[PrivacyAudit, float]:
    """Return an audit of examples, and the largest area under the ROC curve of its scores."""
    seen: list[float] = []

    def scored(job: Job, canaries: Canaries, *where: Any) -> Any:
        found = scores_of_examples(job, canaries, *where)
        is_in = np.array(canaries.is_in)
        seen.extend(auc(np.array(values)[is_in], np.array(values)[~is_in]) for values in found.values())
        return found

    monkeypatch.setattr(of_examples, "scores_of_examples", scored)
    # The noise is of one secret: an audit of fresh noise may by chance be above the claim, as its confidence says.
    monkeypatch.setattr("atoll.parallel.private.secret.secrets.token_bytes", lambda size: bytes(range(size)))
    settings = [f"privacy.{name}={value}" for name, value in MECHANISM.items()]
    asked = PrivacyAuditRequest(what=TASK, canaries=400, overrides=[*settings, "train.steps=1"])
    return audit(asked, random.Random(0)), max(seen)


def _without_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "factors_of", lambda norms, _clip_norm: torch.ones_like(norms))


def _without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_passes, "add_noise", lambda *_: None)


@pytest.mark.slow
def test_a_right_training_stays_below_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    found, area = examples(monkeypatch)
    # Four standard deviations of an area over 200 and 200 scores: sqrt(401 / (12 200^2)) = 0.029.
    assert 0.4 < area < 0.64 + 4 * 0.029, "a Gaussian of z = 2 allows at most Phi(1 / (2 sqrt 2)) = 0.64"
    assert found.claim == pytest.approx(1.9931, abs=0.01), "one Gaussian of z = 2"
    assert found.holds
    assert (found.canaries, found.unit) == (400, "example")


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_without_clipping, _without_noise])
def test_a_training_without_noise_or_clipping_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found, area = examples(monkeypatch)
    assert area > 0.9
    assert found.best.bound > found.claim
    assert "The claim does not hold: epsilon is above" in found.document["sentence"]


def test_few_canaries_refute_no_large_claim_and_that_is_said() -> None:
    asked = PrivacyAuditRequest(what=TASK, canaries=20, overrides=[*FOR_CLIENTS, "rounds=1"])
    found = audit(asked, random.Random(0))
    assert found.claim == pytest.approx(8.0, abs=1e-3)
    assert found.most < found.claim
    assert "no bound above" in found.document["sentence"]
    assert "30 % too little noise is never found" in found.document["sentence"]


def test_what_cannot_be_audited_is_refused() -> None:
    for what, overrides, canaries, says in (
        (TASK, (), 100, "its settings have no table \\[privacy\\]"),
        (TASK, FOR_CLIENTS, 19, "--canaries: got 19; allowed: 20 to 20000"),
        ("tests/operations/absent.py:task", ("privacy.unit=example",), 100, "absent"),
        (TASK, ("privacy.unit=example",), 100, "privacy.delta: missing"),
    ):
        with pytest.raises(CommandError, match=says):
            audit(PrivacyAuditRequest(what=what, canaries=canaries, overrides=overrides))
