"""The zygote: `python -m tests.warm.zygote` serves the socket that is its standard input."""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.ground.process import crash_points
from tests.warm.commands import PATH, Program, starts_commands
from tests.warm.start import NAME, SYS_CLONE, Zygote, let_commands_start_by

PRELOAD = (
    "torch.distributed.checkpoint",
    "grpc.aio",
    "atoll.cli.commands",
    "atoll.cli.serving.agent",
    "atoll.cli.serving.coordinator",
    "atoll.client.process",
    "atoll.server.hosting.coordinator",
    "atoll.server.process",
    "atoll.server.ranks.process",
    "atoll.server.following.follow_process",
    "atoll.server.views.view_process",
    "atoll.training.worker.main",
    "atoll.parallel.launch.entry",
)
"""What coordinators, agents, workers and the commands that show something import. Not torch's compiler: the code asks
whether that is there."""

CLONE_PARENT = 0x00008000
CLONE_CHILD_SETTID = 0x01000000
PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each order; return in the forked process, with the order and its descriptors."""
    Path("/proc/self/comm").write_text(NAME)
    while True:
        order, fds, _, _ = socket.recv_fds(connection, 1 << 20, 250)
        if not order:
            os._exit(0)  # the process that it serves has ended
        pid = clone_as_sibling()
        if pid == 0:
            connection.close()
            return json.loads(order), fds
        connection.send(pid.to_bytes(8, "big"))
        for fd in fds:
            os.close(fd)


def clone_as_sibling() -> int:
    """Fork a process that is a child of this one's parent, as `os.fork` a child of its own."""
    python = ctypes.pythonapi
    words = (ctypes.c_int * 512).from_address(threading.get_ident())
    thread_id = [*words].index(threading.get_native_id())  # where the C library keeps it
    arguments = [CLONE_PARENT | CLONE_CHILD_SETTID | signal.SIGCHLD, 0, 0]
    place = ctypes.addressof(words) + ctypes.sizeof(ctypes.c_int) * thread_id
    arguments += [0, place] if os.uname().machine == "aarch64" else [place, 0]
    python.PyOS_BeforeFork()
    pid = python.syscall(SYS_CLONE[os.uname().machine], *map(ctypes.c_long, arguments))
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    if pid < 0:
        raise OSError("no process could be forked")
    return int(pid)


def next_command(connection: socket.socket) -> tuple[dict[str, Any], list[int], socket.socket | None]:
    """Serve as a zygote; return in a command's process: its order, its descriptors, the line to its zygote, if any."""
    while True:
        order, fds = serve(connection)
        if order["session"]:
            os.setsid()
        if not starts_commands(Program(*order["program"])):
            return order, fds, None
        ours, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            connection.close()
            return order, fds, ours
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with the command's main thread, which has forked it
        for fd in (ours.detach(), *fds):
            os.close(fd)


def preload() -> list[Callable[[], object]]:
    """Import the modules; return the registrations of what they do at the end of a process, which are yet to be made.

    The command registers what it does last before it imports anything else.
    """
    kept: list[Callable[[], object]] = []
    register = atexit.register

    def keep(function: Callable[..., object], *args: object, **kwargs: object) -> Callable[..., object]:
        kept.append(lambda: register(function, *args, **kwargs))
        return function

    atexit.register = keep  # type: ignore[assignment]
    gc.disable()
    for module in PRELOAD:
        importlib.import_module(module)
    for finalizer in list(getattr(weakref.finalize, "_registry")):  # noqa: B009 - private
        finalizer.detach()  # torch would take apart its operators at the end, and copy their pages
    gc.collect()
    gc.freeze()  # a collection writes to all that it visits: each fork would copy the pages
    gc.enable()
    atexit.register = register
    assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread, which no fork would have"
    return kept


