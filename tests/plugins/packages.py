"""Installed packages of a test: a real `.dist-info` folder with entry points, and the modules beside it."""

from collections.abc import Mapping
from pathlib import Path

RULE = '''
class Loudest:
    """The largest value of each element."""

    def reduce(self, rows):
        return rows.max(axis=0)


loudest = Loudest()
quiet = 3
'''
SAMPLER = '''
def last(candidates, count, rng):
    """Invite the last clients in the order of their names."""
    assert 0 <= rng.random() < 1
    return [candidate.client_id for candidate in candidates][-count:]
'''

CODEC = '''
import numpy as np


class Rounded:
    """Multiples of a step, the largest magnitude over the levels: x -> step rint(x / step)."""

    is_biased = True

    def __init__(self, levels=7):
        if not 1 <= levels <= 127:
            raise ValueError(f"levels: must be in 1..127, got {levels}")
        self.levels = levels

    def num_bytes(self, n):
        return 4 + n

    def encode(self, values, rng):
        step = np.float32(np.abs(values).max() / self.levels)
        whole = np.rint(values / step) if step else np.zeros(len(values))
        return step.astype("<f4").tobytes() + whole.clip(-self.levels, self.levels).astype(np.int8).tobytes()

    def decode(self, data, n):
        step, whole = np.frombuffer(data, "<f4", 1)[0], np.frombuffer(data, np.int8, n, 4)
        if not (0 <= step < np.inf and -self.levels <= whole.min() and whole.max() <= self.levels):
            raise ValueError("a step or a level that no encoder writes")
        return np.float32(step) * whole.astype(np.float32)
'''

LION = '''
import torch


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2."""

    def __init__(self, parameters, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (fast, slow), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(torch.sign(fast * m + (1 - fast) * p.grad) + group["weight_decay"] * p, alpha=lr)
                m.mul_(slow).add_(p.grad, alpha=1 - slow)
'''


def install(
    folder: Path,
    package: str,
    *,
    version: str = "1.2",
    modules: Mapping[str, str] | None = None,
    points: Mapping[str, Mapping[str, str]] | None = None,
    text: str | None = None,
) -> Path:
    """Write a distribution as pip leaves it in a folder of `sys.path`, and return the folder.

    Args:
        folder: the place of `sys.path`.
        package: the name of the distribution.
        version: its version.
        modules: the text of each module by its name.
        points: the entry points of each group.
        text: `entry_points.txt` itself, in place of `points`.
    """
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in of_group.items())
        for group, of_group in (points or {}).items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections) if text is None else text)
    for name, source in (modules or {}).items():
        (folder / f"{name}.py").write_text(source)
    return folder
