"""Models from descriptions of plain values: blocks, and the odd ways in which their tensors come to be and are used."""

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from atoll.parallel.engine.blueprint import Blueprint, Styles

WIDTH, LENGTH, FEATURES, WORDS, CLASSES = 8, 4, 5, 11, 3
"""The hidden width, the positions of an example, the features of one, the words and the classes."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Block:
    """A block, which maps (B, LENGTH, WIDTH) to the same shape."""

    kind: str
    made: str = "plain"
    """How its tensors come to be, a key of `MADE`."""


@dataclass(frozen=True)
class Description:
    """A model: an entry, blocks and a head."""

    seed: int
    shape: str
    """sequential: an `nn.Sequential`; own: a module without a blueprint; declared: one with a blueprint."""
    entry: str
    """features: a linear layer; words: an embedding; sparse: one with sparse gradients."""
    blocks: tuple[Block, ...]
    sharing: str = "none"
    """none, weights (of two linear blocks), module (the first block once more at the end), head (with an embedding)."""
    hooks: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    frozen: str = "none"
    """none, entry (which does not train), reference (a frozen deep copy of the first block is added to it)."""
    dtype: str = "float64"
    dropout: float = 0.0


class Residual(nn.Module):
    """A residual block of two linear layers, which tp can divide."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(torch.tanh(self.wide(x))))


class Plain(nn.Module):
    """A linear layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class InPlace(nn.Module):
    """A linear layer whose result an activation changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.ELU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.activation(self.linear(x))
        return found


class Convolution(nn.Module):
    """A convolution over the positions as a picture of 2 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picture = x.transpose(1, 2).reshape(-1, WIDTH, 2, 2)
        return x + torch.tanh(self.conv(picture)).flatten(2).transpose(1, 2)


class Norm(nn.Module):
    """A norm over the width."""

    def __init__(self, norm: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.norm, self.is_last = norm, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x) if self.is_last else self.norm(x.transpose(1, 2)).transpose(1, 2)
        return found


class Attention(nn.Module):
    """Self-attention with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer with a residual."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x)[0]


class Mixture(nn.Module):
    """Two experts, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[..., [index]] * expert(x) for index, expert in enumerate(self.experts))


class Scaled(nn.Module):
    """Parameters outside of any layer: a scalar, a vector and a matrix with transposed memory."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.randn(WIDTH) / 4)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x + x @ self.matrix + self.shift


class Listed(nn.Module):
    """Parameters in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(WIDTH) / 4) for _ in range(2)])
        self.tables = nn.ParameterDict({"mix": nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rows[0] + self.rows[1] + x @ self.tables["mix"]


class Tagged(nn.Module):
    """A linear layer whose parameter has an attribute, which forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.factor = 0.5  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor: float = self.linear.weight.factor  # type: ignore[assignment]
        return x + factor * self.linear(x)


class Held(nn.Module):
    """A linear layer whose weight lies in a list, too, and is used from there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.held = [self.linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(nn.functional.linear(x, self.held[0], self.linear.bias))


class Unused(nn.Module):
    """A linear layer, and one that no pass calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Counting(nn.Module):
    """A linear layer whose outputs shrink with the number of passes, which is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return x + 0.9**self.passes * torch.tanh(self.linear(x))

    def of_rank(self) -> Any:
        """Return what a rank holds beside tensors."""
        return self.passes

    def take(self, held: Any) -> None:
        """Take what another rank holds."""
        self.passes = held


class Drawing(nn.Module):
    """A linear layer whose outputs are scaled by numbers of numpy, of Python and of a generator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x + self.linear(x)
        drawn = np.random.rand() + random.random() + torch.rand((), generator=self.generator).item()
        return x + drawn * torch.tanh(self.linear(x))

    def of_rank(self) -> Any:
        """Return what a rank holds beside tensors."""
        return self.generator.get_state()

    def take(self, held: Any) -> None:
        """Take what another rank holds."""
        self.generator.set_state(held)