def become(order: Mapping[str, Any], fds: Sequence[int]) -> Program:
    """Give this process what the command would have after an exec; return its program."""
    program = Program(*order["program"])
    Path("/proc/self/comm").write_text(Path(program.name if program.kind == "script" else sys.executable).name)
    os.fchdir(fds[0])
    os.umask(order["umask"])
    _take_places(order["places"], fds)
    own_path = os.environ.get(PATH, "")
    os.environ.clear()
    os.environ.update(order["environment"])
    if os.environ.get(PATH, "") != own_path:
        sys.path[:] = dict.fromkeys([*os.environ[PATH].split(os.pathsep), *sys.path])
    importlib.reload(crash_points)  # which reads the environment
    time.tzset()
    _open_streams()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = number in order["ignored"] or number in (signal.SIGPIPE, signal.SIGXFSZ)
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if is_ignored else usual)
    _interpret(program)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    return program


def _take_places(places: Sequence[int], fds: Sequence[int]) -> None:
    """Move the descriptors of an order, but for that of its folder, to where the command expects them."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(places) + 1) for fd in fds[1:]]
    for fd in fds:
        os.close(fd)
    for place, fd in zip(places, high, strict=True):
        os.dup2(fd, place)
        os.close(fd)


def _open_streams() -> None:
    """Open the standard streams as the interpreter does, which knows only now whether they are terminals."""
    is_buffered = not sys.stderr.write_through
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        binary: Any = open(fd, "wb" if fd else "rb", -1 if is_buffered or not fd else 0, closefd=False)  # noqa: SIM115
        getattr(binary, "raw", binary).name = f"<{name}>"
        is_by_line = is_buffered and (fd == 2 or binary.isatty())
        stream = io.TextIOWrapper(binary, old.encoding, old.errors, "\n", is_by_line, write_through=not is_buffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _interpret(program: Program) -> None:
    """Set what the interpreter makes of its command line."""
    head = [] if program.kind == "script" else [program.kind]
    sys.orig_argv = [sys.executable, *program.flags, *head, program.name, *program.args]
    sys.argv = [*(head or [program.name]), *program.args]
    if "-P" not in program.flags:
        first = {"-m": os.getcwd(), "-c": "", "script": str(Path(program.name).parent)}
        sys.path.insert(0, first[program.kind])
    _show(sys.orig_argv)
    sys.path_importer_cache.clear()  # what it lists may have changed since
    if "faulthandler" in program.flags:
        sys._xoptions["faulthandler"] = True
        faulthandler.enable()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # every interpreter begins with numbers of its own


def _show(command: Sequence[str]) -> None:
    """Let /proc/PID/cmdline be the command, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the fields 48 and 49
    text = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def run(program: Program) -> None:
    """Run the program as this process's main module."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if program.kind == "-m":
        getattr(runpy, "_run_module_as_main")(program.name)  # noqa: B009 - the interpreter calls it itself
        return
    is_script = program.kind == "script"
    source = Path(program.name).read_text() if is_script else program.name
    if is_script:
        main.__file__ = program.name
    exec(compile(source, program.name if is_script else "<string>", "exec"), vars(main))


def end(error: SystemExit) -> None:
    """End this process as the interpreter does after an exit, but without the destruction of modules.

    That would copy the pages of all modules of the zygote, which takes longer than most commands.
    """
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    if code != error.code and error.code is not None:
        print(error.code, file=sys.stderr)
    getattr(threading, "_shutdown")()  # noqa: B009 - the interpreter calls it
    getattr(atexit, "_run_exitfuncs")()  # noqa: B009
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        raise SystemExit(code) from None  # the interpreter reports it in its own way
    os._exit(code & 0xFF)


def main() -> None:
    """Be a zygote; go on as a command in each process that it forks."""
    del sys.path[0]  # this repository, for -m
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # a command may have tests of its own
    environment = {**os.environ}
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one that comes early waits for the command
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(2, 0)
    ends = preload()
    order, fds, ours = next_command(connection)
    if ours is not None:
        high = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, max(order["places"]) + 1 + len(fds)))
        ours.close()
        warm = Zygote(high, environment)
        let_commands_start_by(lambda: warm)
    program = become(order, fds)
    try:
        run(program)
        raise SystemExit
    except SystemExit as error:
        code = error
    finally:
        for register in ends:
            register()
    end(code)


if __name__ == "__main__":
    main()
