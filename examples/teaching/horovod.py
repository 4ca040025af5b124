"""Data parallel training with Horovod's interface: wrap an optimizer, broadcast at the start, average; rank 0 saves.

    import examples.teaching.horovod as hvd

    hvd.init()                                              under torchrun, under mpirun, or alone
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    ...                                                     the training loop of one process, on this rank's share
    if hvd.rank() == 0:
        save(model)

Every rank holds the whole model. `mpirun` does not set the address of the rendezvous: give it `-x MASTER_ADDR
-x MASTER_PORT`.

Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
"""

import atexit
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from atoll.parallel.communication.means import PendingMean
from atoll.parallel.world import process_group, read_world

WIRES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype in which a tensor travels, by compression."""

OPS = ("average", "sum")
"""The reductions over the ranks."""

BUCKET_BYTES = 1 << 23
"""Largest size of a bucket of gradients [bytes], which is reduced while the backward pass continues."""

_opened = ExitStack()  # the process group of `init`, one in a process


def init(device: str = "cpu") -> None:
    """Join the other ranks, unless a process group exists already.

    Args:
        device: `cpu` or `cuda`.
    """
    if not dist.is_initialized():
        _opened.enter_context(process_group(read_world(), device))
        atexit.register(shutdown)


def shutdown() -> None:
    """Close the process group of `init`."""
    _opened.close()


def rank() -> int:
    """Return this process's rank, from 0."""
    return dist.get_rank()


def local_rank() -> int:
    """Return this process's rank on its machine."""
    return read_world().local_rank


def size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size()


def allreduce(tensor: torch.Tensor, average: bool = True, compression: str = "none") -> torch.Tensor:
    """Return the mean, or the sum, over the ranks of tensors of one shape.

    Raises:
        ValueError: unknown compression; the mean, or a compression, of integers.
    """
    wire = _wire(compression)
    if not tensor.is_floating_point() and (average or wire is not None):
        raise ValueError(f"allreduce: {tensor.dtype} can only be summed, and only as it is")
    return PendingMean([tensor.detach()], _world(), wire, None if average else 1).wait()[0]


def allgather(tensor: torch.Tensor) -> torch.Tensor:
    """Return all ranks' tensors, concatenated along the first axis, which alone may differ in length."""
    part = tensor.detach().reshape(-1) if tensor.dim() == 0 else tensor.detach()
    lengths = [torch.zeros(1, dtype=torch.int64, device=part.device) for _ in range(size())]
    dist.all_gather(lengths, torch.tensor([len(part)], device=part.device))
    longest = max(int(length) for length in lengths)
    padded = part.new_zeros(longest, *part.shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])


def broadcast(tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """Return the root's tensor, on every rank; all know its shape and dtype."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(result, root_rank)
    return result


def broadcast_parameters(
    parameters: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Copy the root's values into every rank's tensors, of `model.state_dict()` or `model.named_parameters()`."""
    for _, tensor in parameters.items() if isinstance(parameters, Mapping) else parameters:
        tensor.detach().copy_(broadcast(tensor, root_rank))


def broadcast_optimizer_state(optimizer: "torch.optim.Optimizer | DistributedOptimizer", root_rank: int) -> None:
    """Give every rank the root's optimizer state and settings, also those that only the root has, as after a resume.

    Values other than tensors travel as JSON: nothing received is ever unpickled.
    """
    tensors: list[torch.Tensor] = []
    described = json.dumps(_described(optimizer.state_dict(), tensors)).encode() if rank() == root_rank else b""
    length = broadcast(torch.tensor(len(described)), root_rank)
    text = torch.zeros(int(length), dtype=torch.uint8)
    if rank() == root_rank:
        text = torch.frombuffer(bytearray(described), dtype=torch.uint8)
    root_tensors = iter(tensors)

    def receive(dtype: str, shape: list[int], device: str) -> torch.Tensor:
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device=read_world().device(device))
        return broadcast(next(root_tensors, empty), root_rank)

    received = _restored(json.loads(broadcast(text, root_rank).numpy().tobytes()), receive)
    if rank() != root_rank:
        optimizer.load_state_dict(received)


