"""Tensors that a plan cannot train are named, with the way out, before any process group exists."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.parallel.engine.admissible import fit
from atoll.parallel.engine.assemble import assemble, check_model
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.training.model.parameters import overlaps_itself
from tests.parallel.engine import odd_models, reference
from tests.parallel.engine.cases import mine, mlp, plan, tied_blocks

SHARDED, COPIED, CUT = plan(dp_shard=2), plan(dp_replicate=2), plan(pp=2)
ONE = Plan()


def with_parameter(make: Callable[[nn.Sequential], torch.Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].extra = nn.Parameter(make(model))
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))


def lazy_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d())


def expanded() -> nn.Module:
    return with_parameter(lambda _: torch.zeros(1).expand(4))


def windows() -> nn.Module:
    return with_parameter(lambda _: torch.zeros(6).unfold(0, 3, 1))


def tied_by_view() -> nn.Module:
    return with_parameter(lambda model: model.get_parameter("1.weight").data.t())


def tied_across() -> nn.Module:
    return with_parameter(lambda model: model.get_parameter("1.weight").data[1])


def mixed() -> nn.Module:
    return with_parameter(lambda _: torch.zeros(4, dtype=torch.bfloat16))


def mixed_between_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.float64))


def bounded() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 2))


def bounded_bag() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.EmbeddingBag(5, 4, max_norm=0.5)))


def neighbours() -> nn.Module:
    """Two halves of one memory, as cuDNN has the weights of a recurrent layer, side by side in each row."""
    model, flat = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)), torch.zeros(4, 6)
    model[0].weight, model[1].weight = nn.Parameter(flat[:, :3]), nn.Parameter(flat[:, 3:])
    return model


@pytest.mark.parametrize("is_meta", [False, True], ids=["values", "meta"])
@pytest.mark.parametrize(
    ("make", "plans", "words"),
    [
        (lazy, [ONE, COPIED, SHARDED, CUT], r"0\.weight, 0\.bias have no shape before the first batch.*nn\.Linear"),
        (lazy_norm, [ONE, COPIED, SHARDED], r"1\.weight, 1\.bias, 1\.running_mean and 1 more have no shape"),
        (expanded, [ONE, COPIED, SHARDED, CUT], r"0\.extra: several elements share one place.*clone\(\)"),
        (windows, [ONE, SHARDED], r"0\.extra: several elements share one place"),
        (tied_by_view, [SHARDED, CUT, plan(zero=3)], r"0\.extra and 1\.weight are views of one memory.*clone\(\)"),
        (tied_across, [SHARDED, CUT], r"0\.extra and 1\.weight are views of one memory"),
        (mixed, [SHARDED, plan(zero=1)], r"0 mixes dtypes.*0\.weight is float32, 0\.extra is bfloat16"),
        (bounded, [COPIED, SHARDED, CUT, plan(zero=3)], r"0: max_norm=1 changes the weight.*without max_norm"),
        (bounded_bag, [COPIED, SHARDED, CUT], r"1\.0: max_norm=0\.5"),
    ],
)
def test_a_tensor_that_a_plan_cannot_train_is_named(
    make: Callable[[], nn.Module], plans: list[Plan], words: str, is_meta: bool
) -> None:
    with torch.device("meta" if is_meta else "cpu"):
        model = make()
    for each in plans:
        with pytest.raises(ValueError, match=words):
            check_model(model, each)


@pytest.mark.parametrize(
    ("make", "plans"),
    [
        (odd_models.odd, [ONE, COPIED, SHARDED, CUT]),
        (mlp, [ONE, COPIED, SHARDED, CUT]),
        (tied_blocks, [ONE, COPIED, SHARDED]),
        (tied_by_view, [ONE, COPIED]),
        (mixed, [ONE, COPIED, CUT]),
        (mixed_between_blocks, [ONE, COPIED, SHARDED]),
        (bounded, [ONE, plan(accumulate=2)]),
        (neighbours, [ONE, COPIED, SHARDED]),
    ],
)
def test_all_others_may_begin(make: Callable[[], nn.Module], plans: list[Plan]) -> None:
    for each in plans:
        check_model(make(), each)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).t(),
        torch.zeros(1).expand(4),
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(1).expand(1),
        torch.zeros(9).unfold(0, 3, 1),
        torch.zeros(9).unfold(0, 3, 3),
        torch.zeros(4, 6)[::2, 1::2],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(()),
        torch.zeros(0, 3),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_a_tensor_overlaps_itself_if_it_has_fewer_places_than_elements(tensor: torch.Tensor) -> None:
    storage = torch.arange(tensor.untyped_storage().nbytes() // 4)
    places = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    assert overlaps_itself(tensor) == (len(set(places)) < tensor.numel())


def test_tensors_made_fit_keep_values_names_and_objects() -> None:
    model, before = odd_models.odd(), odd_models.odd()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    fit(model, SHARDED)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is parameters[name]
        assert parameter.is_contiguous()
    for name, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert not any(overlaps_itself(buffer) for buffer in model.buffers())


def test_dense_gradients_of_an_embedding_train_as_torchs_sparse_ones_do() -> None:
    """SGD with momentum is the one optimizer of the trainer that torch lets step along sparse gradients."""
    model, batches = odd_models.unshared(), reference.image_batches()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = assemble(
        odd_models.unshared(),
        Plan(),
        Optimization(
            loss=nn.functional.cross_entropy,
            make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        ),
    )
    for inputs, targets in batches:
        plain.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        assert any(p.grad is not None and p.grad.is_sparse for p in model.parameters())
        plain.step()
        engine.step(mine(inputs, targets, None))
    for name, value in model.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(engine.parameters[name], value, rtol=1e-5, atol=1e-6)
