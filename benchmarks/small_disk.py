"""A disk that can be full: a tmpfs over one folder, in a mount namespace that a measurement and its processes share.

An ordinary user may make such a namespace where the kernel allows it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import NotMeasured

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
INSIDE = "ATOLL_BENCH_NAMESPACE"
SIZE = 256 * 2**20
BALLAST = "ballast"


def enter_namespace() -> None:
    """Execute this process again in a mount namespace, unless it is in one.

    Raises:
        NotMeasured: the kernel allows none.
    """
    if os.environ.get(INSIDE):
        return
    try:
        tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        tried = None
    if tried is None or tried.returncode:
        raise NotMeasured("this machine lets no user mount a tmpfs; a kernel with user namespaces does")
    os.environ[INSIDE] = "1"
    os.execvp(NAMESPACE[0], [*NAMESPACE, sys.executable, *sys.orig_argv[1:]])


class SmallDisk:
    """Disk of a folder, from the start of the object until `unmount`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=700", "tmpfs", str(folder)], check=True)

    def fill(self, free: int) -> None:
        """Fill the disk but for a number of bytes."""
        with (self.folder / BALLAST).open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, max(1, shutil.disk_usage(self.folder).free - free))

    def make_room(self) -> None:
        """Delete what fills the disk."""
        (self.folder / BALLAST).unlink(missing_ok=True)

    def unmount(self) -> None:
        """Give the folder back as it was before, also while a process that is ending has a file open."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
