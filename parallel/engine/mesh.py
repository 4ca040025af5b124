"""The mesh: the number of ranks along each axis. Importing this file does not import torch.

    pp            pipeline stages, one after another
    dp_replicate  copies of the model (or of each shard of it) with different data
    dp_shard      ranks with different data that share one copy, sharded among them (FSDP, ZeRO)
    tp            ranks that compute each layer together

Ranks are numbered with `tp` fastest, so that the ranks of one tensor-parallel group are neighbours on one machine, and
`pp` slowest: stages communicate least.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod

from atoll.ground.faults import Refused
from atoll.ground.printable import count_of

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The axes from the slowest to the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The degree of each axis (>= 1)."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        faults = [
            f"mesh.{name}: must be a whole number of at least 1, got {degree!r}"
            for name, degree in self.degrees.items()
            if type(degree) is not int or degree < 1
        ]
        if faults:
            raise Refused(*faults)

    @property
    def degrees(self) -> Mapping[str, int]:
        """The degrees by axis, slowest first."""
        return asdict(self)

    @property
    def size(self) -> int:
        """The number of ranks of the whole mesh."""
        return prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """The number of ranks with different data: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def text(self) -> str:
        """The mesh as `parse_mesh` reads it."""
        return ",".join(f"{name}={degree}" for name, degree in self.degrees.items())

    def check_world(self, world_size: int) -> None:
        """Check that the mesh has exactly one place for each rank.

        Raises:
            ValueError: it has more or fewer; the message has the product of the degrees.
        """
        if self.size != world_size:
            product = " x ".join(f"{name}={degree}" for name, degree in self.degrees.items())
            raise ValueError(f"mesh: {product} = {count_of(self.size, 'rank')}, but there are {world_size}")

    def __str__(self) -> str:
        return ",".join(f"{name}={degree}" for name, degree in self.degrees.items() if degree > 1) or "one rank"


def parse_mesh(text: str, *, replicate: bool = False) -> Mesh:
    """Parse a mesh as a command line names it: `dp=2,tp=2`; axes left out are 1.

    Args:
        text: comma-separated `axis=degree`; `dp` stands for dp_shard, or for dp_replicate if `replicate`.
        replicate: data parallelism with whole copies (DDP).

    Raises:
        ValueError: an unknown or repeated axis, or a degree that is no whole number of at least 1.
    """
    allowed = (*AXES, "dp")
    degrees: dict[str, int] = {}
    faults: list[str] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        axis, _, degree = (word.strip() for word in entry.partition("="))
        name = ("dp_replicate" if replicate else "dp_shard") if axis == "dp" else axis
        if axis not in allowed or not degree.isdecimal() or int(degree) < 1:
            faults.append(f"mesh: {entry!r} must be AXIS=DEGREE with an axis of {', '.join(allowed)} and a degree >= 1")
        elif name in degrees:
            faults.append(f"mesh: {name} is given twice in {text!r}")
        else:
            degrees[name] = int(degree)
    if faults:
        raise Refused(*faults)
    return Mesh(**degrees)


def meshes(world: int) -> Iterator[Mesh]:
    """Yield every mesh of `world` ranks."""
    for pp in divisors(world):
        for tp in divisors(world // pp):
            for dp_shard in divisors(world // pp // tp):
                yield Mesh(pp=pp, dp_replicate=world // pp // tp // dp_shard, dp_shard=dp_shard, tp=tp)


def divisors(number: int) -> list[int]:
    """Return the divisors, ascending."""
    return [k for k in range(1, number + 1) if number % k == 0]
