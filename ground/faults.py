"""Refusals with several faults, a sentence each."""


class Refused(ValueError):
    """A refusal of values; `faults` has every fault, and the message joins them with semicolons."""

    def __init__(self, *faults: str) -> None:
        super().__init__(*faults)
        self.faults = faults

    def __str__(self) -> str:
        """Return all faults on one line."""
        return "; ".join(self.faults)


def faults_in(error: Exception) -> tuple[str, ...]:
    """Return the faults of an error: those of a refusal, or the message of any other."""
    return error.faults if isinstance(error, Refused) else (str(error),)
