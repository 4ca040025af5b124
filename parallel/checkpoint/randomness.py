"""The random number generators of one process: PyTorch's (CPU and this rank's GPU), NumPy's and Python's."""

import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]
"""The state of all generators as JSON values."""


def generator_state() -> State:
    """Return the state of the generators."""
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": cuda,
        "python": [version, list(words), gauss],
        "numpy": {**numpy, "state": {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]}},
    }


def restore_generators(state: State) -> None:
    """Restore a state from `generator_state`."""
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy = state["numpy"]
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": np.array(numpy["state"]["key"], np.uint32)}})


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed the generators with a separate seed for each step and rank of a run."""
    words = np.random.SeedSequence((seed, step, rank)).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))
