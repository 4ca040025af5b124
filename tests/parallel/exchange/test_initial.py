"""The initial values of a blank model are those of a plain construction, to the bit, one parameter at a time."""

import copy
import io
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blank import give_memory
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.ties import tied_names
from atoll.parallel.exchange import initial
from atoll.parallel.exchange.initial import NotRepeatable, blank_of, fill
from atoll.parallel.exchange.shares import shares_of
from atoll.training.model.parameters import parameters_of
from tests.parallel.exchange.layouts import LAYOUTS
from tests.parallel.ranks import call_on_ranks


class FilledAgain(nn.Module):
    """As Hugging Face does: the layers fill themselves, and at the end the model fills them once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.LayerNorm(16)
        self.apply(self._fill)

    @staticmethod
    def _fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            nn.init.zeros_(module.bias)


class Odd(nn.Module):
    """Each way to fill a parameter that comes to mind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.rand(3))
        self.register_buffer("table", torch.rand(4), persistent=False)
        self.drawn = nn.Parameter(torch.randn(5, 3))
        self.truncated = nn.Parameter(torch.empty(7, 3))
        nn.init.trunc_normal_(self.truncated, std=0.3)
        self.orthogonal = nn.Parameter(torch.empty(4, 4))
        nn.init.orthogonal_(self.orthogonal)
        self.scaled = nn.Linear(4, 4)
        with torch.no_grad():
            self.scaled.weight.mul_(0.5)
            self.scaled.weight[0] = 1.0
            self.scaled.bias.copy_(self.scaled.weight[1])
        self.replaced = nn.Parameter(self.drawn.detach() * 2)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.listed = nn.ParameterList([torch.ones(2), torch.zeros(3)])
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.recurrent = nn.GRU(3, 4, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2)
        self.normalized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.bfloat = nn.Parameter(torch.randn(3).bfloat16())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


@pytest.mark.parametrize("make", [FilledAgain, Odd, LAYOUTS["norms, shards"][0], LAYOUTS["tied, shards of tensor"][0]])
def test_all_values_are_those_of_a_plain_construction(make: Callable[[], nn.Module]) -> None:
    expected = seeded(make)
    state = torch.get_rng_state()
    notes = blank_of(lambda: seeded(make))
    model = notes.model
    assert all(parameter.is_meta for parameter in model.parameters())
    tied = tied_names(model)
    give_memory([model], "cpu")
    fill(shares_of([model], None, tied), [model], notes, lambda: seeded(make))
    assert torch.equal(torch.get_rng_state(), state), "what is drawn next is the same, too"
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in (dict(expected.named_parameters()) | dict(expected.named_buffers())).items():
        assert torch.equal(found[name], tensor), name
        assert found[name].requires_grad == tensor.requires_grad, name
    assert tied_names(model) == tied_names(expected)


