"""Compressed gradients under DDP: communication hooks that compute the mean over the ranks from fewer bytes.

Legend: g_i rank i's gradient, C a codec, e_i the residual of rank i's codec, n ranks.

    fp16, bf16    mean of cast(g_i)                                  int8    C(mean of C(g_i)), the mean taken by chunks
    onebit        mean of C(g_i + e_i);  e_i <- g_i + e_i - C(g_i + e_i)
    powersgd      torch's: rank-r factors, the same error feedback, plain all-reduce in the first two steps

The residual e_i is in units of the gradient, belongs to one rank and one parameter, and can be saved. A gradient that
is not finite arrives as not finite, so that the step's guard sees it.

Sources: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., ICML 2019
(EF-signSGD); Vogels et al., "PowerSGD", NeurIPS 2019.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from atoll.ground.printable import count_of
from atoll.parallel.communication import blocks
from atoll.parallel.communication.compression import MIN_SAVING, parse_compression

Mean = torch.futures.Future[torch.Tensor]
State = dict[str, torch.Tensor]

RESIDUAL = "residual/"
"""The prefix of the residuals' names in a checkpoint."""
PLAIN_STEPS = 2
"""Steps of plain all-reduce: DDP rebuilds its buckets after the first step, and PowerSGD has state by bucket."""


class HookState(Protocol):
    """The state of a hook from step to step on one rank."""

    def state_dict(self) -> State:
        """Return the tensors to save, by name."""

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state of the same parameters; raise ValueError for other names or shapes."""


def register(
    ddp: DistributedDataParallel, compression: str, process_group: dist.ProcessGroup | None = None
) -> HookState | None:
    """Let DDP reduce its gradients with a compression; once for each model, before its first backward pass.

    Args:
        ddp: the wrapped model.
        compression: none, fp16, bf16, int8, onebit or powersgd:RANK.
        process_group: the group of `ddp`; None for all ranks.

    Returns:
        The state to save for an exact resume; None if the hook has none.

    Raises:
        ValueError: no such compression.
    """
    chosen = parse_compression(compression)
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None
    names = {parameter: name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
    match chosen.name:
        case "fp16" | "bf16":
            dtype = torch.float16 if chosen.name == "fp16" else torch.bfloat16
            ddp.register_comm_hook(_Cast(group, dtype), _cast_hook)
        case "int8":
            ddp.register_comm_hook(group, _int8_hook)
        case "onebit":
            one_bit = OneBit(group, names)
            ddp.register_comm_hook(one_bit, _onebit_hook)
            return one_bit
        case "powersgd":
            power_sgd = PowerSgd(group, names, chosen.rank)
            ddp.register_comm_hook(power_sgd, _powersgd_hook)
            return power_sgd
    return None


@dataclass(frozen=True, slots=True)
class _Cast:
    group: dist.ProcessGroup
    dtype: torch.dtype


def _cast_hook(to: _Cast, bucket: GradBucket) -> Mean:
    buffer = bucket.buffer()
    sent = (buffer / to.group.size()).to(to.dtype)  # divided first: the sum of halves overflows early
    future: Mean = dist.all_reduce(sent, group=to.group, async_op=True).get_future()
    return future.then(lambda _: buffer.copy_(sent))


def _int8_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Mean:
    """Let each rank take the mean of its chunk; a chunk is encoded once on its way there and once back."""
    buffer = bucket.buffer()
    sent = blocks.encode_int8(blocks.as_blocks(buffer, group.size()))
    received = torch.empty_like(sent)
    future: Mean = dist.all_to_all_single(received, sent, group=group, async_op=True).get_future()

    def spread(_: object) -> torch.Tensor:
        mean = blocks.encode_int8(blocks.decode_int8(received).mean(dim=0, keepdim=True))
        dist.all_gather(list(received.unbind()), mean[0], group=group, async_op=True).get_future().wait()
        return buffer.copy_(blocks.decode_int8(received).view(-1)[: buffer.numel()])

    return _in_order(future.then(spread), buffer)


@dataclass(eq=False, slots=True)
class OneBit:
    """The residuals of the signs, by parameter: flat, float32."""

    group: dist.ProcessGroup
    names: Mapping[torch.Tensor, str]
    residuals: State = field(default_factory=dict)

    def state_dict(self) -> State:
        """Return the residuals; see `HookState`."""
        return {RESIDUAL + name: residual.clone() for name, residual in self.residuals.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the residuals; see `HookState`."""
        self.residuals = _residuals(state, self.names)


