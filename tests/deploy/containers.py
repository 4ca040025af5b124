"""Containers without a daemon: a Debian root, images by buildah, and processes in a read-only root of their own."""

import ast
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests import debian

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".image"
BASE = "localhost/atoll-base"
BUILDAH = ("buildah", "--root", str(CACHE / "storage"), "--runroot", str(CACHE / "run"))


def missing() -> str:
    """Name what this machine lacks; empty: nothing."""
    if lacking := debian.missing("mmdebstrap", "buildah"):
        return lacking
    if os.geteuid() != 0:
        return "a container's root is mounted by root, and this is another user"
    return ""


def buildah(*arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [*BUILDAH, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == 0, f"buildah {arguments[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


def pip_settings() -> tuple[str, list[str]]:
    """Return pip's own configuration here as one file's text, and the paths that its values name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    sections: dict[str, dict[str, str]] = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        sections.setdefault("global" if section == ":env:" else section, {})[key] = ast.literal_eval(value)
    text = "".join(
        f"[{section}]\n" + "".join(f"{key} = {' '.join(value.split())}\n" for key, value in values.items())
        for section, values in sections.items()
    )
    words = [word for values in sections.values() for each in values.values() for word in each.split()]
    # The pages of an index in a folder name files beside it.
    paths = {str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file:///")}
    paths |= {word for word in words if word.startswith("/")}
    return text, sorted(path for path in paths if Path(path).exists())


def base() -> None:
    """Import the Debian root as an image, from the cache if it is there."""
    if subprocess.run([*BUILDAH, "inspect", "--type", "image", BASE], capture_output=True, check=False).returncode == 0:
        return
    CACHE.mkdir(exist_ok=True)
    archive = CACHE / "root.tar"
    if not archive.exists():
        part = archive.with_suffix(".part")
        with part.open("wb") as file:
            included = "--include=python3,python3-venv,ca-certificates"
            command = ["mmdebstrap", "--variant=minbase", included, "--format=tar", "bookworm", "-"]
            done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        part.rename(archive)
    container = buildah("from", "scratch")
    buildah("add", container, str(archive), "/")
    buildah("commit", "--rm", container, BASE)


def build(target: str, wheels: Path) -> "Image":
    """Build one target of the Containerfile."""
    text, paths = pip_settings()
    mounts = [part for path in paths for part in ("-v", f"{path}:{path}:ro")]
    buildah(
        *("bud", "--isolation", "chroot", "--layers", "--build-arg", f"BASE={BASE}", "--target", target, *mounts),
        *("--secret", "id=pip,env=ATOLL_PIP_SETTINGS", "-f", str(ROOT / "deploy/Containerfile")),
        *("-t", f"localhost/atoll-{target}", str(wheels)),
        environment={"ATOLL_PIP_SETTINGS": text},
    )
    return Image(f"localhost/atoll-{target}")


@dataclass(frozen=True)
class Image:
    """A built image, whose files are at `root` while it is mounted."""

    name: str

    @cached_property
    def described(self) -> dict:
        return json.loads(buildah("inspect", "--type", "image", self.name))

    @property
    def config(self) -> dict:
        return self.described["OCIv1"]["config"]

    @cached_property
    def container(self) -> str:
        return buildah("from", self.name)

    @cached_property
    def root(self) -> Path:
        return Path(buildah("mount", self.container))

    def remove(self) -> None:
        buildah("rm", self.container)

    def command(self, *arguments: str, state: Path, mounts: dict[str, Path] | None = None) -> list[str]:
        """Return the command that runs this image's program, or its default one, with a read-only root.

        The process has a mount namespace of its own, the image's user, environment and working directory, a volume for
        its state, and an empty /tmp: what a container's runtime gives it with `--read-only --tmpfs /tmp`.
        """
        root, config = shlex.quote(str(self.root)), self.config
        steps = ["set -e", f"mount --bind {root} {root}"]
        for source, place, read_only in (
            (str(state), "/var/lib/atoll", False),
            *((str(path), place, True) for place, path in (mounts or {}).items()),
            ("/proc", "/proc", False),
            ("/dev", "/dev", False),
        ):
            steps.append(f"mount --rbind {shlex.quote(source)} {root}{place}")
            if read_only:
                steps.append(f"mount -o remount,ro,bind {root}{place}")
        steps += [f"mount -t tmpfs tmpfs {root}/tmp", f"mount -o remount,ro,bind {root}"]
        program = [*config["Entrypoint"], *(arguments or config["Cmd"])]
        inside = ["env", "-i", "-C", config["WorkingDir"], *config["Env"], *program]
        steps.append(f"exec chroot --userspec={config['User']} {root} {shlex.join(inside)}")
        return ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", "\n".join(steps)]
