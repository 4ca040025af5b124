"""Recurrent layers of many clients as one group: nn.RNN, nn.GRU and nn.LSTM, with a hand-written backward.

The products with the inputs of all T steps are one product of m matrices, and so are the gradients of both matrices;
only the product with the previous state is repeated for each step. Legend: m clients, n examples of each, T steps of a
sequence, x_t the input, h_t the state, c_t the memory, σ the logistic function, ⊙ the elementwise product, δ the
gradient of a gate before its function.

    a = x_t W^T + b,  u = h_{t-1} U^T + b'
    RNN     h = tanh(a + u), or the positive part
    LSTM    i, f, g, o = σ, σ, tanh, σ of a + u;  c = f ⊙ c_{t-1} + i ⊙ g;  h = o ⊙ tanh(c)
    GRU     r, z = σ(a + u);  g = tanh(a_g + r ⊙ u_g);  h = (1 - z) ⊙ g + z ⊙ h_{t-1}
    back    W moves by δ^T x, U by δ'^T h_{t-1}; the gradient of h_{t-1} is δ' U plus the part through the gates

Sources: Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 1997; Cho et al., EMNLP 2014.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from atoll.simulations.engines.batched.stack import CannotBatch, Stack
from atoll.simulations.engines.batched.stacked_layers import Stacked, times

State = tuple[torch.Tensor, ...]
"""h, and c of an LSTM, each (m, n, H)."""


class Cell(Protocol):
    """The gates of a layer at one step, with G numbers for each of H units."""

    adds: bool
    """Whether the gates depend only on a + u: then `a` is that sum, and δ' = δ."""

    def step(self, a: torch.Tensor, u: torch.Tensor, before: State) -> tuple[State, State]:
        """Return the state, and the values that the backward needs, from a and u (m, n, G H)."""
        ...

    def back(self, saved: State, before: State, after: State) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Return δ, δ' (m, n, G H), and the part of the previous state's gradients that passes the gates.

        Args:
            saved: values from `step`.
            before: the previous state.
            after: the gradients of the new state.
        """
        ...


class Plain:
    """The cell of nn.RNN.

    Args:
        is_relu: whether its function is the positive part.
    """

    adds = True

    def __init__(self, is_relu: bool) -> None:
        self._is_relu = is_relu

    def step(self, a: torch.Tensor, u: torch.Tensor, before: State) -> tuple[State, State]:
        """Compute the state h."""
        h = a.relu_() if self._is_relu else a.tanh_()
        return (h,), (h,)

    def back(self, saved: State, before: State, after: State) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Return δ for both sums, as they are equal, and no gradient through the gates."""
        (h,), (dh,) = saved, after
        delta = dh * (h > 0) if self._is_relu else torch.ops.aten.tanh_backward(dh, h)
        return delta, delta, (torch.zeros_like(dh),)


class LongShortTerm:
    """The cell of nn.LSTM."""

    adds = True

    def step(self, a: torch.Tensor, u: torch.Tensor, before: State) -> tuple[State, State]:
        """Compute h and c."""
        size = a.shape[-1] // 4
        a[..., : 2 * size].sigmoid_()
        a[..., 2 * size : 3 * size].tanh_()
        a[..., 3 * size :].sigmoid_()
        i, f, g, o = a.chunk(4, -1)
        c = torch.addcmul(f * before[1], i, g)
        tanh = c.tanh()
        return (o * tanh, c), (a, tanh)

    def back(self, saved: State, before: State, after: State) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Return δ, and f times the gradient of c."""
        (gates, tanh), (dh, dc) = saved, after
        i, f, g, o = gates.chunk(4, -1)
        dc = dc + torch.ops.aten.tanh_backward(dh * o, tanh)
        delta = torch.cat([dc * g, dc * before[1], dc * i, dh * tanh], -1)
        size = g.shape[-1]
        slope = gates * (1 - gates)
        slope[..., 2 * size : 3 * size] = 1 - g * g
        delta *= slope
        return delta, delta, (torch.zeros_like(dh), dc * f)


class Gated:
    """The cell of nn.GRU."""

    adds = False

    def step(self, a: torch.Tensor, u: torch.Tensor, before: State) -> tuple[State, State]:
        """Compute the state h."""
        size = a.shape[-1] // 3
        gates = (a[..., : 2 * size] + u[..., : 2 * size]).sigmoid_()
        r, z = gates.chunk(2, -1)
        u_g = u[..., 2 * size :]
        g = torch.addcmul(a[..., 2 * size :], r, u_g).tanh_()
        return (torch.lerp(g, before[0], z),), (gates, g, u_g)

    def back(self, saved: State, before: State, after: State) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Return δ and δ', and z times the gradient of h."""
        (gates, g, u_g), (dh,) = saved, after
        r, z = gates.chunk(2, -1)
        of_g = torch.ops.aten.tanh_backward(dh * (1 - z), g)
        of_gates = torch.cat([of_g * u_g, dh * (before[0] - g)], -1)
        of_gates = torch.ops.aten.sigmoid_backward(of_gates, gates)
        return torch.cat([of_gates, of_g], -1), torch.cat([of_gates, of_g * r], -1), (dh * z,)


