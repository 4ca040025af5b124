"""The ranks to launch, as the launcher's process receives them. Without torch."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The ranks to launch on this machine."""

    entry: str
    """The function that each rank calls, `module:function`. The end of a rank by an error, a signal or another exit
    code than 0 restarts all."""
    args: tuple[str, ...]
    """The arguments of that function."""
    nproc: int
    max_restarts: int
    folder: str
    """Folder of torch elastic's files; used by one launcher at a time."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports beside torch: none of them may start a thread or touch a GPU."""
    is_bound: bool = False
    """End the ranks at once when the supervisor's process has ended."""

    def encode(self) -> str:
        """Return the text of an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Spec":
        """Return the ranks that `encode` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "args": tuple(fields["args"]), "preload": tuple(fields["preload"])})
