"""Installed packages of a test: a real `.dist-info` folder with entry points, and the modules beside it."""

from collections.abc import Mapping
from pathlib import Path

RULE = '''
class Loudest:
    """The largest value of each element."""

    def reduce(self, rows):
        return rows.max(axis=0)


loudest = Loudest()
quiet = 3
'''
SAMPLER = '''
def last(candidates, count, rng):
    """Invite the last clients in the order of their names."""
    assert 0 <= rng.random() < 1
    return [candidate.client_id for candidate in candidates][-count:]
'''


def install(
    folder: Path,
    package: str,
    *,
    version: str = "1.2",
    modules: Mapping[str, str] | None = None,
    points: Mapping[str, Mapping[str, str]] | None = None,
    text: str | None = None,
) -> Path:
    """Write a distribution as pip leaves it in a folder of `sys.path`, and return the folder.

    Args:
        folder: the place of `sys.path`.
        package: the name of the distribution.
        version: its version.
        modules: the text of each module by its name.
        points: the entry points of each group.
        text: `entry_points.txt` itself, in place of `points`.
    """
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in of_group.items())
        for group, of_group in (points or {}).items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections) if text is None else text)
    for name, source in (modules or {}).items():
        (folder / f"{name}.py").write_text(source)
    return folder
