"""Batch norms whose statistics are those of the global batch: torch's own, on the same virtual batches, is right."""

import pytest
import torch
from torch import nn

from atoll.parallel.engine.assemble import check_model
from atoll.parallel.engine.batchnorm import Real, convert
from atoll.parallel.engine.plan import Plan
from tests.parallel.engine.cases import Case, alone, cnn_with_norms, plan, train
from tests.parallel.engine.reference import Trace
from tests.parallel.ranks import call_on_ranks

CASES = {
    case.name: case
    for case in (
        Case("ghosts, aligned", plan(dp_replicate=2, batchnorm="ghost:8"), cnn_with_norms),
        Case("ghosts over ranks", plan(dp_shard=2, batchnorm="ghost:6", recompute="full"), cnn_with_norms, last=7),
        Case("ghosts, one left", plan(dp_replicate=2, batchnorm="ghost:5"), cnn_with_norms, last=11),
        Case("ghosts, a filler", plan(dp_replicate=2, batchnorm="ghost:3"), cnn_with_norms, last=1),
        Case("sync, a filler", plan(dp_shard=2, batchnorm="sync"), cnn_with_norms, last=1),
    )
}


def on_ranks() -> dict[str, Trace]:
    return {name: train(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def traces() -> list[dict[str, Trace]]:
    return call_on_ranks(on_ranks, 2)


@pytest.mark.parametrize("name", CASES)
def test_ranks_normalize_as_one_process(name: str, traces: list[dict[str, Trace]]) -> None:
    case = CASES[name]
    expected = alone(Case(name, plan(batchnorm=case.plan.batchnorm), cnn_with_norms, last=case.last))
    for found in traces:
        assert found[name].losses == pytest.approx(expected.losses, abs=5e-6)
        for kind in ("parameters", "buffers"):
            for key, value in getattr(expected, kind).items():
                torch.testing.assert_close(getattr(found[name], kind)[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(10, 3), (10, 3, 5), (10, 3, 2, 2)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_copies_of_a_row_do_not_count(shape: tuple[int, ...], momentum: float | None) -> None:
    """Rows that fill a micro-batch up change neither the others nor the running statistics."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    torch.manual_seed(0)
    inputs = torch.randn(shape)
    expected, found = (nn.Sequential(kind(3, momentum=momentum)) for _ in range(2))
    right = expected(inputs[:7])
    convert(found, "local", None)
    Real([found]).set(7, 10)
    torch.testing.assert_close(found(inputs)[:7], right)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(found.get_buffer(name), buffer)
    Real([found]).set(0, 10)
    assert found(inputs).isfinite().all()
    assert found.get_buffer("0.num_batches_tracked") == 1


class WithActivation(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_conversion_keeps_the_object_and_refuses_a_forward_of_ones_own() -> None:
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    norm = model[1]
    norm.register_forward_hook(lambda *_: seen.append(1))
    convert(model, "ghost:2", None)
    model(torch.randn(4, 4))
    assert model[1] is norm
    assert isinstance(norm, nn.BatchNorm1d)
    assert seen == [1]
    with pytest.raises(ValueError, match=r"1 \(WithActivation\) has another one: use plan.batchnorm=local"):
        check_model(nn.Sequential(nn.Linear(4, 4), WithActivation(4)), Plan(batchnorm="sync"))
    check_model(nn.Sequential(nn.Linear(4, 4), WithActivation(4)), Plan())