class _Direction:
    """Weights and cell of one layer in one direction."""

    def __init__(self, stack: Stack, cell: Cell, prefix: str, suffix: str, has_bias: bool) -> None:
        self.stack, self.cell = stack, cell
        self.of_input, self.of_state = (f"{prefix}weight_{kind}{suffix}" for kind in ("ih", "hh"))
        biases = [f"{prefix}bias_{kind}{suffix}" if has_bias else None for kind in ("ih", "hh")]
        self.bias_of_input, self.bias_of_state = biases

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a of all steps (m, T, n, G H); if the cell adds, with the bias of u."""
        m, length, n, _ = x.shape
        a = times(self.stack, self.of_input, self.bias_of_input, x.flatten(1, 2)).view(m, length, n, -1)
        if self.cell.adds and self.bias_of_state:
            a += self.stack.weights[self.bias_of_state][:, None, None]
        return a

    def step(self, a: torch.Tensor, state: State) -> tuple[State, State]:
        """Make one step from a (m, n, G H)."""
        if self.cell.adds:
            a = torch.baddbmm(a, state[0], self.stack.weights[self.of_state].transpose(1, 2))
            return self.cell.step(a, a, state)
        return self.cell.step(a, times(self.stack, self.of_state, self.bias_of_state, state[0]), state)


class _Scan(torch.autograd.Function):
    """Steps of one layer in one direction: x (m, T, n, I), and the first state -> (m, T, n, H), and the last."""

    @staticmethod
    def forward(ctx: Any, layer: _Direction, anchor: torch.Tensor, x: torch.Tensor, *first: torch.Tensor) -> Any:
        states, saved = [tuple(first)], []
        for a in layer.inputs(x).unbind(1):
            state, kept = layer.step(a, states[-1])
            states.append(state)
            saved.append(kept)
        every = [torch.stack(column, 1) for column in zip(*states, strict=True)]  # (m, T + 1, n, H)
        ctx.save_for_backward(x, *every)
        ctx.layer, ctx.saved_gates = layer, saved
        return every[0][:, 1:].contiguous(), *(column[:, -1].contiguous() for column in every)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        outputs, *last = gradients
        x, *every = ctx.saved_tensors
        layer, state = ctx.layer, tuple(last)
        columns = list(zip(*(column.unbind(1) for column in every), strict=True))
        of_state = layer.stack.weights[layer.of_state]
        deltas, others = [], []
        for step in reversed(range(x.shape[1])):
            after = (state[0] + outputs[:, step], *state[1:])
            delta, other, state = layer.cell.back(ctx.saved_gates[step], columns[step], after)
            state = (torch.baddbmm(state[0], other, of_state), *state[1:])
            deltas.append(delta)
            others.append(other)
        delta = torch.stack(deltas[::-1], 1).flatten(1, 2)
        other = delta if layer.cell.adds else torch.stack(others[::-1], 1).flatten(1, 2)
        back = torch.bmm(delta, layer.stack.weights[layer.of_input]).view(x.shape) if ctx.needs_input_grad[2] else None
        layer.stack.linear(layer.of_input, layer.bias_of_input, delta, x.flatten(1, 2))
        layer.stack.linear(layer.of_state, layer.bias_of_state, other, every[0][:, :-1].flatten(1, 2))
        return None, None, back, *state


class Recurrent(Stacked):
    """The stacked nn.RNN, nn.GRU and nn.LSTM."""

    def forward(self, x: torch.Tensor, hx: Any = None) -> tuple[torch.Tensor, Any]:
        """Map the sequences of (m n) examples, and the first state, to the outputs and the last state, as torch does.

        Raises:
            CannotBatch: sequences are packed, or a single one without a batch axis.
        """
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            raise CannotBatch(f"{self.prefix}: packed sequences, and a single one, are not stacked")
        axis, states = (0 if self.layer.batch_first else 1), self._states(hx)
        num_states = 2 if self._is_lstm else 1
        axes = (axis, *(1 for _ in states))
        outputs, *last = self.shared.call(
            self._run, x, *states, axes=axes, out_axes=(axis, *(1 for _ in range(num_states)))
        )
        return outputs, tuple(last) if self._is_lstm else last[0]

    @property
    def _is_lstm(self) -> bool:
        return isinstance(self.layer, nn.LSTM)

    def _states(self, hx: Any) -> State:
        return () if hx is None else tuple(hx) if self._is_lstm else (hx,)

    def _run(self, x: torch.Tensor, *states: torch.Tensor) -> State:
        """Map (m n, T, I), or (T, m n, I), as `forward` does."""
        layer, m = self.layer, self.shared.stack.clients
        x = x if layer.batch_first else x.transpose(0, 1)
        x = x.unflatten(0, (m, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
        directions = 2 if layer.bidirectional else 1
        firsts = self._first_states(x, states, layer.num_layers * directions)
        lasts: list[Sequence[torch.Tensor]] = []
        for number in range(layer.num_layers):
            both = []
            for direction in range(directions):
                y, *last = self._scan(x.flip(1) if direction else x, number, direction, firsts[len(lasts)])
                both.append(y.flip(1) if direction else y)
                lasts.append(last)
            x = torch.cat(both, -1) if directions > 1 else both[0]
            if layer.dropout and number < layer.num_layers - 1:
                kept = self.shared.masks.draw(x.shape, layer.dropout, axis=2) if layer.dropout < 1 else 0.0
                x = x * (kept / max(1 - layer.dropout, 1e-9))
        y = x.transpose(0, 1).flatten(1, 2)  # (T, m n, H), as in torch's memory: a mask is drawn in its order
        outputs = y.transpose(0, 1) if layer.batch_first else y
        return outputs, *(torch.stack(column).flatten(1, 2) for column in zip(*lasts, strict=True))

    def _scan(self, x: torch.Tensor, number: int, direction: int, first: Sequence[torch.Tensor]) -> Any:
        suffix = f"_l{number}{'_reverse' if direction else ''}"
        layer = _Direction(self.shared.stack, self._cell(), self.prefix, suffix, self.layer.bias)
        return _Scan.apply(layer, self.shared.anchor, x, *first)  # type: ignore[no-untyped-call]

    def _cell(self) -> Cell:
        if self._is_lstm:
            return LongShortTerm()
        return Gated() if isinstance(self.layer, nn.GRU) else Plain(self.layer.nonlinearity == "relu")

    def _first_states(self, x: torch.Tensor, states: State, count: int) -> list[State]:
        """Return the first state of each layer and direction."""
        m, _, n, _ = x.shape
        if not states:
            zeros = x.new_zeros(m, n, self.layer.hidden_size)
            return [(zeros, zeros) if self._is_lstm else (zeros,)] * count
        by_client = [state.unflatten(1, (m, n)) for state in states]  # type: ignore[no-untyped-call]
        return [tuple(state[number] for state in by_client) for number in range(count)]

    @staticmethod
    def obstacles(layer: Any) -> Iterator[str]:
        """Yield the options that are not supported."""
        if layer.proj_size:
            yield "has proj_size set"
        if not layer.training:
            yield "is in evaluation mode"