class DistributedOptimizer:
    """An optimizer whose gradients are the mean, or the sum, over the ranks.

    Gradients are sent in buckets, from the last parameter to the first, as soon as a bucket and all before it are
    complete: so every rank sends them in the same order, whatever order its backward pass has. A parameter without a
    gradient counts as zeros. `step` waits for them; to clip, call `synchronize` before.

    Args:
        optimizer: over whole (not sharded) parameters. A learning rate schedule takes this one: `inner`.
        named_parameters: at least all that the optimizer trains.
        compression: none, fp16 or bf16.
        backward_passes_per_step: the number of passes whose gradients are summed on the rank before they are sent.
        op: average or sum.

    Raises:
        ValueError: unknown compression or op, passes below 1, or parameters without a name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        compression: str = "none",
        backward_passes_per_step: int = 1,
        op: str = "average",
    ) -> None:
        if op not in OPS:
            raise ValueError(f"op: must be one of {', '.join(OPS)}, got {op!r}")
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step: must be at least 1, got {backward_passes_per_step}")
        self.inner = optimizer
        self._wire, self._divisor = _wire(compression), None if op == "average" else 1
        self._passes_per_step = backward_passes_per_step
        self._names = _names_of_trained(optimizer, named_parameters)
        self._buckets = list(_buckets(reversed(self._names)))
        self._passes = dict.fromkeys(self._names, 0)
        self._pending: list[PendingMean] = []
        self._is_synchronized = False
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
        optimizer.register_step_pre_hook(lambda *_: self.synchronize())
        optimizer.register_step_post_hook(lambda *_: self._begin())

    def step(self) -> None:
        """Wait for the gradients, unless that is done, and take the inner optimizer's step."""
        self.inner.step()

    def synchronize(self) -> None:
        """Replace this rank's gradients by the reduced ones; once in a step, by all ranks."""
        if self._is_synchronized:
            return
        while len(self._pending) < len(self._buckets):
            self._send_next()
        for bucket, mean in zip(self._buckets, self._pending, strict=True):
            for parameter, gradient in zip(bucket, mean.wait(), strict=True):
                parameter.grad = gradient
        self._pending.clear()
        self._is_synchronized = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; see `torch.optim.Optimizer`."""
        self.inner.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer; see `torch.optim.Optimizer`."""
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state: the file that rank 0 saves loads without this wrapper."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the inner optimizer's state; see `torch.optim.Optimizer`."""
        self.inner.load_state_dict(state)

    def _begin(self) -> None:
        self._passes = dict.fromkeys(self._names, 0)
        self._is_synchronized = False

    def _count(self, parameter: torch.Tensor) -> None:
        self._passes[parameter] += 1
        if self._passes[parameter] > self._passes_per_step or self._is_synchronized:
            raise RuntimeError(
                f"{self._names[parameter]}: another backward pass before the step, "
                f"backward_passes_per_step is {self._passes_per_step}"
            )
        while len(self._pending) < len(self._buckets) and self._is_complete(len(self._pending)):
            self._send_next()

    def _is_complete(self, bucket: int) -> bool:
        return all(self._passes[parameter] == self._passes_per_step for parameter in self._buckets[bucket])

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._pending)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        self._pending.append(PendingMean(gradients, _world(), self._wire, self._divisor))


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _wire(compression: str) -> torch.dtype | None:
    if compression not in WIRES:
        raise ValueError(f"compression: must be one of {', '.join(WIRES)}, got {compression!r}")
    return WIRES[compression]


def _names_of_trained(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]]
) -> dict[torch.Tensor, str]:
    """Return the names of the parameters that the optimizer trains, in the given order."""
    trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    names = {parameter: name for name, parameter in named_parameters if parameter in trained}
    if nameless := [tuple(parameter.shape) for parameter in trained - names.keys()]:
        raise ValueError(f"named_parameters: {len(nameless)} of the optimizer's are missing, of shapes {nameless}")
    return names


def _buckets(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        if bucket and sum(one.nbytes for one in bucket) + parameter.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Describe a nested value in JSON; append its tensors to the list, in order."""
    match value:
        case torch.Tensor():
            tensors.append(value)
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]}
        case dict():
            return {"dict": [[key, _described(one, tensors)] for key, one in value.items()]}
        case tuple() | list():
            return {type(value).__name__: [_described(one, tensors) for one in value]}
    return value


def _restored(described: Any, receive: Callable[[str, list[int], str], torch.Tensor]) -> Any:
    """Return the value that `_described` has described, its tensors received in order."""
    if not isinstance(described, dict):
        return described
    ((kind, inside),) = described.items()
    match kind:
        case "tensor":
            return receive(*inside)
        case "dict":
            return {key: _restored(one, receive) for key, one in inside}
    return (tuple if kind == "tuple" else list)(_restored(one, receive) for one in inside)