@pytest.mark.parametrize("make", [FilledAgain, LAYOUTS["shards"][0]])
def test_one_parameter_at_a_time_has_memory(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    close = initial._Filling._close

    def measured(self: Any, numbers: set[int]) -> None:
        nonlocal most
        most = max(most, sum(tensor.untyped_storage().nbytes() for tensor in self._watching.tensors))
        close(self, numbers)

    monkeypatch.setattr(initial._Filling, "_close", measured)
    notes = blank_of(lambda: seeded(make))
    tied, model = tied_names(notes.model), notes.model
    give_memory([model], "cpu")
    fill(shares_of([model], None, tied), [model], notes, lambda: seeded(make))
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    assert max(sizes) <= most <= 2 * max(sizes)
    assert sum(sizes) > 4 * most


def test_a_model_that_is_built_in_another_way_is_noticed() -> None:
    widths = iter((3, 4, 5))
    with pytest.raises(NotRepeatable, match="weight differs from the first construction"):
        filled(lambda: nn.Linear(3, next(widths)))
    numbers = iter((2, 1, 1))
    with pytest.raises(NotRepeatable, match=r"1\.weight differs from the first construction"):
        filled(lambda: nn.ModuleList(nn.Linear(3, 3) for _ in range(next(numbers))))
    with pytest.raises(NotRepeatable, match=r"1\.rate has another value in each construction: register"):
        filled(lambda: seeded(lambda: nn.Sequential(nn.Linear(3, 3), with_attribute("rate", torch.rand(()).item()))))


def with_attribute(name: str, value: Any) -> nn.Module:
    model = nn.Linear(3, 3)
    setattr(model, name, value)
    return model


def filled(make: Callable[[], nn.Module]) -> nn.Module:
    notes = blank_of(make)
    give_memory([notes.model], "cpu")
    fill(shares_of([notes.model], None, tied_names(notes.model)), [notes.model], notes, make)
    return notes.model


class Written(nn.Module):
    """A parameter that no registration shows."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters["weight"] = nn.Parameter(torch.randn(3, 2))


class Holding(nn.Module):
    """A layer, and something beside the parameters that was made from it."""

    def __init__(self, hold: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.__dict__["held"] = hold(self.layer)


class Outside(nn.Module):
    """Values that live on beside the model, and a buffer made of them."""

    values: ClassVar[Any] = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.layer.load_state_dict(self.values, assign=True)
        self.register_buffer("mean", self.layer.weight.detach().mean(0), persistent=False)


def copied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))


def unpickled() -> nn.Module:
    file = io.BytesIO()
    torch.save(nn.Linear(3, 3), file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    assert isinstance(model, nn.Module)
    return model


def hooked() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda gradient: gradient * 0)
    return model


def replaced_data() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.data = torch.randn(3, 3)
    return model


def tied_late() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def lazy() -> nn.Module:
    model = nn.LazyLinear(3)
    model(torch.randn(2, 5))
    return model


def from_buffer() -> nn.Module:
    model = nn.Module()
    model.register_buffer("table", torch.randn(3))
    model.weight = nn.Parameter(model.get_buffer("table"))
    return model


def with_attributes() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.rate = 0.5  # type: ignore[assignment]
    return model


FOLLOWED: dict[str, Callable[[], nn.Module]] = {
    "tied late": tied_late,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "lists": lambda: nn.ParameterDict({"a": torch.randn(2), "b": nn.Parameter(torch.randn(3).t())}),
    "attributes": with_attributes,
    "a frozen copy": lambda: Holding(lambda layer: [copy.deepcopy(nn.Linear(2, 2)).bias is None]),
    "transposed": lambda: nn.ParameterList([torch.randn(4, 3).t(), torch.randn(2, 3, 4, 4)]),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "outside": Outside,
    "from a buffer": from_buffer,
    "copied": copied,
    "a transformer": lambda: nn.Transformer(8, 2, 1, 2, 16),
    "written": Written,
    "channels last": lambda: nn.Sequential(nn.Conv2d(2, 3, 2)).to(memory_format=torch.channels_last),
    "half": lambda: nn.Linear(3, 3).bfloat16(),
    "unpickled": unpickled,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    "hooked": hooked,
    "replaced data": replaced_data,
    "lazy": lazy,
    "holds a parameter": lambda: Holding(lambda layer: nn.Parameter(layer.weight.detach().clone())),
    "holds a statistic": lambda: Holding(lambda layer: layer.weight.detach().std()),
    "holds a module": lambda: Holding(lambda _layer: [nn.Linear(3, 3)]),
    "an old norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "reads values": lambda: with_attribute("norm", nn.Linear(3, 3).weight.norm().item()),
}


@pytest.mark.parametrize("name", [*FOLLOWED, *WHOLE])
def test_a_model_that_cannot_be_followed_is_built_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "WHOLE_MAX", 0)
    make = partial(seeded, (FOLLOWED | WHOLE)[name])
    notes = initial.blank_or_none(make)
    assert (notes is None) == (name in WHOLE)
    if notes is None:
        return
    found, expected = filled(make), make()
    for (key, tensor), (same, value) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        assert key == same
        assert torch.equal(tensor, value), key
    for mine, plain in zip(found.parameters(), expected.parameters(), strict=True):
        assert vars(mine) == vars(plain)
    for (key, buffer), value in zip(found.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, value), key


def test_memory_that_nothing_fills_is_seen_and_the_model_is_built_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = blank_of(lambda: seeded(FilledAgain))
    give_memory([notes.model], "cpu")
    assert all(parameter.isnan().all() for parameter in notes.model.parameters())
    notes.places[3].clear()  # as if a construction had not shown one
    fill(shares_of([notes.model], None), [notes.model], notes, lambda: seeded(FilledAgain))
    for mine, plain in zip(notes.model.parameters(), seeded(FilledAgain).parameters(), strict=True):
        assert torch.equal(mine, plain)


def test_a_small_model_is_built_whole() -> None:
    assert initial.blank_or_none(FilledAgain) is None


def test_a_model_that_needs_values_cannot_be_blank_of() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            if self.layer.weight.sum().item() > 0:
                self.layer.bias.data.zero_()

    with pytest.raises((RuntimeError, NotImplementedError)):
        blank_of(Decides)


def on_a_rank(name: str) -> list[str]:
    make, degrees, options = LAYOUTS[name]
    expected = make()
    whole, tables = parameters_of(expected), dict(expected.named_buffers())
    notes = blank_of(make)
    tied = tied_names(notes.model)
    plan = Plan(mesh=Mesh(**degrees), **options)
    axes = Axes(plan.mesh, "cpu")
    loss = torch.nn.functional.cross_entropy
    step = Optimization(loss=loss, make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    engine = assemble(notes.model, plan, step, axes=axes)
    give_memory(engine.parts, "cpu")
    shares = shares_of(engine.parts, axes, tied)
    fill(shares, engine.parts, notes, make)
    wrong = [share.name for share in shares if not (share.local.numpy() == whole[share.name][share.slices]).all()]
    buffers = [(name, b) for part in engine.parts for name, b in part.named_buffers()]
    same = sum(any(torch.equal(b, table) for table in tables.values() if table.shape == b.shape) for _, b in buffers)
    return wrong + ["a table"] * (len(buffers) - same)


@pytest.mark.real
@pytest.mark.parametrize("name", ["shards", "copies of shards of tensor", "tied, stages of shards", "norms, shards"])
def test_the_shards_of_a_mesh_have_the_values_of_a_plain_construction(name: str) -> None:
    assert call_on_ranks(on_a_rank, prod(LAYOUTS[name][1].values()), name) == [[]] * prod(LAYOUTS[name][1].values())
