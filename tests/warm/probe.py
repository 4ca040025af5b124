"""What a process finds at its start, as JSON: `python -m tests.warm.probe DESCRIPTOR...`, which also writes to each."""

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any


def signals(line: str) -> list[str]:
    """Return the signals of a line of /proc/self/status, but for those of the C library."""
    status = dict(each.split(":", 1) for each in Path("/proc/self/status").read_text().splitlines())
    bits = int(status[line], 16)
    return [number.name for number in signal.Signals if bits >> (number - 1) & 1]


def found() -> dict[str, Any]:
    """Return what a start by fork could have forgotten."""
    return {
        "parent": os.getppid(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "group": os.getpgrp() if os.getpgrp() != os.getpid() else "its own",
        "cwd": os.getcwd(),
        "umask": oct(os.umask(0)),
        "environment": dict(os.environ),
        "zone": time.tzname,
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "options": {**sys._xoptions},
        "main": [sys.modules["__main__"].__name__, sys.modules["__main__"].__dict__["__spec__"].name],
        "cmdline": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "comm": Path("/proc/self/comm").read_text(),
        "ignored": signals("SigIgn"),
        "caught": signals("SigCgt"),
        "blocked": signals("SigBlk"),
        "kinds": [stat.S_IFMT(os.fstat(fd).st_mode) for fd in (0, 1, 2)],
        "streams": [
            [each.name, each.encoding, each.errors, each.line_buffering, each.isatty()]
            for each in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "input": sys.stdin.read(),
    }


if __name__ == "__main__":
    for descriptor in sys.argv[1:]:
        os.write(int(descriptor), b"here")
    print(json.dumps(found()))
