"""The violation of an invariant, which `validate()` of a machine and of its parts raises. Pure.

`validate()` reads the whole state and changes nothing. Tests call it after each event; production code never does.
"""


class Violation(AssertionError):
    """Error: a state violates an invariant, which is a bug, never a peer's mistake.

    Args:
        invariant: its number in docs/architecture.md.
        what: the fault, with the values.
        of: the round or exchange, in words; empty: the run.
    """

    def __init__(self, invariant: int, what: str, of: str = "") -> None:
        self.invariant = invariant
        super().__init__(f"architecture, invariant {invariant}{of and f', {of}'}: {what}")
