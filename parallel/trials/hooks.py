"""Trial of a custom algorithm's hooks, before a round: would a mesh compute what one process does?

Two rounds of a few steps with drawn tensors, whose shapes are those of the model, or shorter for a large one. It finds
hooks that look at batches or at the whole data, draw random numbers, or use an operation that DTensors lack or compute
otherwise.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atoll.parallel.checkpoint.state import first_names, local_state
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blank import give_memory
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from atoll.parallel.engine.ties import tied_names
from atoll.parallel.hooks import MeshClient, hooked, settled, stand_in
from atoll.task.context import Context, within
from atoll.task.errors import TaskBroken
from atoll.task.local import Local
from atoll.task.randomness import seeded
from atoll.task.task import Task
from atoll.training.local.client import Tensors
from atoll.training.model.parameters import forms_of

ROUNDS, STEPS = 2, 2

ELEMENTS_MAX = 1 << 20
"""The elements of a model that is tried with its shapes."""

UNIT_MAX = 64
"""Largest number of ranks by which the axes of a larger model are as divisible in the trial as they are."""

TOLERANCE = 1e-4
"""Largest difference of two values, as a fraction of the tensor's largest: single precision."""

WAY_OUT = "leave it out, or train in one process"

Place = Callable[[str, torch.Tensor], torch.Tensor]
"""(name, whole tensor) -> the tensor, as the mesh divides the model's tensor of this name."""


