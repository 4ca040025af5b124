"""The shape of a decoder: every tensor that it has, and the axis along which tensor parallelism shards it."""

import math
from dataclasses import dataclass, replace
from typing import get_type_hints

MLPS = ("gelu", "swiglu")
NORMS = ("layernorm", "rmsnorm")

LAYERS_MAX, WHOLE_MAX = 100_000, 2**40
"""Largest number of layers, and largest other number, of a model: each layer is a piece that is placed on a stage."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor."""

    name: str
    """Its name inside its block."""

    shape: tuple[int, ...]
    """Its lengths in the whole model."""

    cut: int | None = None
    """The axis that tensor parallelism shards; None: every rank of the group has the whole tensor."""

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The dimensions of a transformer; the defaults are a Llama-style decoder."""

    layers: int
    """Blocks (L >= 1)."""

    hidden: int
    """Width of the residual stream (h >= 1)."""

    heads: int
    """Attention heads (a >= 1); they divide `hidden`."""

    kv_heads: int | None = None
    """Heads of keys and values; they divide `heads`. None: the same number."""

    ffn: int | None = None
    """Width inside the MLP (f). None: 4 h with gelu, 8/3 h rounded up to a multiple of 32 with swiglu."""

    vocab: int
    """Rows of the embedding (v >= 1)."""

    sequence: int = 2048
    """Tokens in one sequence (s >= 1)."""

    tied: bool = False
    """Share the embedding's table with the head."""

    mlp: str = "swiglu"
    """The MLP. gelu: two matrices; swiglu: three."""

    norm: str = "rmsnorm"
    """The norms. rmsnorm: one vector; layernorm: two."""

    biases: bool = False
    """Give the linear layers of a block biases."""

    qkv_biases: bool = False
    """Give queries, keys and values alone biases, as Qwen2 does."""

    positions: bool = False
    """Learn positions as a table of `sequence` rows; otherwise they are rotary and have no parameters."""

    segments: int = 0
    """Rows of further embeddings, such as BERT's two segments."""

    nominal: float | None = None
    """The number of parameters under which papers list the model, for their tables; None: the exact count."""

    def __post_init__(self) -> None:
        if faults := _faults(self):
            raise ValueError("\n".join(faults))

    @property
    def num_kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """The width of one head."""
        return self.hidden // self.heads

    @property
    def width(self) -> int:
        """The width inside the MLP (f)."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.hidden if self.mlp == "gelu" else (8 * self.hidden // 3 + 31) // 32 * 32

    @property
    def parameters(self) -> int:
        """The number of all parameters, each once (P)."""
        return sum(weight.size for weight in (*self.embedding(), *self.block() * self.layers, *self.head()))

    @property
    def matrix_parameters(self) -> int:
        """The parameters that multiply a token: all matrices but the look-up of embeddings; a tied head counts."""
        block = sum(weight.size for weight in self.block() if len(weight.shape) == 2)
        return self.layers * block + self.vocab * self.hidden

    def embedding(self) -> tuple[Weight, ...]:
        """Return the parameters before the first block."""
        h = self.hidden
        extra = (("positions", self.sequence * self.positions), ("segments", self.segments))
        return (Weight("embedding", (self.vocab, h), 0), *(Weight(name, (rows, h)) for name, rows in extra if rows))

    def block(self) -> tuple[Weight, ...]:
        """Return the parameters of one block."""
        h, kv, f = self.hidden, self.num_kv_heads * self.head_size, self.width
        columns = [("query", h), ("key", kv), ("value", kv)]
        gates = [("up", f)] if self.mlp == "gelu" else [("gate", f), ("up", f)]
        return (
            *self._norm("attention_norm"),
            *(
                weight
                for name, out in columns
                for weight in self._linear(name, out, h, 0, biases=self.biases or self.qkv_biases)
            ),
            *self._linear("output", h, h, 1, biases=self.biases),
            *self._norm("mlp_norm"),
            *(weight for name, out in gates for weight in self._linear(name, out, h, 0, biases=self.biases)),
            *self._linear("down", h, f, 1, biases=self.biases),
        )

    def head(self) -> tuple[Weight, ...]:
        """Return the parameters after the last block; a tied head has no separate table."""
        table = () if self.tied else (Weight("head", (self.vocab, self.hidden), 0),)
        return (*self._norm("norm"), *table)

    def flops(self, tokens: float, *, recompute: bool = False) -> float:
        """Return the floating-point operations of forward and backward: (6 N + 12 L h s) tokens.

        N are `matrix_parameters`.

        With `recompute` the forward runs twice, which adds a third. Source: torchtitan's and PaLM's convention
        (Chowdhery et al. 2022, appendix B), which gives no discount for the causal mask.
        """
        once = 6 * self.matrix_parameters + 12 * self.layers * self.hidden * self.sequence
        return tokens * once * (4 / 3 if recompute else 1)

    def _linear(self, name: str, rows: int, columns: int, cut: int, *, biases: bool) -> tuple[Weight, ...]:
        bias = (Weight(f"{name}.bias", (rows,), 0 if cut == 0 else None),) if biases else ()
        return (Weight(name, (rows, columns), cut), *bias)

    def _norm(self, name: str) -> tuple[Weight, ...]:
        bias = (Weight(f"{name}.bias", (self.hidden,)),) if self.norm == "layernorm" else ()
        return (Weight(name, (self.hidden,)), *bias)


def _faults(shape: ModelShape) -> list[str]:
    hints = get_type_hints(ModelShape)
    wholes = [name for name, hint in hints.items() if hint in (int, int | None)]
    given = {name: getattr(shape, name) for name in wholes}
    faults = [
        f"model.{name}: must be a whole number >= {int(name != 'segments')}, got {value!r}"
        for name, value in given.items()
        if not (value is None and hints[name] is not int) and (type(value) is not int or value < (name != "segments"))
    ]
    faults += [
        f"model.{name}: must be at most {LAYERS_MAX if name == 'layers' else WHOLE_MAX}, got {value!r}"
        for name, value in given.items()
        if type(value) is int and value > (LAYERS_MAX if name == "layers" else WHOLE_MAX)
    ]
    if faults:
        return faults
    rules = [
        (shape.hidden % shape.heads == 0, f"model.heads: must divide hidden={shape.hidden}, got {shape.heads}"),
        (
            shape.heads % shape.num_kv_heads == 0,
            f"model.kv_heads: must divide heads={shape.heads}, got {shape.kv_heads}",
        ),
        (shape.mlp in MLPS, f"model.mlp: must be one of {', '.join(MLPS)}, got {shape.mlp!r}"),
        (shape.norm in NORMS, f"model.norm: must be one of {', '.join(NORMS)}, got {shape.norm!r}"),
        (
            shape.nominal is None or 0 < shape.nominal < math.inf,
            f"model.nominal: must be > 0 and finite, got {shape.nominal!r}",
        ),
    ]
    return [fault for is_met, fault in rules if not is_met]


def _gpt(
    layers: int, hidden: int, heads: int, sequence: int, nominal: float, vocab: int = 50304, segments: int = 0
) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        sequence=sequence,
        tied=True,
        mlp="gelu",
        norm="layernorm",
        biases=True,
        positions=True,
        segments=segments,
        nominal=nominal,
    )


def _llama(layers: int, hidden: int, ffn: int, heads: int = 32, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=128256, sequence=8192, tied=tied
    )


def _qwen(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int = 152064, *, tied: bool = False
) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        sequence=8192,
        tied=tied,
        qkv_biases=True,
    )


MODELS: dict[str, ModelShape] = {
    "gpt2": _gpt(12, 768, 12, 1024, 0.124e9),
    "gpt2-xl": _gpt(48, 1600, 25, 1024, 1.5e9),
    "bert-large": _gpt(24, 1024, 16, 512, 0.32e9, vocab=30592, segments=2),
    "turing-nlg": _gpt(78, 4256, 28, 1024, 17.2e9),
    "gpt3": _gpt(96, 12288, 96, 2048, 175e9),
    "llama-1b": _llama(16, 2048, 8192, tied=True),
    "llama-8b": _llama(32, 4096, 14336),
    "llama-70b": _llama(80, 8192, 28672, 64),
    "llama-405b": _llama(126, 16384, 53248, 128),
    "qwen2.5-0.5b": _qwen(24, 896, 4864, 14, 2, vocab=151936, tied=True),
    "qwen2.5-7b": _qwen(28, 3584, 18944, 28, 4),
    "qwen2.5-72b": _qwen(80, 8192, 29568, 64, 8),
}
"""Models by name. Vocabularies are padded to a multiple of 128 (GPT's 50257, BERT's 30522), so that tp can cut them.

Sources: Radford et al. 2019; Devlin et al. 2019; Microsoft, "Turing-NLG" (2020); Brown et al. 2020, table 2.1; Meta's
Llama 3.1 8B, 70B and 405B and Llama 3.2 1B; Qwen2.5's configurations (2024).
"""


def as_decoder(shape: ModelShape) -> ModelShape:
    """Return the Llama-style decoder of the same blocks, width, heads and vocabulary, which the engine can build.

    Two matrices of f columns become three of 2/3 f, rounded up to a multiple of 32, which have as many parameters.
    """
    ffn = shape.ffn if shape.mlp == "swiglu" else (2 * shape.width // 3 + 31) // 32 * 32
    plain = {
        "norm": "rmsnorm",
        "biases": False,
        "qkv_biases": False,
        "positions": False,
        "segments": 0,
        "nominal": None,
    }
    return replace(shape, mlp="swiglu", ffn=ffn, **plain)  # type: ignore[arg-type]
