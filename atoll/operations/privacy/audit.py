"""The audit of a private run or training: a lower bound of epsilon from canaries in one run, beside the claim."""

import dataclasses
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.reporter import waiting_for
from atoll.operations.requests import PrivacyAuditRequest, SimulateRequest, TrainRequest
from atoll.protocol.privacy.one_run_audit import ERROR_RATE, Found, Score, best_of, bound_max

CANARIES_MIN, CANARIES_MAX = 20, 20_000

BLIND = (
    "No audit proves a claim: it finds gross faults, such as updates that are not clipped, one draw for all values or "
    "the same noise twice. 30 % too little noise is never found."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyAudit:
    """Outcome of an audit.

    Attributes:
        unit: what is protected.
        claim: epsilon of what was audited.
        delta: of the claim.
        canaries: their number.
        canaries_in: how many of them were in.
        best: the best guesses of the adversary.
        most: the lower bound if every guess were right.
        audited: what the claim is of, in words.
    """

    unit: str
    claim: float
    delta: float
    canaries: int
    canaries_in: int
    best: Found
    most: float
    audited: str

    @property
    def holds(self) -> bool:
        """Whether the claim is not refuted."""
        return self.best.bound <= self.claim

    @property
    def sentences(self) -> Iterator[str]:
        """What the numbers mean."""
        confidence = f"with a confidence of {1 - ERROR_RATE:.0%}"
        if not self.holds:
            yield (
                f"The claim does not hold: epsilon is above {self.best.bound:.2f}, {confidence}, and not "
                f"{self.claim:.2f}. The noise, the clipping or the sampling is not the one that is accounted."
            )
            return
        yield f"Nothing speaks against the claim: epsilon is at least {self.best.bound:.2f}, {confidence}."
        if self.most <= self.claim:
            yield (
                f"With {count_of(self.canaries, 'canary', 'canaries')} no bound above {self.most:.2f} is possible, so "
                "this audit can refute no such claim: take more canaries (--canaries), or audit less epsilon."
            )
        yield BLIND

    @property
    def document(self) -> dict[str, Any]:
        """The audit in plain values."""
        of_best = {name: value for name, value in dataclasses.asdict(self.best).items() if name != "bound"}
        return {
            "unit": self.unit,
            "audited": self.audited,
            "claim": self.claim,
            "delta": self.delta,
            "lower_bound": self.best.bound,
            "confidence": 1 - ERROR_RATE,
            "holds": self.holds,
            "canaries": self.canaries,
            "canaries_in": self.canaries_in,
            "lower_bound_max": self.most,
            **of_best,
            "sentence": " ".join(self.sentences),
        }


def audit(request: PrivacyAuditRequest, rng: random.Random | None = None) -> PrivacyAudit:
    """Run a private run or training with canaries, and guess from its releases which of them took part.

    Args:
        request: the request.
        rng: draws the canaries that are in; None: the operating system does.

    Raises:
        CommandError: the request has faults, or the run or training is refused.
        ConfigError: the settings of the run have faults.
    """
    if not CANARIES_MIN <= request.canaries <= CANARIES_MAX:
        raise CommandError(f"--canaries: got {request.canaries}; allowed: {CANARIES_MIN} to {CANARIES_MAX}")
    rng = rng or random.SystemRandom()
    with tempfile.TemporaryDirectory(prefix="atoll-audit-") as folder:
        if _is_of_examples(request):
            return _of_examples(request, rng, Path(folder))
        return _of_clients(request, rng, Path(folder))


def _is_of_examples(request: PrivacyAuditRequest) -> bool:
    units = [
        value.strip()
        for key, _, value in (o.partition("=") for o in request.overrides)
        if key.strip() == "privacy.unit"
    ]
    return bool(units) and units[-1] == "example" and not request.what.endswith(".toml")


def _outcome(scores: Sequence[Score], is_in: Sequence[bool], delta: float, **values: Any) -> PrivacyAudit:
    return PrivacyAudit(
        delta=delta,
        canaries=len(is_in),
        canaries_in=sum(is_in),
        best=best_of(scores, is_in, delta),
        most=bound_max(scores, len(is_in), delta),
        **values,
    )


def _of_clients(request: PrivacyAuditRequest, rng: random.Random, folder: Path) -> PrivacyAudit:
    from atoll.operations.simulate import with_task
    from atoll.operations.task_failures import task_failures_in_one_line
    from atoll.protocol.settings import ConfigError
    from atoll.server.config.privacy import faults_of_layout
    from atoll.simulations.audits.clients import draw, scores_of_clients
    from atoll.task.arrays import layout_of
    from atoll.tensors.layout import FLOATS
    from atoll.training.worker.benches import bench_of

    file, task = with_task(SimulateRequest(what=request.what, overrides=request.overrides))
    config, rules = file.run, file.run.rules.privacy
    if rules is None or config.privacy is None:
        raise CommandError(
            f"{request.what}: its settings have no table [privacy], so there is no claim: give them one, or name a "
            "task with --set privacy.unit=example and the mechanism of `atoll train`"
        )
    if (config.privacy.unit, config.privacy.noise_by) != ("client", "coordinator") or config.secure is not None:
        raise CommandError(
            f"{request.what}: got privacy.unit {config.privacy.unit}, privacy.noise_by {config.privacy.noise_by}, "
            f"{'no ' if config.secure is None else ''}[secure]; allowed is noise by the coordinator on plain updates "
            "of clients, or for examples a task with --set privacy.unit=example"
        )
    with task_failures_in_one_line(), waiting_for("the audit", "canaries are folded"):
        bench = bench_of(task, {"model_seed": config.seed})
        layout = layout_of(bench.initial(config.seed))
        if faults := [*faults_of_layout(layout, frozenset(bench.buffers()), rules)]:
            raise ConfigError(faults)
        values = sum(tensor.num_elements for tensor in layout if tensor.dtype in FLOATS)
        is_in = draw(min(request.canaries, values), rng)
        scores = scores_of_clients(config, layout, is_in, folder)
    return _outcome(
        scores,
        is_in,
        rules.delta,
        unit="client",
        claim=rules.epsilon_of(rules.cost),
        audited=f"one use of a client, noise multiplier {rules.noise_multiplier:.6g}",
    )


def _of_examples(request: PrivacyAuditRequest, rng: random.Random, folder: Path) -> PrivacyAudit:
    import torch

    from atoll.operations.training.job import device_of, ready
    from atoll.operations.training.process import train_here
    from atoll.parallel.audits.examples import Canaries, scores_of_examples

    given = TrainRequest(task=request.what, out=folder / "training", overrides=request.overrides)
    given, job = ready(given)
    assert job.private is not None
    canaries = Canaries.draw(job.task, request.canaries, rng)
    if len(canaries.rows) < CANARIES_MIN:
        raise CommandError(
            f"{request.what}: half of its training examples are {len(canaries.rows)}; an audit needs at least "
            f"{CANARIES_MIN} canaries"
        )
    result = train_here(dataclasses.replace(job, task=canaries.task(job.task)), given, lambda event: None)
    device = torch.device(device_of(given))
    with waiting_for("the audit", "scores of the canaries are computed"):
        found = scores_of_examples(job, canaries, given.folder, device)
    claim = result.privacy
    assert claim is not None
    return _outcome(
        [Score(name, values) for name, values in found.items()],
        canaries.is_in,
        job.private.delta,
        unit="example",
        claim=float(claim["epsilon"]),
        audited=f"{count_of(result.steps, 'step')}, noise multiplier {job.private.noise_multiplier:.6g}",
    )