def _onebit_hook(state: OneBit, bucket: GradBucket) -> Mean:
    buffer, num_ranks = bucket.buffer(), state.group.size()
    wanted = buffer.float() + _gathered(state.residuals, state.names, bucket)
    sent = blocks.encode_signs(blocks.as_blocks(wanted, 1), wanted.numel())
    remainder = wanted - blocks.decode_signs(sent).view(-1)[: wanted.numel()]
    remainder.nan_to_num_(0, 0, 0)  # the residual of an overflow is 0: it would persist forever
    for parameter, residual in zip(bucket.parameters(), torch.split(remainder, _sizes(bucket)), strict=True):
        state.residuals[state.names[parameter]] = residual
    received = sent.new_empty(num_ranks, sent.shape[1])
    future: Mean = dist.all_gather(list(received.unbind()), sent[0], group=state.group, async_op=True).get_future()
    return future.then(lambda _: buffer.copy_(blocks.decode_signs(received).mean(dim=0).view(-1)[: buffer.numel()]))


class PowerSgd:
    """The state of torch's hook, with the residuals of its error feedback by parameter instead of by bucket.

    A process that resumes from a checkpoint has other buckets than the one that wrote it, until DDP has rebuilt them: a
    loaded state waits for that in two steps of plain all-reduce. The factors of the step before, a warm start, are
    drawn again then.
    """

    def __init__(self, group: dist.ProcessGroup, names: Mapping[torch.Tensor, str], rank: int) -> None:
        self.names = names
        self.loaded: State = {}
        self.layout: dict[int, list[tuple[str, int]]] = {}  # by bucket: its parameters and their sizes
        self.torch_state = torch_powersgd.PowerSGDState(
            group, rank, start_powerSGD_iter=PLAIN_STEPS, min_compression_rate=MIN_SAVING
        )

    def state_dict(self) -> State:
        """Return the residuals; see `HookState`."""
        state = {RESIDUAL + name: residual.clone() for name, residual in self.loaded.items()}
        for index, errors in self.torch_state.error_dict.items():
            names, sizes = zip(*self.layout[index], strict=True)
            for name, error in zip(names, torch.split(errors, list(sizes)), strict=True):
                state[RESIDUAL + name] = error.clone()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the residuals, and restart torch's state; see `HookState`."""
        self.loaded = _residuals(state, self.names)
        for by_bucket in (self.torch_state.error_dict, self.torch_state.p_memory_dict, self.torch_state.q_memory_dict):
            by_bucket.clear()
        self.torch_state.iter = 0


def _powersgd_hook(state: PowerSgd, bucket: GradBucket) -> Mean:
    torch_state, index, buffer = state.torch_state, bucket.index(), bucket.buffer()
    if torch_state.iter >= PLAIN_STEPS and index not in torch_state.error_dict:
        names = [state.names[parameter] for parameter in bucket.parameters()]
        state.layout[index] = list(zip(names, _sizes(bucket), strict=True))
        torch_state.error_dict[index] = _gathered(state.loaded, state.names, bucket).to(buffer.dtype)
        for name in names:
            state.loaded.pop(name, None)
    return _in_order(torch_powersgd.powerSGD_hook(torch_state, bucket), buffer)


def _in_order(future: Mean, buffer: torch.Tensor) -> Mean:
    """Return a future whose collectives run in the same order on every rank.

    A hook with two collectives starts the second when the first has ended. NCCL runs such callbacks at once, in the
    order of the buckets; gloo when the first has really ended, so that one rank may start bucket 1's second collective
    before bucket 0's, and another rank not: they would reduce one with the other. So on a CPU the hook waits for each
    bucket.
    """
    if buffer.device.type == "cpu":
        future.wait()
    return future


def _sizes(bucket: GradBucket) -> list[int]:
    return [parameter.numel() for parameter in bucket.parameters()]


def _gathered(
    residuals: Mapping[str, torch.Tensor], names: Mapping[torch.Tensor, str], bucket: GradBucket
) -> torch.Tensor:
    """Return the residuals of a bucket's parameters in its order; zeros for those without one."""
    device = bucket.buffer().device
    found = ((residuals.get(names[parameter]), parameter.numel()) for parameter in bucket.parameters())
    return torch.cat([torch.zeros(size, device=device) if one is None else one.to(device) for one, size in found])


def _residuals(state: Mapping[str, torch.Tensor], names: Mapping[torch.Tensor, str]) -> State:
    """Return the residuals of a saved state, by parameter.

    Raises:
        ValueError: a name that is no parameter's, or another size; all of them at once.
    """
    sizes = {RESIDUAL + name: parameter.numel() for parameter, name in names.items()}
    faults = [
        f"{name} of {count_of(t.numel(), 'element')}" for name, t in state.items() if sizes.get(name) != t.numel()
    ]
    if faults:
        raise ValueError(f"residuals: not of this model: {', '.join(faults)}")
    return {name.removeprefix(RESIDUAL): tensor.detach().float().flatten().clone() for name, tensor in state.items()}
