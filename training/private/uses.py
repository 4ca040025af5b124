r"""The uses of a parameter in a forward pass, and what each gives the gradients of single rows.

A linear layer with inputs a_t and output gradients g_t has for a row the gradient sum_t g_t a_t^T, of the squared norm

    || sum_t g_t a_t^T ||^2 = sum_{t,s} (a_t . a_s)(g_t . g_s)

which needs no gradient of a row (ghost norm: Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679).
Several uses of one weight are one use with more positions t, so that they are added before the norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

BYTES_AT_ONCE = 64 << 20
"""Most memory of what a norm needs at once [bytes]; rows are taken in parts."""


class Use(Protocol):
    """One use of a parameter by a batch of rows."""

    def drop(self, rows: torch.Tensor) -> None:
        """Set the gradients of some rows to zero; `rows` (B,) is true for them."""

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows' gradients, each times its factor (B,)."""

    def weighted_in(self, groups: int, factors: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of groups of equally many rows, one group after another: (groups, ...)."""

    def of_rows(self, rows: slice) -> torch.Tensor:
        """Return the gradients of some rows, (rows, values) flat."""


@dataclass(slots=True)
class Outer:
    """Use of a matrix (O, I): inputs a (B, T, I) and output gradients g (B, T, O)."""

    a: torch.Tensor
    g: torch.Tensor
    kept: torch.Tensor | None = None
    """The gradients of all rows, flat, if the norm has needed them and they are small."""

    def drop(self, rows: torch.Tensor) -> None:
        """Set the gradients of some rows to zero."""
        self.a = self.a.masked_fill(rows[:, None, None], 0.0)
        self.g = self.g.masked_fill(rows[:, None, None], 0.0)
        self.kept = None

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the rows' gradients (O, I)."""
        if self.kept is not None:
            return (factors.to(self.kept.dtype) @ self.kept).view(self.g.shape[2], self.a.shape[2])
        scaled = self.g * factors.to(self.g.dtype)[:, None, None]
        return scaled.flatten(0, 1).t() @ self.a.flatten(0, 1).to(scaled.dtype)

    def weighted_in(self, groups: int, factors: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of groups of rows (groups, O, I)."""
        if self.kept is not None:
            weights = factors.to(self.kept.dtype).view(groups, 1, -1)
            each = self.kept.view(groups, -1, self.kept.shape[1])
            return torch.bmm(weights, each).view(groups, self.g.shape[2], self.a.shape[2])
        scaled = (self.g * factors.to(self.g.dtype)[:, None, None]).reshape(groups, -1, self.g.shape[2])
        return torch.bmm(scaled.transpose(1, 2), self.a.reshape(groups, -1, self.a.shape[2]).to(scaled.dtype))

    def of_rows(self, rows: slice) -> torch.Tensor:
        """Return the flat gradients of some rows."""
        return torch.bmm(self.g[rows].transpose(1, 2), self.a[rows].to(self.g.dtype)).flatten(1)

    def squares(self) -> torch.Tensor:
        """Return the squared norm of each row's gradient (B,), as a ghost norm where that is the smaller product."""
        count, positions, width = self.a.shape
        height = self.g.shape[2]
        if positions == 1:
            return _squares(self.a.flatten(1)) * _squares(self.g.flatten(1))
        is_ghost = 2 * positions * positions < height * width
        parts = [*_parts(count, 4 * (2 * positions * positions if is_ghost else height * width))]
        if not is_ghost and len(parts) == 1:
            self.kept = self.of_rows(parts[0])
            return _squares(self.kept)
        if not is_ghost:
            return torch.cat([_squares(self.of_rows(rows)) for rows in parts])
        found = []
        for rows in parts:
            a, g = self.a[rows], self.g[rows]
            both = torch.bmm(a, a.transpose(1, 2)).mul_(torch.bmm(g, g.transpose(1, 2)))
            found.append(both.sum(dim=(1, 2), dtype=torch.float64).clamp_(min=0.0))
        return torch.cat(found)


@dataclass(slots=True)
class Lookup:
    """Use of an embedding (V, D): indices (B, T) and output gradients g (B, T, D)."""

    indices: torch.Tensor
    g: torch.Tensor
    num_embeddings: int

    def drop(self, rows: torch.Tensor) -> None:
        """Set the gradients of some rows to zero."""
        self.g = self.g.masked_fill(rows[:, None, None], 0.0)

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the rows' gradients (V, D)."""
        scaled = self.g * factors.to(self.g.dtype)[:, None, None]
        found = self.g.new_zeros(self.num_embeddings, self.g.shape[2])
        return found.index_add_(0, self.indices.flatten(), scaled.flatten(0, 1))

    def weighted_in(self, groups: int, factors: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of groups of rows (groups, V, D)."""
        scaled = self.g * factors.to(self.g.dtype)[:, None, None]
        found = self.g.new_zeros(groups * self.num_embeddings, self.g.shape[2])
        first = torch.arange(groups, device=self.indices.device).unsqueeze(1) * self.num_embeddings
        places = (self.indices.reshape(groups, -1) + first).flatten()
        return found.index_add_(0, places, scaled.flatten(0, 1)).view(groups, self.num_embeddings, -1)

    def of_rows(self, rows: slice) -> torch.Tensor:
        """Return the flat gradients of some rows."""
        return self.outer(rows).of_rows(slice(None))

    def outer(self, rows: slice = slice(None)) -> Outer:
        """Return the use as one of a matrix: the output gradient of a one-hot position is the input's."""
        hot = torch.nn.functional.one_hot(self.indices[rows], self.num_embeddings).to(self.g.dtype)
        return Outer(self.g[rows], hot)

    def squares(self) -> torch.Tensor:
        """Return the squared norm of each row's gradient (B,): positions with one index are added first."""
        count, positions = self.indices.shape
        found = []
        for rows in _parts(count, 8 * positions * positions):
            g, indices = self.g[rows], self.indices[rows]
            same = indices[:, :, None] == indices[:, None, :]
            both = torch.bmm(g, g.transpose(1, 2)).mul_(same)
            found.append(both.sum(dim=(1, 2), dtype=torch.float64).clamp_(min=0.0))
        return torch.cat(found)


@dataclass(slots=True)
class Whole:
    """Use of a parameter whose gradient of each row is there, (B, *shape)."""

    gradients: torch.Tensor

    def drop(self, rows: torch.Tensor) -> None:
        """Set the gradients of some rows to zero."""
        self.gradients = self.gradients.masked_fill(rows.view(-1, *[1] * (self.gradients.dim() - 1)), 0.0)

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the rows' gradients."""
        found: torch.Tensor = torch.tensordot(factors.to(self.gradients.dtype), self.gradients, dims=1)
        return found

    def weighted_in(self, groups: int, factors: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of groups of rows (groups, ...)."""
        weights, each = factors.to(self.gradients.dtype).view(groups, 1, -1), self.gradients.reshape(len(factors), -1)
        return torch.bmm(weights, each.view(groups, -1, each.shape[1])).view(groups, *self.gradients.shape[1:])

    def of_rows(self, rows: slice) -> torch.Tensor:
        """Return the flat gradients of some rows."""
        part = self.gradients[rows]
        return part.flatten(1) if part.dim() > 1 else part.unsqueeze(1)


Uses = dict[str, list[Outer | Lookup | Whole]]
"""The uses of each trained parameter by some rows, by its name in the model."""


def squares_of(uses: Sequence[Outer | Lookup | Whole]) -> torch.Tensor:
    """Return the squared norm (B,) float64 of each row's gradient of one parameter, over all of its uses."""
    if len(uses) == 1 and not isinstance(uses[0], Whole):
        return uses[0].squares().double()
    matrices = [use.outer() if isinstance(use, Lookup) else use for use in uses]
    if all(isinstance(use, Outer) for use in matrices):
        every = [use for use in matrices if isinstance(use, Outer)]
        a, g = torch.cat([use.a for use in every], dim=1), torch.cat([use.g for use in every], dim=1)
        return Outer(a, g).squares().double()
    count = len(uses[0].g if isinstance(uses[0], Outer | Lookup) else uses[0].gradients)
    found = []
    for rows in _parts(count, 4 * uses[0].of_rows(slice(0, 1)).numel()):
        found.append(_squares(torch.stack([use.of_rows(rows) for use in matrices]).sum(0)))
    return torch.cat(found).double()


def _squares(flat: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(flat, dim=1)
    return norms.double().square()


def _parts(count: int, bytes_of_row: int) -> Iterator[slice]:
    """Yield parts of the rows whose memory is within the bound."""
    size = max(1, BYTES_AT_ONCE // max(1, bytes_of_row))
    yield from (slice(begin, min(count, begin + size)) for begin in range(0, count, size))