class HooksTrial:
    """The trial of a task's algorithm.

    Args:
        task: the task, with the algorithm.
        local: the settings of a round.
        outline: the model without memory.
        num_ranks: the number of ranks of the mesh; shorter axes are divisible by the same numbers of ranks.
    """

    def __init__(self, task: Task, local: Local, outline: nn.Module, num_ranks: int) -> None:
        self._task, self._local, self._outline = task, local, outline
        tensors = outline.state_dict()
        self._forms = {name: (tuple(tensors[name].shape), tensors[name].dtype) for name in forms_of(outline)}
        if sum(prod(shape) for shape, _ in self._forms.values()) > ELEMENTS_MAX:
            unit = min(num_ranks * -(-4 // num_ranks), UNIT_MAX)
            self._forms = {
                name: (tuple(n if n < 2 * unit else unit + n % unit for n in shape), dtype)
                for name, (shape, dtype) in self._forms.items()
            }

    def faults(self, context: Context) -> list[str]:
        """Return the reasons why no mesh can run the hooks, one sentence each; in this process alone."""
        return self._compared(
            lambda: (self._outcome(context, _plain, 0), self._outcome(context, _plain, 1)),
            "gives other numbers when it is repeated ({}), so each rank would have different ones",
        )

    def faults_on(self, places: Mapping[str, DTensor], mesh: object, context: Context) -> list[str]:
        """Return the sentences about results of the hooks that this mesh computes differently; every rank calls it.

        Args:
            places: tensors of the model that the mesh divides, whatever their values.
            mesh: the name of the mesh.
            context: the context of a training.
        """

        def divided(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return _divided(tensor, places[name]) if name in places else tensor.to(device)

        device = next((place.device_mesh.device_type for place in places.values()), "cpu")

        def outcomes() -> tuple[Tensors, Tensors]:
            expected = self._outcome(context, _plain, 0)
            with hooked():
                return expected, {name: whole(t).cpu() for name, t in self._outcome(context, divided, 0).items()}

        return self._compared(outcomes, f"gives other numbers on {mesh} than in one process ({{}})")

    def _compared(self, outcomes: Callable[[], tuple[Tensors, Tensors]], sentence: str) -> list[str]:
        """Compute two outcomes, and return the sentence of their first difference, or of the error.

        Args:
            outcomes: computes both.
            sentence: what the algorithm does where they differ, with a place for the tensor.
        """
        try:
            one, other = outcomes()
        except TaskBroken as fault:
            return [str(fault)]
        except Exception as error:  # the user's code runs here and may raise anything
            text = str(error).partition("\n")[0]
            return [
                f"task.algorithm: a hook of {self._named} fails on a mesh ({type(error).__name__}: {text}); {WAY_OUT}"
            ]
        if not (differing := _differing(one, other)):
            return []
        return [f"task.algorithm: {self._named} {sentence.format(differing)}; {WAY_OUT}"]

    @property
    def _named(self) -> str:
        return type(self._task.algorithm).__name__

    def _outcome(self, context: Context, place: Place, seed: int) -> Tensors:
        """Return all that the hooks compute in a few rounds, by name."""
        generator = torch.Generator().manual_seed(0)

        def drawn(name: str) -> torch.Tensor:
            shape, dtype = self._forms[name]
            values = torch.randn(shape, generator=generator)
            return place(name, values.to(dtype) if dtype.is_floating_point else values.abs().ceil().to(dtype))

        trained = {name for name, p in self._outline.named_parameters() if p.requires_grad}
        with seeded(seed), within(context):
            now = {name: nn.Parameter(drawn(name)) if name in trained else drawn(name) for name in self._forms}
            return dict(self._rounds(context, now, drawn))

    def _rounds(
        self, context: Context, now: Tensors, drawn: Callable[[str], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._task.algorithm is not None
        with hooked():
            shared = {n: settled(t) for n, t in self._task.algorithm.shared(stand_in(self._outline, now)).items()}
        state, noise = None, context.noise.again()  # whole and in shards, both from the beginning
        for number in range(ROUNDS):
            of_round = replace(context, version=context.version + number, round=context.round + number, noise=noise)
            client = MeshClient(
                self._task, self._outline, lambda: now, self._local, of_round, shared=shared, state=state
            )
            client.begin()
            for step in range(STEPS):
                for name, gradient in self._stepped(client, drawn):
                    yield f"round {number + 1}, step {step + 1}, the gradient of {name}", gradient
            client.end()
            shared, state = client.to_send(), client.to_keep()
            yield from ((f"round {number + 1}, client.shared, {name}", tensor) for name, tensor in shared.items())
            yield from ((f"round {number + 1}, client.state, {name}", tensor) for name, tensor in state.items())
            left = torch.tensor([float(name in client.leaves_out) for name in now])
            yield f"round {number + 1}, client.leaves_out", left
        client.load_evaluated()
        yield from ((f"the evaluated {name}", tensor.detach()) for name, tensor in now.items())

    def _stepped(self, client: MeshClient, drawn: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Take a step with drawn gradients; yield those that the algorithm makes of them."""
        for name, parameter in client.trained.items():
            parameter.grad = drawn(name)
        client.change_gradients()
        with torch.no_grad():
            for name, parameter in client.trained.items():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=self._local.lr)
                yield name, parameter.grad
        client.stepped()


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _divided(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return a whole tensor that all ranks have, divided as another is."""
    placements = [p if p.is_replicate() else Shard(p.dim) for p in like.placements]  # type: ignore[attr-defined]
    return distribute_tensor(tensor, like.device_mesh, placements, src_data_rank=None)


def _differing(expected: Tensors, found: Tensors) -> str:
    """Return the first tensor that differs by more than rounding; empty: none."""
    if expected.keys() != found.keys():
        return ", ".join(sorted(expected.keys() ^ found.keys())[:3])
    for name, one in expected.items():
        one, other = one.double().cpu(), found[name].double().cpu()
        largest = float(one.abs().nan_to_num(0, 0, 0).max()) if one.numel() else 0.0
        if not torch.allclose(one, other, rtol=0, atol=TOLERANCE * largest, equal_nan=True):
            return name
    return ""


def places_of(outline: nn.Module, plan: Plan, axes: Axes) -> dict[str, DTensor]:
    """Return the tensors that a mesh divides, without memory; every rank calls it.

    Args:
        outline: the model without memory, which is taken apart.
        plan: the plan of the mesh.
        axes: the axes of the mesh.
    """
    tied = first_names(tied_names(outline))
    parts = assemble(outline, plan, Optimization(loss=_never, make_optimizer=_no_optimizer), axes=axes).parts
    with FakeTensorMode(allow_non_fake_inputs=True):
        give_memory(parts, "cpu")
        return {name: t for name, t in local_state(parts, (), tied).tensors if isinstance(t, DTensor)}


def _never(_outputs: object, _targets: object) -> torch.Tensor:
    raise AssertionError("nothing is trained here")


def _no_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)
