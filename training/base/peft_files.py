"""The files of a PEFT adapter, `adapter_config.json` and `adapter_model.safetensors`, from a version's file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.tensors import safetensors_file

NOTE = "peft"
"""Entry of the note on the adapter in the header of a version's file."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class NoAdapter(ValueError):
    """A version that cannot be a PEFT adapter; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The note on the adapter of a model, as JSON in the header of each version."""

    name: str
    """The adapter's name in the model, such as default."""
    prefix: str
    """The prefix of the names of the `PeftModel` in the task's model."""
    config: Mapping[str, Any]
    """The adapter's configuration, as PEFT saves it."""
    frozen: Sequence[str] = ()
    """The adapter's tensors that are not exchanged."""
    elsewhere: Sequence[str] = ()
    """The exchanged tensors that do not belong to the adapter."""
    unknown: Sequence[str] = ()
    """The tensors of PEFT's file whose names the model lacks."""

    @classmethod
    def read(cls, file: Path) -> "Adapter":
        """Read the note on the adapter from a version's file.

        Raises:
            NoAdapter: it has no adapter, or tensors have no place in PEFT's files.
        """
        text = safetensors_file.read_metadata(file).get(NOTE)
        if text is None:
            raise NoAdapter("the model has no PEFT adapter (or this run is older than the export of adapters)")
        adapter = cls(**json.loads(text))
        if adapter.elsewhere:
            names = ", ".join(adapter.elsewhere)
            raise NoAdapter(f"{names}: trained, and no part of the adapter, so PEFT's files have no place for them")
        if adapter.unknown:
            raise NoAdapter(f"PEFT saves {', '.join(adapter.unknown)} under names that the model does not have")
        return adapter


def peft_name(name: str, adapter: str) -> str:
    """Return the name in PEFT's file of a tensor of the model."""
    name = name.replace(f".modules_to_save.{adapter}.", ".")
    if (magnitude := f".lora_magnitude_vector.{adapter}.weight") in name:  # of DoRA
        return name.replace(magnitude, ".lora_magnitude_vector")
    return f"{name}.".replace(f".{adapter}.", ".", 1).removesuffix(".")


def write_adapter(version: Path, adapter: Adapter, folder: Path, frozen: Path | None = None) -> None:
    """Write the files of a version's PEFT adapter.

    Args:
        version: the file of the version.
        adapter: the note on the adapter in that file.
        folder: the folder of the files, which must exist.
        frozen: the file with the adapter's frozen tensors; None: there are no frozen tensors.

    Raises:
        OSError: a file cannot be read or written.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for file in (version, frozen):
        arrays |= safetensors_file.mapped(file) if file is not None else {}
    renamed = {peft_name(name.removeprefix(adapter.prefix), adapter.name): array for name, array in arrays.items()}
    safetensors_file.write(folder / WEIGHTS, renamed, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(adapter.config, indent=2, sort_keys=True) + "\n", "utf-8")
