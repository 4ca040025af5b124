"""The part of a task's model that is exchanged, and the files (`Base`) of its frozen part."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from atoll.ground.faults import Refused
from atoll.task.context import Context
from atoll.task.errors import TaskBroken

ALL, TRAINED = "all", "trained"

PEFT_PREFIX, PEFT_LAYER = "base_model.model.", ".base_layer"
PEFT_COPIES = (".modules_to_save.default", ".original_module")
LORA = "lora_"
"""Parts that PEFT adds to the name of a base's tensor: before it, and within it."""


def base_name(name: str) -> str | None:
    """Return the name of a model's tensor in the files of its base, from its name in the model, under PEFT or not.

    `base_model.model.lm_head.base_layer.weight` and `lm_head.weight` are both `lm_head.weight`; a factor of LoRA is in
    no base: None.
    """
    if any(name.startswith(LORA) for name in name.split(".")[:-1]):
        return None
    name = name.removeprefix(PEFT_PREFIX)
    for added in (PEFT_LAYER, *PEFT_COPIES):
        name = name.replace(f"{added}.", ".")
    return name


@dataclass(frozen=True)
class Base:
    """The files of the tensors that every site has and none sends, for `Task(travels="trained")`.

        Task(model=make_model, base=Base("/models/llama-3-8b"), travels="trained", ...)

    Every frozen tensor of the model is read from these files, and so is the first value of a trained tensor that they
    have. The run has a digest of the names, dtypes, shapes and bytes of the frozen tensors, so the files may be divided
    differently at each site. A site with other values is refused in each round, before it trains.

    Raises:
        ValueError: a field is of a wrong type; the message lists all faults.
    """

    folder: str | PathLike[str] | Callable[[Context], str | PathLike[str]]
    """Folder with safetensors files, with or without an index (`model.safetensors.index.json`), or one such file. Or a
    function of the context, for a place that each site names: `lambda context: context.settings["base"]`."""

    names: Callable[[str], str | None] = base_name
    """Name of a model's tensor -> its name in the files; None: it keeps its values from the model's construction. The
    default removes PEFT's additions to names."""

    unused: Sequence[str] = ()
    """Tensors in the files that the model does not have, such as "vision.*"; any others are refused."""

    def __post_init__(self) -> None:
        faults = [*self._faults()]
        if faults:
            raise Refused(*(f"Base: {fault}" for fault in faults))
        object.__setattr__(self, "unused", tuple(self.unused))

    def _faults(self) -> Iterator[str]:
        if not (callable(self.folder) or (isinstance(self.folder, str | PathLike) and str(self.folder))):
            yield f"folder must be a path, or a function of the context that returns one, got {self.folder!r}"
        if not callable(self.names):
            yield f"names must be a function from a tensor's name to its name in the files, got {self.names!r}"
        are_patterns = not isinstance(self.unused, str) and isinstance(self.unused, Sequence)
        if not (are_patterns and all(isinstance(pattern, str) and pattern for pattern in self.unused)):
            yield f"unused must be a list of names, got {self.unused!r}"


def travelling_faults(travels: object, base: object) -> Iterator[str]:
    """Yield the faults of `Task.travels` and `Task.base`."""
    if travels not in (ALL, TRAINED):
        yield f'travels must be "{ALL}" or "{TRAINED}", got {travels!r}'
    if base is not None and not isinstance(base, Base):
        yield f"base must be a Base or None, got {base!r}"
    elif base is not None and travels == ALL:
        yield 'base is for tensors that are not exchanged: set travels="trained"; a whole model starts from model.start'


def place_of(base: Base, context: Context) -> Path:
    """Return the folder or file of a base at this site.

    Raises:
        TaskBroken: its function returns no path.
    """
    found: Any = base.folder(context) if callable(base.folder) else base.folder
    if not isinstance(found, str | PathLike) or not str(found):
        raise TaskBroken(f"Base(folder=...): the function of the context must return a path, got {found!r}")
    return Path(found).expanduser()
