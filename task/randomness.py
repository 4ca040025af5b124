"""The global random generators of Python, numpy and torch, seeded together. Importing this file does not import torch.

A model, the data of a site and an evaluation are made with seeded generators, whose states are then restored: so the
draws of a task depend on the run's seed alone, and not on the process, on its earlier work, or on the way to run. A
training does not restore them: its process belongs to it.
"""

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.task.collated import check_form
from atoll.task.context import context_of, within
from atoll.task.noise import Noise

if TYPE_CHECKING:
    from atoll.ground.noise.generator import SecretGenerator
    from atoll.task.task import Task

DATA_SEED = 0
"""The seed with which every data set is read: a random split of shared data is then the same for all sites, splits,
processes and runs, so that no example is in two parts."""


def training_seed(seed: int, run_name: str, round_id: int, site: str) -> int:
    """Return the 63-bit seed of one client's training in one round.

    It depends on (run, round, client) alone, so that a client that trains again gets the same bits.

        (first 8 bytes of SHA-256(JSON of [seed, run_name, round_id, site]), little-endian) >> 1
    """
    text = f"[{seed}, {quoted(run_name)}, {round_id}, {quoted(site)}]"  # takes a third of the time of `json.dumps`
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's and numpy's global generators, and torch's if it is loaded; numpy's takes the low 32 bits.

    Without a GPU torch's is that of the CPU: `torch.manual_seed` would queue the seed, with the formatted stack of the
    call, for each kind of accelerator that has not begun, in a millisecond and in memory that is never freed.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        if _has_accelerator():
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)


def seed_from(generator: "SecretGenerator") -> None:
    """Seed the global generators from a secret, with all the bits that each takes: 32 bits are soon guessed.

    A Mersenne Twister can be predicted from enough of its output, so secret noise is drawn from the secret itself.
    """
    random.seed(generator.bytes(32))
    np.random.seed(generator.integers(0, 2**32, 8, dtype=np.uint32))
    if torch := sys.modules.get("torch"):
        torch.default_generator.set_state(generator.torch_state(torch.default_generator.get_state()))
        if _has_accelerator():
            torch.get_device_module().manual_seed_all(int(generator.integers(0, 2**63)))


@cache
def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def repeat_on(device: str) -> None:
    """Set torch to use deterministic operations in all of this process; on a CPU it always does.

    On a GPU the gradients of convolutions and of embeddings differ from run to run otherwise. Torch warns once of an
    operation that it cannot replace; with `torch.use_deterministic_algorithms(True)` in a task's file, which stays, it
    replaces more (attention in float32), and refuses the others.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cpu":
        return
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def states_of_generators() -> list[object]:
    """Return the states of this process's global generators; equal states: no number was drawn in between."""
    of_numpy: Any = np.random.get_state()
    states: list[object] = [random.getstate(), of_numpy[1].tobytes(), of_numpy[2]]
    if torch := sys.modules.get("torch"):
        states.append(bytes(torch.get_rng_state().numpy()))
        if torch.cuda.is_initialized():
            states.append(bytes(torch.cuda.get_rng_state().numpy()))
    return states


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore all generators at the end (torch's: the CPU's, and this process's GPU's once it is in use)."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    of_torch = torch.get_rng_state() if torch else None
    of_gpu = torch.cuda.get_rng_state() if torch and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if torch:
            torch.set_rng_state(of_torch)
        if torch and of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators in the block, and restore them at the end."""
    with generators_kept():
        seed_everything(seed)
        yield


def data_of(task: "Task", site: str, split: str, noise: Noise | None = None) -> Any:
    """Return `task.data(site, split)`, read with seeded generators; errors as in `collated.check_form`."""
    with generators_kept():
        return seeded_data_of(task, site, split, noise)


def seeded_data_of(task: "Task", site: str, split: str, noise: Noise | None = None) -> Any:
    """Return `task.data(site, split)` as `data_of`, without restoring the generators: faster for many sites."""
    seed_everything(DATA_SEED)
    with within(context_of(task, site=site, noise=noise or Noise())):
        return check_form(task.data(site, split), f"task.data({site!r}, {split!r})", has_fit=task.fit is not None)


def server_data_of(task: "Task") -> Any:
    """Return the server's data, read with seeded generators; None: the task has none. Errors as in `data_of`."""
    if task.test_data is None:
        return None
    with seeded(DATA_SEED), within(context_of(task)):
        return check_form(task.test_data(), "task.test_data()", has_fit=task.fit is not None)
