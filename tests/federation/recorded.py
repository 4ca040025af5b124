"""An agent that writes down what is secret in its secure sums, so that a test can look for it elsewhere.

    ATOLL_TEST_RECORD=FILE python -m tests.federation.recorded agent TASK --site north ...

Each line is a kind and bytes: parts of the plain and of the encoded update, the private keys and the seed of a member,
its keys of streams and of boxes, and the shares that it makes.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from atoll.cli.main import run
from atoll.client.secure import member
from atoll.client.work import jobs
from atoll.tensors.safetensors_file import read
from tests.federation.processes import RECORDED

KINDS = {"plain", "encoded", "mask private", "box private", "seed", "mask_key", "self_key", "box_key", "shares"}
PART = 48
"""Bytes of a tensor that are looked for."""


def _write(kind: str, secret: bytes) -> None:
    with Path(os.environ[RECORDED]).open("a") as file:
        file.write(f"{kind}:{secret.hex()}\n")


def _recording(kind: str, made: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        found = made(*args, **kwargs)
        for each in found if isinstance(found, list | tuple) else [found]:
            _write(kind, each.to_bytes(33) if isinstance(each, int) else each)
        return found

    return make


class _Secrets(member._Secrets):
    def __init__(self) -> None:
        super().__init__()
        _write("mask private", self.mask.private_bytes_raw())
        _write("box private", self.box.private_bytes_raw())
        _write("seed", self.seed)


def _encode(plain: Path, out: Path, **options: Any) -> Any:
    found = encode_update(plain, out, **options)
    for kind, path in (("plain", plain), ("encoded", out)):
        for values in read(path).values():
            if values.size > PART:
                _write(kind, np.ascontiguousarray(values).tobytes()[1024 : 1024 + PART])
    return found


encode_update = jobs.encode_update

if __name__ == "__main__":
    jobs.encode_update = _encode
    member._Secrets = _Secrets  # type: ignore[misc]
    for name, kind in (("mask_key", "mask_key"), ("self_key", "self_key"), ("box_key", "box_key"), ("split", "shares")):
        setattr(member, name, _recording(kind, getattr(member, name)))
    run()
