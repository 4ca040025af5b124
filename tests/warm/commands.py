"""The command lines that a fork can start, and the system call that starts them."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

# fmt: off
READ_AT_START = (
    "CUDA_", "GLIBC_", "GOMP_", "GRPC_ASYNCIO_", "GRPC_ENABLE_", "GRPC_PYTHON_", "LANG",
    "LC_", "LD_", "LOGLEVEL", "MALLOC_", "MKL_", "NPY_", "NUMBA_", "NUMPY_", "OMP_", "OPENBLAS_", "OPENSSL_",
    "PROTOCOL_", "PYDANTIC_", "PYTHON", "PYTORCH_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TORCH_LOGS", "TORCH_USE_",
    "TYPER_", "_TYPER_",
)
# fmt: on
"""The beginnings of the variables that the interpreter or a module reads once: a fork would miss them."""

RUN_BY_SITE = ("sitecustomize", "usercustomize")
"""The modules that the interpreter imports at its start."""

PATH = "PYTHONPATH"
"""The variable of folders that a fork puts on its path itself, if they hide nothing that the zygote has imported."""

MODULES = (
    "benchmarks.dividing",
    "tests.cli.exports.killed_export",
    "tests.client.agent_process",
    "tests.warm.probe",
)
"""The modules behind -m beside those of Atoll."""

PROGRAMS = (
    "from atoll.cli.main import run; run()",
    "from atoll.server.following.follow_process import main; main()",
    "from atoll.server.views.view_process import main; main()",
    "from multiprocessing.forkserver import main; main(",
    "from multiprocessing.spawn import spawn_main; spawn_main(",
)
"""The programs behind -c of Atoll itself and of `multiprocessing`."""

WITHOUT_COMMANDS = ("atoll.task.programs.main", "atoll.training.worker.main", *PROGRAMS[1:])
"""The programs that start no command: their processes have no zygote, and what a user's task starts execs."""


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork would miss."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name != PATH}


def hides_nothing(path: str) -> bool:
    """Return whether no folder of a `PYTHONPATH` has a module that is imported from elsewhere without it."""
    return all(map(_only_adds, path.split(os.pathsep))) if path else True


def _only_adds(folder: str) -> bool:
    if not os.path.isabs(folder):
        return False
    for each in Path(folder).iterdir() if os.path.isdir(folder) else ():
        name = each.name.split(".")[0]
        is_module = each.suffix in (".py", ".pyc", ".so") or (each / "__init__.py").exists()
        if is_module and (name in RUN_BY_SITE or not _is_found_below(name, folder)):
            return False
    return True


def _is_found_below(name: str, folder: str) -> bool:
    """Return whether the path of this process leads to a module in the folder, or to none of its name."""
    if name in sys.stdlib_module_names:
        return False
    found = PathFinder.find_spec(name)
    return found is None or found.origin is None or Path(found.origin).is_relative_to(folder)


class Call(NamedTuple):
    """The arguments of `_posixsubprocess.fork_exec`, of all supported versions of Python."""

    args: Sequence[Any]
    executables: Sequence[Any]
    close_fds: bool
    pass_fds: Sequence[int]
    cwd: Any
    env: Sequence[bytes] | None
    stdin: int
    stdin_of_parent: int
    stdout_of_parent: int
    stdout: int
    stderr_of_parent: int
    stderr: int
    errors_read: int
    errors: int
    restore_signals: bool
    start_new_session: bool
    process_group: int
    gid: Any
    gids: Any
    uid: Any
    umask: int
    preexec: Any


class Program(NamedTuple):
    """What a command line of the interpreter runs.

    Attributes:
        flags: those before it.
        kind: -m, -c or "script".
        name: of the module, the code or the script's file.
        args: all that follows.
    """

    flags: list[str]
    kind: str
    name: str
    args: list[str]


def starts_commands(program: Program) -> bool:
    """Return whether a program's process needs a zygote."""
    return not program.name.startswith(WITHOUT_COMMANDS)


def program_of(args: Sequence[str]) -> Program | None:
    """Return the program of a command line; None: a fork would not be the same."""
    if args[0] == str(Path(sys.executable).with_name("atoll")):
        return Program([], "script", args[0], [*args[1:]])
    flags, rest = [], [*args[1:]]
    while rest[:1] == ["-P"] or rest[:2] == ["-X", "faulthandler"]:
        flags.append(rest.pop(0))
        flags += [rest.pop(0)] if flags[-1] == "-X" else []
    if args[0] != sys.executable or len(rest) < 2:
        return None
    kind, name, *arguments = rest
    if kind == "-m" and (name in MODULES or name.split(".")[0] == "atoll"):
        return Program(flags, kind, name, arguments)
    if kind == "-c" and name.startswith(PROGRAMS):
        return Program(flags, kind, name, arguments)
    return None
