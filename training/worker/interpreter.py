"""Another interpreter for a worker process: the site's virtual environment, which need not have Atoll.

Of this installation it sees only the package `atoll`, by a link in a separate folder.
"""

import os
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
"""The oldest version of Python that runs a worker."""

NEEDED = ("numpy", "safetensors")
"""The packages that every worker needs."""

CHECK_TIMEOUT_S = 60.0

_QUESTION = f"""
import sys
from importlib.util import find_spec
print(*sys.version_info[:2], *(name for name in {NEEDED} if find_spec(name) is None))
"""


def path_of_atoll(folder: Path) -> dict[str, str]:
    """Return the environment variable by which another interpreter finds Atoll, and no other package installed here.

    Args:
        folder: a private folder of this process, for the link.

    Raises:
        OSError: the link cannot be made.
    """
    link = folder.absolute() / "python" / "atoll"
    package = Path(sys.modules["atoll"].__path__[0]).absolute()
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.readlink() != package:
        made = link.with_name(f"atoll.{os.getpid()}")
        made.unlink(missing_ok=True)
        made.symlink_to(package)
        made.replace(link)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(link.parent), os.environ.get("PYTHONPATH"))))}


def fault_of_interpreter(python: Path) -> str:
    """Return the reason why an interpreter cannot run a worker; empty: it can."""
    if not python.is_file():
        return f"there is no file {python}"
    if not os.access(python, os.X_OK):
        return f"{python} is not executable"
    try:
        told = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=True
        )
        major, minor, *missing = told.stdout.split()
        version = int(major), int(minor)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{python} is not a Python interpreter: {error}"
    if version < OLDEST:
        return f"{python} is Python {major}.{minor}; allowed: {OLDEST[0]}.{OLDEST[1]} or newer"
    return f"{python} lacks {' and '.join(missing)}: install them into its environment" if missing else ""
