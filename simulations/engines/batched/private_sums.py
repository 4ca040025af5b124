r"""The sums of clipped example gradients of many clients at once, each client with its weights.

    S_k = sum_i g_ki min(1, C / ||g_ki||)          k: client, i: a row of its sample

captured   one forward pass of all clients by `torch.func.vmap`, one backward pass to the outputs of the layers with
           trained parameters. Norms and sums follow from what these layers take and give back, as in
           `training/private/captured_gradients`: no gradient of a row exists for linear layers, convolutions in two
           dimensions and embeddings.
by row     vmap over clients of vmap over rows of the gradient, as in `training/private/example_gradients`: for any
           other use of a parameter.

A zero that is added to a layer's output has the output's gradient: so public functions of torch reach inside of the
map. Samples differ in size: a client's rows beyond its sample count for nothing.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.simulations.engines.batched.outputs import by_client, check_rows, filled
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.batched.stacked_layers import keep_in_range
from atoll.training.data.trees import tensors
from atoll.training.private.captured_gradients import (
    NotCaptured,
    check_call,
    factors_of_uses,
    gradients_of_any,
    losses_of,
    trained_modules,
    uses_of,
)
from atoll.training.private.example_gradients import Gradients, Loss, clip_factors
from atoll.training.private.uses import Uses, Whole, squares_of
from atoll.training.trials.contract import one_loss

CAPTURED, BY_ROW = "captured", "by row"

BYTES_MAX = 64 << 20
"""Most memory of what a pass needs for the example gradients of all clients [bytes]; more rows take more passes."""

_COPIES = 3
"""Tensors of the size of an example's gradient, or of a layer's inputs and outputs, that exist at once."""


class ClientSums:
    """The clipped sums of clients.

    Args:
        model: the model, in training mode on its device; its trained values are not read.
        loss: the loss of a row.
        clip_norm: C, above 0.
    """

    def __init__(self, model: nn.Module, loss: Loss, clip_norm: float) -> None:
        self._model, self._loss, self._clip_norm = model, loss, clip_norm
        self._names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._row_bytes = 0
        keep_in_range(model)

    def sums(self, values: Gradients, inputs: torch.Tensor, targets: torch.Tensor, is_real: torch.Tensor) -> Gradients:
        """Return the clipped sums of a step, float64 (m, *shape) by the parameter's name, from passes that fit.

        Args:
            values: the trained parameters of each client (m, *shape).
            inputs: the inputs of the clients' rows (m, n, ...).
            targets: the targets, likewise.
            is_real: the rows of the samples (m, n); the others count for nothing.

        Raises:
            CannotBatch: the model's outputs have no row for each example.
        """
        clients, rows = is_real.shape
        total = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in values.items()}
        if not rows:
            return total
        self._row_bytes = self._row_bytes or self._bytes_of_row(values, inputs, targets)
        at_once = max(1, BYTES_MAX // (clients * self._row_bytes))
        for begin in range(0, rows, at_once):
            part = slice(begin, begin + at_once)
            with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no rule for batches of batches
                found = self._pass(values, inputs[:, part], targets[:, part], is_real[:, part])
            for name, each in found.items():
                total[name] += each
        return total

    def _bytes_of_row(self, values: Gradients, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        """Return the memory that a pass needs for a row of a client."""
        raise NotImplementedError

    def _pass(self, values: Gradients, inputs: torch.Tensor, targets: torch.Tensor, is_real: torch.Tensor) -> Gradients:
        """Return the sums of some rows of each client."""
        raise NotImplementedError


class SumsByRow(ClientSums):
    """The clipped sums from the gradients of all rows; see the module."""

    def _bytes_of_row(self, values: Gradients, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        """Return the size of the copies of a row's gradient."""
        return _COPIES * sum(each[0].numel() * each.element_size() for each in values.values())

    def _pass(self, values: Gradients, inputs: torch.Tensor, targets: torch.Tensor, is_real: torch.Tensor) -> Gradients:
        """Return the sums of some rows of each client."""

        def loss_of(values: Gradients, row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            outputs = functional_call(self._model, values, (row.unsqueeze(0),))
            return one_loss(self._loss(outputs, target.unsqueeze(0)))

        of_rows = vmap(vmap(grad(loss_of), in_dims=(None, 0, 0)))
        with warnings.catch_warnings():  # of operations that vmap calls row by row, such as recurrent layers
            warnings.filterwarnings("ignore", message=".*batching rule.*", category=UserWarning)
            found = {name: each.detach().flatten(0, 1) for name, each in of_rows(values, inputs, targets).items()}
        factors = clip_factors(found, self._clip_norm) * is_real.flatten()
        return {name: Whole(each).weighted_in(len(is_real), factors) for name, each in found.items()}


class SumsOfCaptured(ClientSums):
    """The clipped sums from what layers take and give back; see the module."""

    def __init__(self, model: nn.Module, loss: Loss, clip_norm: float) -> None:
        super().__init__(model, loss, clip_norm)
        self._modules = trained_modules(model)
        self._shapes: list[torch.Size] = []
        """The shape of a row of each captured output, in the order of the calls."""

    def _bytes_of_row(self, values: Gradients, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        """Run the model on one row; note the shapes of the layers' outputs, and return the size of a row's tensors."""
        kept: list[tuple[str, torch.Tensor]] = []

        def note(output: torch.Tensor) -> torch.Tensor:
            self._shapes.append(output.shape[1:])
            return output

        with torch.no_grad(), _capturing(self._modules, 1, kept, note):
            functional_call(self._model, {name: each[0] for name, each in values.items()}, (inputs[0, :1],))
        sizes = [a.nbytes + 4 * shape.numel() for (_, a), shape in zip(kept, self._shapes, strict=True)]
        for (name, _), shape in zip(kept, self._shapes, strict=True):
            module = self._modules[name]
            if isinstance(module, nn.Conv2d):
                sizes.append(4 * module.weight[0].numel() * shape[1:].numel())  # the patches of all positions
            elif not isinstance(module, nn.Linear | nn.Embedding):
                sizes.append(4 * sum(p.numel() for p in module.parameters(recurse=False)))
        return _COPIES * sum(sizes)

    def _pass(self, values: Gradients, inputs: torch.Tensor, targets: torch.Tensor, is_real: torch.Tensor) -> Gradients:
        """Return the sums of some rows of each client."""
        clients = len(is_real)
        uses = self._uses(values, inputs, targets)
        squares = torch.stack([squares_of(of_parameter) for of_parameter in uses.values()]).sum(0)
        factors = factors_of_uses(uses, squares, self._clip_norm, ~squares.isfinite() | ~is_real.flatten())
        found = {
            name: [use.weighted_in(clients, factors) for use in of_parameter] for name, of_parameter in uses.items()
        }
        return {name: reduce(torch.add, each).view(values[name].shape) for name, each in found.items()}

    def _uses(self, values: Gradients, inputs: torch.Tensor, targets: torch.Tensor) -> Uses:
        """Return the uses of each parameter by the rows (m n, ...) of all clients."""
        clients, rows = inputs.shape[:2]
        zeros = [inputs.new_zeros(clients, rows, *shape, dtype=torch.float32) for shape in self._shapes]
        zeros = [each.requires_grad_() for each in zeros]
        form, called = list[Any](), list[str]()

        def alone(values: Gradients, x: torch.Tensor, zeros: Sequence[torch.Tensor]) -> tuple[Any, ...]:
            kept: list[tuple[str, torch.Tensor]] = []
            each_zero = iter(zeros)
            with _capturing(self._modules, rows, kept, lambda output: output + next(each_zero)):
                outputs = functional_call(self._model, values, (x,))
            form.append(outputs)
            called.extend(name for name, _ in kept)
            found = tuple(tensors(outputs))
            for each in found:  # what else there is, such as a cache of keys and values, no loss of a row reads
                check_rows(each, rows)
            return found, tuple(a for _, a in kept)

        found, taken = vmap(alone)(values, inputs, zeros)
        outputs = filled(form[0], (each.flatten(0, 1) for each in found))
        total = losses_of(self._loss, outputs, targets.flatten(0, 1), clients * rows).sum()
        gradients = torch.autograd.grad(total, zeros, allow_unused=True)
        uses: Uses = {}
        for name, a, g in zip(called, taken, gradients, strict=True):
            if g is None:  # an output that the loss does not read
                continue
            module = self._modules[name]
            trained = {n: self._names[id(p)] for n, p in module.named_parameters(recurse=False) if id(p) in self._names}
            rest = _rest_of(module, {n: values[full] for n, full in trained.items()})
            rows_of_all = a.detach().flatten(0, 1), g.flatten(0, 1)
            for own, use in uses_of(type(module), module, trained, *rows_of_all, rest):
                uses.setdefault(trained[own], []).append(use)
        if not uses:
            raise CannotBatch("the loss depends on no layer with trained parameters")
        return uses


KINDS: dict[str, type[ClientSums]] = {CAPTURED: SumsOfCaptured, BY_ROW: SumsByRow}
"""The ways to the sums, in the order of the trials."""


def _rest_of(module: nn.Module, values: Gradients) -> Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the function of the gradients of all clients' rows of a module, from inputs and output gradients."""

    def rest(a: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
        clients = len(next(iter(values.values())))
        of_clients = vmap(lambda values, a, g: gradients_of_any(module, values, a, g))
        found = of_clients(values, by_client(a, clients), by_client(g, clients))
        return {name: each.flatten(0, 1) for name, each in found.items()}

    return rest


@contextmanager
def _capturing(
    modules: Mapping[str, nn.Module],
    rows: int,
    kept: list[tuple[str, torch.Tensor]],
    changed: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Keep the inputs of some modules in the block, and replace their outputs.

    Args:
        modules: the modules by name.
        rows: the rows of the forward pass.
        kept: the list to which each call appends the module's name and its inputs.
        changed: the output that takes the place of an output.

    Raises:
        CannotBatch: by a call with other inputs or outputs than one tensor of rows.
    """

    def keeping(name: str) -> Callable[[nn.Module, Any, Any, Any], torch.Tensor]:
        def keep(module: nn.Module, inputs: Any, named: Any, output: Any) -> torch.Tensor:
            try:
                check_call(name, inputs, named, output, rows)
            except NotCaptured as error:
                raise CannotBatch(str(error)) from error
            kept.append((name, inputs[0]))
            return changed(output)

        return keep

    handles = [module.register_forward_hook(keeping(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
