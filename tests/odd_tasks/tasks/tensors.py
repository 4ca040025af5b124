"""Models with tensors of odd kinds."""

from typing import Any

import torch
from torch import nn

from tests.odd_tasks.tasks.base import CLASSES, FEATURES, IN_ORDER, of_model


class WithBuffer(nn.Module):
    """The plain layers and a buffer, which takes part in the outputs, or counts."""

    buffer: torch.Tensor

    def __init__(self, buffer: torch.Tensor, *, counts: bool = False, persistent: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.counts = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), counts
        self.register_buffer("buffer", buffer, persistent=persistent)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.buffer.add_(1)
            return self.last(torch.tanh(self.first(inputs)))
        return self.last(torch.tanh(self.first(inputs))) + self.buffer.real.float().nan_to_num(0, 0, -3)[:CLASSES]


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> str:
        return "an extra state"

    def set_extra_state(self, state: Any) -> None:
        pass


class Scaled(nn.Module):
    """Odd parameters: a scalar, a transposed one, one of no elements, one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.matrix = nn.Parameter(torch.randn(CLASSES, FEATURES).t() / 3)
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.matrix * self.scale + self.nothing.sum()


class Shared(nn.Module):
    """A parameter whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.zeros(1).expand(CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + self.bias


class Words(nn.Module):
    """Embeddings of the signs of the features."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(2 * FEATURES, 5, **options), nn.Linear(5, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(2 * torch.arange(FEATURES) + (inputs > 0)).mean(1))


class Late(nn.Module):
    """The plain layers, and a tensor that the forward pass makes, or that it makes longer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), kind
        if kind == "grows":
            self.register_buffer("queue", torch.zeros(0, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.last(torch.tanh(self.first(inputs)))
        if self.kind == "grows":
            self.queue = torch.cat([self.queue, outputs.detach()[:1]])
        elif not hasattr(self, "late"):
            self._make(outputs)
        return outputs + self.late if self.kind != "grows" else outputs

    def _make(self, outputs: torch.Tensor) -> None:
        if self.kind == "parameter":
            self.late = nn.Parameter(outputs.new_zeros(CLASSES))
        else:
            self.register_buffer("late", outputs.new_zeros(CLASSES), persistent=self.kind == "buffer")


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


class Halved(nn.Module):
    """A model that computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES, dtype=torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs.bfloat16()).float()


class Double(nn.Linear):
    """A model that computes in float64."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.double()).float()


bool_buffer = of_model(lambda: WithBuffer(torch.tensor([True, False, True])))
double_buffer = of_model(lambda: WithBuffer(torch.tensor([0.1, 1e30, 1e-30], dtype=torch.float64).clamp(max=2)))
half_buffer = of_model(lambda: WithBuffer(torch.tensor([0.5, -0.25, 0.0], dtype=torch.float16)))
byte_counter = of_model(lambda: WithBuffer(torch.tensor(250, dtype=torch.uint8), counts=True))
short_counter = of_model(lambda: WithBuffer(torch.tensor([-7, 300], dtype=torch.int16), counts=True))
long_counter = of_model(lambda: WithBuffer(torch.tensor(2**40), counts=True))
expanded_buffer = of_model(lambda: WithBuffer(torch.ones(1).expand(CLASSES)))
complex_buffer = of_model(lambda: WithBuffer(torch.ones(CLASSES, dtype=torch.complex64)))
float8_buffer = of_model(lambda: WithBuffer(torch.ones(CLASSES).to(torch.float8_e4m3fn)))
infinite_mask = of_model(lambda: WithBuffer(torch.tensor([0.0, 0.0, -torch.inf])))
infinite_mask_kept = of_model(lambda: WithBuffer(torch.tensor([0.0, 0.0, -torch.inf]), persistent=False))
beyond_float32 = of_model(lambda: WithBuffer(torch.tensor([0.0, 0.0, 1e300], dtype=torch.float64)))
extra_state = of_model(lambda: WithExtraState(FEATURES, CLASSES))
odd_parameters = of_model(Scaled)
shared_elements = of_model(Shared)
sparse_embedding = of_model(lambda: Words(sparse=True))
padded_embedding = of_model(lambda: Words(padding_idx=1))
bounded_embedding = of_model(lambda: Words(max_norm=0.5))
late_parameter = of_model(lambda: Late("parameter"))
late_buffer = of_model(lambda: Late("buffer"))
late_cache = of_model(lambda: Late("cache"))
growing_buffer = of_model(lambda: Late("grows"))
lazy_layer = of_model(lazy)
batch_norm = of_model(normed, local=IN_ORDER)
computes_bfloat16 = of_model(Halved)
computes_float64 = of_model(Double)
