"""A tiny Llama of bytes from its config, and texts that every Python includes: help pages, and packages of sources."""

import importlib.util
import os
import warnings
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # PEFT's use of a former name

SEQUENCE = 96
PACKAGES = {"north": "asyncio", "south": "email", "mesh": "unittest", "east": "multiprocessing", "west": "http"}
"""The package of the standard library whose sources a site owns."""
PUBLIC = "json"
"""The package whose sources are the public text."""


def config(layers: int = 2, width: int = 64) -> "LlamaConfig":  # noqa: F821 - imported late, it takes seconds
    """Return the config: 256 bytes, 0.12 million parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
    )


def windows(text: bytes) -> TensorDataset:
    """Return the windows of a text: bytes (n, S) and the bytes that follow each (n, S)."""
    tokens = torch.tensor(list(text), dtype=torch.int64)
    count = (len(tokens) - 1) // SEQUENCE
    inputs, targets = (tokens[start : start + count * SEQUENCE].view(count, SEQUENCE) for start in (0, 1))
    return TensorDataset(inputs, targets)


def sources(package: str, *, is_test: bool) -> bytes:
    """Return the sources of a package, every fourth file or the others, each up to 20,000 bytes."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is no package of this Python")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
    chosen = [path for place, path in enumerate(files) if (place % 4 == 0) == is_test]
    return b"\n".join(path.read_bytes()[:20_000] for path in chosen)


def help_pages() -> bytes:
    """Return the pages of Python's own help, on which the base is trained."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()
