"""The machines: the number of devices, their memory and speed, and the bandwidth between them."""

import math
from dataclasses import dataclass, fields

from atoll.ground.printable import count_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes of equal devices. Ranks fill a node before they begin the next one."""

    nodes: int = 1
    """Machines (>= 1)."""

    per_node: int = 8
    """Devices in one of them (>= 1)."""

    memory: float
    """Memory of one device [bytes]."""

    flops: float
    """Peak 16-bit floating-point operations per second of one device, dense."""

    flops_fp32: float
    """Peak 32-bit floating-point operations per second of one device."""

    inside: float
    """Bytes per second that one device sends within its node, in one direction."""

    across: float
    """Bytes per second that one device sends to other nodes."""

    latency_inside: float = 5e-6
    """Seconds until the first byte, inside a node."""

    latency_across: float = 2e-5
    """Seconds until the first byte, between nodes."""

    bandwidth: float | None = None
    """Bytes per second that one device reads or writes in its memory. None: a 300th of `flops`."""

    efficiency: float = 0.8
    """The fraction of the peak that large matrix products reach, in (0, 1]: measure it with one device and set it."""

    attention: float = 0.4
    """The fraction of the peak that attention reaches, in (0, 2]; products that a causal mask skips count as done."""

    links: float = 0.6
    """The fraction of `inside` and `across` that collectives reach, in (0, 1]."""

    usable: float = 0.9
    """The fraction of the memory that a plan may fill, in (0, 1]; the rest is for fragments, kernels and libraries."""

    def __post_init__(self) -> None:
        if faults := _faults(self):
            raise ValueError("\n".join(faults))

    @property
    def world(self) -> int:
        """The number of ranks: one for each device."""
        return self.nodes * self.per_node

    @property
    def room(self) -> float:
        """Memory of one device that a plan may fill [bytes]."""
        return self.memory * self.usable

    @property
    def memory_rate(self) -> float:
        """Bytes per second that one device reads or writes in its memory."""
        return self.flops / 300 if self.bandwidth is None else self.bandwidth

    def spans_nodes(self, stride: int, degree: int) -> bool:
        """Return whether a group of `degree` ranks, `stride` apart, has members on two nodes."""
        return degree > 1 and (stride * degree > self.per_node or self.per_node % (stride * degree) != 0)

    def seconds(self, num_bytes: float, steps: int, *, stride: int, degree: int) -> float:
        """Return the time of a rank's messages in a group: latency for each of the `steps`, and its bytes by the link.

        The rings of a group that spans nodes share the adapters of its k members on a node, so a rank's bytes cross
        nodes at up to k `across`, but no faster than `inside`.
        """
        if not self.spans_nodes(stride, degree):
            return steps * self.latency_inside + num_bytes / (self.links * self.inside)
        members = max(1, min(degree, self.per_node // stride))
        rate = min(self.inside, members * self.across)
        return steps * self.latency_across + num_bytes / (self.links * rate)


DEVICES_MAX = 2**20
"""The most devices of a cluster: each mesh of them is predicted, which takes a quarter of a minute."""

LIMITS = {
    **dict.fromkeys(("efficiency", "links", "usable"), (0.0, 1.0)),
    "attention": (0.0, 2.0),
    **dict.fromkeys(("latency_inside", "latency_across"), (0.0, 3600.0)),
}
"""The least and the most value of a number; of bytes and rates there is at least one (a second)."""


def _faults(cluster: Cluster) -> list[str]:
    faults = []
    for field in fields(cluster):
        value = getattr(cluster, field.name)
        if field.name == "bandwidth" and value is None:
            continue
        least, most = LIMITS.get(field.name, (1.0, math.inf))
        if field.name in ("nodes", "per_node"):
            allowed, is_right = "a whole number >= 1", type(value) is int and value >= 1
        else:
            allowed = f"a number {f'>= {least:g}' if least else '> 0'}{f' and <= {most:g}' if most < math.inf else ''}"
            is_right = type(value) in (int, float) and value > 0 and least <= value <= most
        if not is_right:
            faults.append(f"cluster.{field.name}: must be {allowed}, got {value!r}")
    if not faults and cluster.world > DEVICES_MAX:
        what = count_of(cluster.world, "device")
        faults.append(f"cluster.nodes: got {cluster.nodes}, with {what} together; allowed: at most {DEVICES_MAX}")
    return faults


CLUSTERS: dict[str, Cluster] = {
    "a100-80": Cluster(
        memory=85.9e9,
        flops=312e12,
        flops_fp32=19.5e12,
        inside=300e9,
        across=25e9,
        bandwidth=2.04e12,
        efficiency=0.9,
        attention=0.5,
    ),
    "h100-80": Cluster(
        memory=85.5e9,
        flops=989e12,
        flops_fp32=67e12,
        inside=450e9,
        across=50e9,
        bandwidth=3.35e12,
        efficiency=0.8,
        attention=0.3,
    ),
    "h200-141": Cluster(
        memory=150.7e9,
        flops=989e12,
        flops_fp32=67e12,
        inside=450e9,
        across=50e9,
        bandwidth=4.8e12,
        efficiency=0.8,
        attention=0.3,
    ),
    "cpu": Cluster(
        per_node=2, memory=16e9, flops=1e11, flops_fp32=1e11, inside=5e9, across=1.25e9, bandwidth=2e10, links=1.0
    ),
}
"""One node of each kind. The peaks, memory bandwidths and NVLink rates are from the vendor's data sheets (dense, one
direction), the memory is what the driver reports (81,920, 81,559 and 143,771 MiB); between nodes 200 Gb/s (A100) and
400 Gb/s (H100, H200) for each device. The fractions of the peak are fitted to published runs (`tests/parallel/planner/
published.py`). `cpu` is a guess for two cores and gloo: measure."""