class Buffered(nn.Module):
    """A block around another one, with buffers of each kind that is asked for."""

    def __init__(self, inner: nn.Module, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.inner, self.kinds = inner, kinds
        if "constant" in kinds:
            self.register_buffer("constant", torch.rand(WIDTH) + 0.5)
        if "passing" in kinds:
            self.register_buffer("passing", torch.rand(WIDTH) + 0.5, persistent=False)
        if "expanded" in kinds:
            self.register_buffer("expanded", torch.full((1,), 0.5).expand(WIDTH))
        if "average" in kinds:
            self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for name in ("constant", "passing", "expanded"):
            if name in self.kinds:
                x = x * getattr(self, name)
        if "average" in self.kinds and self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x


class Referring(nn.Module):
    """A block and a frozen deep copy of it, whose outputs are added."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.reference = inner, copy.deepcopy(inner)
        self.reference.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) - 0.5 * self.reference(x)
        return found


class Head(nn.Module):
    """The mean over the positions, and the classes."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(x.mean(1))
        return found


class Own(nn.Module):
    """A module that calls its blocks one after another."""

    def __init__(self, pieces: list[nn.Module]) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = pieces[0], nn.ModuleList(pieces[1:-1]), pieces[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


class Declared(Own):
    """The same with a blueprint: a chain, and styles for its residual blocks."""

    @property
    def blueprint(self) -> Blueprint:
        return Blueprint(chain=("entry", "blocks", "head"), tensor=self._styles, divisible={"width": WIDTH})

    def _styles(self, _sequence_parallel: bool, _loss_parallel: bool) -> Styles:
        names = {name for name, module in self.named_modules() if isinstance(module, Residual)}
        return {f"{name}.wide": ColwiseParallel() for name in names} | {
            f"{name}.narrow": RowwiseParallel() for name in names
        }


def _encoder(dropout: float) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout, batch_first=True)


BLOCKS: dict[str, Callable[[float], nn.Module]] = {
    "residual": Residual,
    "linear": lambda _: Plain(),
    "in place": lambda _: InPlace(),
    "conv": lambda _: Convolution(),
    "layer norm": lambda _: Norm(nn.LayerNorm(WIDTH), is_last=True),
    "batch norm": lambda _: Norm(nn.BatchNorm1d(WIDTH), is_last=False),
    "group norm": lambda _: Norm(nn.GroupNorm(2, WIDTH), is_last=False),
    "attention": lambda _: Attention(),
    "encoder": _encoder,
    "encoders": lambda dropout: nn.TransformerEncoder(_encoder(dropout), 2, enable_nested_tensor=False),
    "gru": lambda _: Recurrent(nn.GRU),
    "lstm": lambda _: Recurrent(nn.LSTM),
    "mixture": lambda _: Mixture(),
    "scaled": lambda _: Scaled(),
    "listed": lambda _: Listed(),
    "tagged": lambda _: Tagged(),
    "held": lambda _: Held(),
    "unused": lambda _: Unused(),
    "counting": lambda _: Counting(),
    "drawing": lambda _: Drawing(),
}
"""The blocks by kind, from the probability of dropout."""


def _plain(module: nn.Module) -> nn.Module:
    return module


def _pickled(module: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(module))
    return found


def _assigned(module: nn.Module) -> nn.Module:
    module.load_state_dict({name: value.clone() * 0.9 for name, value in module.state_dict().items()}, assign=True)
    return module


def _put(module: nn.Module) -> nn.Module:
    """Put new parameters past `register_parameter`."""
    for each in module.modules():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None:
                each._parameters[name] = nn.Parameter(parameter.detach() * 0.9)
    return module


def _transposed(module: nn.Module) -> nn.Module:
    """Give each matrix the memory of its transpose."""
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            if parameter.dim() == 2:
                setattr(each, name, nn.Parameter(parameter.detach().t().contiguous().t()))
    return module


def _channels_last(module: nn.Module) -> nn.Module:
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.4, 0.4)
    return module


def _normed(module: nn.Module) -> nn.Module:
    for each in list(module.modules()):
        if type(each) is nn.Linear:
            nn.utils.parametrizations.weight_norm(each)
    return module


MADE = {
    "plain": _plain,
    "deepcopy": copy.deepcopy,
    "pickled": _pickled,
    "assigned": _assigned,
    "put": _put,
    "transposed": _transposed,
    "channels last": _channels_last,
    "filled": _filled,
    "weight norm": _normed,
}
"""The ways in which the tensors of a block come to be."""


def build(described: Description) -> nn.Module:
    """Return the model of a description; its values follow from torch's generator alone."""
    if described.entry == "features":
        entry: nn.Module = nn.Linear(FEATURES, WIDTH)
    else:
        entry = nn.Embedding(WORDS, WIDTH, sparse=described.entry == "sparse")
    blocks = [MADE[each.made](BLOCKS[each.kind](described.dropout)) for each in described.blocks]
    head = Head(WORDS if described.sharing == "head" else CLASSES)
    if described.frozen == "entry":
        entry.requires_grad_(False)
    if described.frozen == "reference":
        blocks[0] = Referring(blocks[0])
    if described.buffers:
        blocks[-1] = Buffered(blocks[-1], described.buffers)
    _share(described, entry, blocks, head)
    pieces = [entry, *blocks, head]
    model: nn.Module
    if described.shape == "sequential":
        model = nn.Sequential(*pieces)
    else:
        model = Declared(pieces) if described.shape == "declared" else Own(pieces)
    model = model.to(DTYPES[described.dtype])
    for hook in described.hooks:
        HOOKS[hook](pieces)
    return model


def _share(described: Description, entry: nn.Module, blocks: list[nn.Module], head: Head) -> None:
    if described.sharing == "module":
        blocks.append(blocks[0])
    if described.sharing == "head":
        head.out.weight = entry.weight
    if described.sharing == "weights":
        linear = [each for each in blocks if isinstance(each, Plain) and hasattr(each.linear, "weight")]
        if len(linear) > 1:
            linear[-1].linear.weight = linear[0].linear.weight


def _parameters(pieces: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for parameter in pieces[1].parameters() if parameter.requires_grad]


def _scale_gradient(pieces: list[nn.Module]) -> None:
    _parameters(pieces)[0].register_hook(lambda gradient: 2 * gradient)


def _mask_gradient(pieces: list[nn.Module]) -> None:
    parameter = _parameters(pieces)[-1]
    mask = (torch.arange(parameter.numel()) % 2).reshape(parameter.shape)
    parameter.register_hook(lambda gradient: gradient * mask)


def _after_gradient(pieces: list[nn.Module]) -> None:
    _parameters(pieces)[0].register_post_accumulate_grad_hook(_halve)


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _times(factor: float, _module: nn.Module, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
    return factor * outputs


def _plus(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each + 0.1 for each in inputs)


def _back(_module: nn.Module, inputs: Any, _outputs: Any) -> Any:
    return tuple(None if each is None else 0.5 * each for each in inputs)


HOOKS = {
    "scale": _scale_gradient,
    "mask": _mask_gradient,
    "after": _after_gradient,
    "forward": lambda pieces: pieces[1].register_forward_hook(partial(_times, 1.5)),
    "pre": lambda pieces: pieces[1].register_forward_pre_hook(_plus),
    "backward": lambda pieces: pieces[1].register_full_backward_hook(_back),
}
"""Hooks by name: on the gradients of the first block's parameters, and on its module."""
