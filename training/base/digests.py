"""The digest of frozen tensors, which every site has: equal digests are equal values.

It is the SHA-256 of one line for each tensor, sorted by name,

    NAME DTYPE SHAPE SHA256    such as  head.weight float32 3,8 9f86d0...

so it depends on no file, no device and no sharding of the model.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch

BLOCK_ELEMENTS = 1 << 22
"""Elements of a tensor that are hashed at a time."""


def digest_of(lines: Mapping[str, str]) -> str:
    """Return the digest of tensors from their lines by name (`line_of`)."""
    text = "".join(f"{name} {lines[name]}\n" for name in sorted(lines))
    return hashlib.sha256(text.encode()).hexdigest()


def line_of(tensor: torch.Tensor) -> str:
    """Return the line of a tensor without its name: dtype, shape, SHA-256 of its bytes in C order, little-endian."""
    digest, flat = hashlib.sha256(), tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), BLOCK_ELEMENTS):
        block = flat[start : start + BLOCK_ELEMENTS].cpu().contiguous()
        digest.update(block.view(torch.uint8).numpy().data)
    return line(str(tensor.dtype).removeprefix("torch."), tensor.shape, digest.hexdigest())


def line(dtype: str, shape: Iterable[int], sha256: str) -> str:
    """Return the line of a tensor from its parts."""
    return f"{dtype} {','.join(map(str, shape))} {sha256}"
