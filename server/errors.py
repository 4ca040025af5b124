"""The errors of the server that an operator reads."""


class OperatorError(RuntimeError):
    """The operator asked for something that cannot be; the message says what can."""


class UnknownRun(OperatorError):
    """There is no such run here."""


class StoreCorrupted(OSError):
    """What lies on disk is not what was written there; the text says what, where, and what can be done."""


class StateUnusable(OSError):
    """The path, or the database, is nothing that a coordinator could use."""


class StateInUse(OSError):
    """Another coordinator has the directory, or the database."""


class DatabaseAway(StateUnusable):
    """The server does not answer, or not now."""
