"""The first function of a rank that the fork server has forked."""

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from atoll.parallel.engine.orphans import end_with_the_parent


def call(entry: str, *args: str) -> None:
    """Call `module:function` with its arguments, in a rank, which ends when the fork server does.

    A return is the rank's success: an exit code of 0 before it would leave torch elastic waiting forever.
    """
    end_with_the_parent()
    with suppress(OSError):  # Linux alone
        Path("/proc/self/comm").write_text(f"atoll rank {os.environ['RANK']}", "ascii")  # as `ps` and `top` show it
    module, _, name = entry.partition(":")
    try:
        getattr(import_module(module), name)(*args)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
