"""Models with tensors that torch's wrappers take badly, or not at all."""

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from atoll.parallel.engine.blueprint import Blueprint, Styles

WIDTH, CLASSES = 16, 10


class Mix(nn.Module):
    """A sum with a scalar, a frozen scalar and transposed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.rate = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.enter = nn.Parameter(torch.randn(8, WIDTH).t() / 4)
        self.leave = nn.Parameter(torch.randn(WIDTH, 8).t() / 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Map twice (B, WIDTH) to the same shape."""
        return x + self.rate * y * self.gain + x @ self.enter @ self.leave * self.gain


class OddBlock(nn.Module):
    """A block with odd parameters, and a buffer whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Mix()
        self.register_buffer("mask", torch.ones(1).expand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, WIDTH) to the same shape."""
        mask = self.mask
        assert isinstance(mask, torch.Tensor)
        mixed: torch.Tensor = self.mix(x, self.narrow(self.wide(x).tanh()) * mask)
        return mixed


class Words(nn.Module):
    """The mean of embeddings with sparse gradients, of the signs of an image's pixels: (B, 1, 8, 8) to (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, WIDTH, sparse=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images to the means of their pixels' embeddings."""
        pixels = images.flatten(1)
        found: torch.Tensor = self.table(2 * torch.arange(64, device=images.device) + (pixels > 0)).mean(1)
        return found


class OddModel(nn.Module):
    """Words, three odd blocks, a head; a shared scalar if `is_tied`."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.words = Words()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        if is_tied:
            first, last = self.blocks[0], self.blocks[2]
            assert isinstance(first, OddBlock)
            assert isinstance(last, OddBlock)
            last.mix.gain = first.mix.gain

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint, in which tp shards the two linear layers of each block."""
        return Blueprint(chain=("words", "blocks", "head"), tensor=_styles, divisible={"width": WIDTH})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 1, 8, 8) to (B, CLASSES)."""
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _styles(_sequence_parallel: bool, _loss_parallel: bool) -> Styles:
    return {"blocks.*.wide": ColwiseParallel(), "blocks.*.narrow": RowwiseParallel()}


def odd() -> nn.Module:
    torch.manual_seed(0)
    return OddModel(is_tied=True)


def unshared() -> nn.Module:
    torch.manual_seed(0)
    return OddModel(is_tied=False)
