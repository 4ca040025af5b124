"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no biases.

Shapes: B sequences of S tokens, D features, H heads and K key/value heads of D / H features, F features inside the
MLP, V words. Sources: Touvron et al., "LLaMA", 2023, section 2.2; Su et al., "RoFormer", 2021, eq. 34; Shazeer, "GLU
Variants Improve Transformer", 2020; Ainslie et al., "GQA", 2023.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from atoll.ground.faults import Refused
from atoll.parallel.engine.blueprint import Blueprint, Styles


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The dimensions of a decoder."""

    vocab: int
    """V, the number of words."""
    dim: int
    """D, the number of features; a multiple of `heads`."""
    layers: int
    """The number of blocks."""
    heads: int
    """H, the number of heads."""
    kv_heads: int | None = None
    """K, the number of key/value heads, a divisor of H; None: H."""
    ffn: int | None = None
    """F, the number of features inside the MLP; None: 8/3 D, rounded up to a multiple of 32."""
    sequence: int = 1024
    """The largest S, the number of tokens of a sequence."""
    tied: bool = False
    """Share the embedding's weights with the head."""
    rope_base: float = 10_000.0
    """The base of the rotary positions: their wavelengths go from 2π to 2π times this."""

    def __post_init__(self) -> None:
        kv_heads = self.kv_heads or self.heads
        faults = [
            fault
            for is_met, fault in (
                (min(self.vocab, self.dim, self.layers, self.heads, self.sequence) >= 1, "every size must be >= 1"),
                (self.dim % self.heads == 0, f"dim must be a multiple of heads, got {self.dim} and {self.heads}"),
                (self.heads % kv_heads == 0, f"kv_heads must divide heads, got {kv_heads} and {self.heads}"),
                ((self.dim // self.heads) % 2 == 0, f"dim / heads must be even, got {self.dim} / {self.heads}"),
            )
            if not is_met
        ]
        if faults:
            raise Refused(*(f"DecoderConfig: {fault}" for fault in faults))

    @property
    def hidden(self) -> int:
        """The number F of features inside the MLP."""
        return self.ffn or (8 * self.dim // 3 + 31) // 32 * 32


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions: (B, S, D) -> (B, S, D)."""

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        kv_dim = self.head_dim * (config.kv_heads or config.heads)
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        cosines, sines = rotations(config.sequence, self.head_dim, config.rope_base)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, S, D) to (B, S, D), with all heads or this rank's alone."""
        queries, keys, values = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        length = queries.shape[2]
        cosines, sines = self.cosines[:length].to(queries.dtype), self.sines[:length].to(queries.dtype)
        attended = functional.scaled_dot_product_attention(
            rotated(queries, cosines, sines),
            rotated(keys, cosines, sines),
            values,
            is_causal=True,
            enable_gqa=keys.shape[1] != queries.shape[1],
        )
        joined = attended.transpose(1, 2).flatten(2)
        projected: torch.Tensor = self.out(joined)
        return projected

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated MLP out(silu(gate x) * up x): (B, S, D) -> (B, S, D)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, S, D) to (B, S, D)."""
        projected: torch.Tensor = self.out(functional.silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """A block of the decoder: x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, S, D) to (B, S, D)."""
        x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Decoder(nn.Module):
    """A causal language model: tokens (B, S) int64 -> logits (B, S, V)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self._initialize()
        if config.tied:
            self.head.weight = self.embed.weight

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint: divisible along every axis."""
        config = self.config
        return Blueprint(
            chain=("embed", "layers", "norm", "head"),
            tensor=styles,
            divisible={
                "heads": config.heads,
                "kv_heads": config.kv_heads or config.heads,
                "ffn": config.hidden,
                "vocab": config.vocab,
            },
            sequence=1,
            weights={"embed": 0.1, "norm": 0.1, "head": max(0.1, config.vocab / (12 * config.dim))},
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (B, S) int64 to logits (B, S, V)."""
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def _initialize(self) -> None:
        """Draw N(0, 0.02), the last layer of a residual branch / sqrt(2 layers) (Radford et al. 2019, section 2.3)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_last = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / ((2 * self.config.layers) ** 0.5 if is_last else 1))


def rotations(length: int, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of position x frequency, each (length, head_dim / 2); frequency i is base^(-2i / head_dim)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), frequencies)
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) of (B, H, S, d) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def styles(sequence_parallel: bool, loss_parallel: bool) -> Styles:
    """Return the sharding along tp: attention by heads, MLP by hidden features, embedding and head by words.

    Every block costs two all-reduces in each direction, or their halves (reduce-scatter, then all-gather) when the
    sequence is sharded in between (Korthikanti et al., "Reducing Activation Recomputation", 2022, figure 5).
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence_parallel else Replicate()
    shared = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))  # once for q, k and v
    found: Styles = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
        "layers.*.attention": shared,
        "layers.*.mlp": shared,
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        **{f"layers.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        **{f"layers.*.{name}.out": RowwiseParallel(output_layouts=between) for name in ("attention", "mlp")},
    }
    if sequence_parallel:
        found |= {"norm": SequenceParallel(), "layers.*.attention_norm": SequenceParallel()}
        found |= {"layers.*.mlp_norm": SequenceParallel()}
    return found
