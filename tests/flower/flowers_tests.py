"""Flower's own tests of its strategies, with each aggregation played again natively: `make flower-strategy-tests`.

python -m tests.flower.flowers_tests [CHECKOUT]

CHECKOUT is a folder with Flower's sources, of the release that is installed here; its wheel has no tests. Nothing is
fetched, and nothing in it is changed: the tests are copied, and their relative imports name the installed package.
"""

import importlib
import re
import sys
import tempfile
from pathlib import Path

import pytest

PLACE = Path("framework/py/flwr/serverapp/strategy")
PACKAGE = "flwr.serverapp.strategy"
NONE = (
    "skipped: no checkout of Flower is named: make flower-strategy-tests FLOWER=path/to/flower, a clone of "
    "https://github.com/adap/flower at the tag of the installed flwr"
)


def main(arguments):
    """Run the tests of a checkout; return the exit code."""
    if not arguments or not arguments[0]:
        print(NONE)
        return 0
    checkout = Path(arguments[0])
    place = checkout / PLACE if (checkout / PLACE).is_dir() else checkout
    tests = sorted(place.glob("*_test.py"))
    if not tests:
        print(f"{checkout}: there is no file {PLACE}/*_test.py, nor one here; name the root of a clone of Flower")
        return 2
    with tempfile.TemporaryDirectory(prefix="atoll-flowers-tests-") as folder:
        run = [name for name in copied(tests, Path(folder)) if importable(name, folder)]
        if not run:
            return 2
        files = [str(Path(folder) / f"{name}.py") for name in run]
        options = ["-q", "-p", "tests.flower.replaying", "-p", "no:cacheprovider", "--rootdir", folder]
        return int(pytest.main([*options, "-c", "/dev/null", "-o", "python_files=*_test.py", *files]))


def copied(tests, folder):
    """Copy tests into a folder, their imports made absolute; yield the names of their modules."""
    names = {test.stem for test in tests}
    for test in tests:
        text = test.read_text(encoding="utf-8")
        (folder / test.name).write_text(absolute(text, names), encoding="utf-8")
    yield from sorted(names)


def absolute(text, tests):
    """Return a module of Flower's package of strategies with absolute imports; other tests are modules beside it."""

    def found(match):
        dots, module = match[1], match[2]
        if dots == "." and module in tests:
            return f"from {module} import"
        *package, _ = [*PACKAGE.split("."), ""]
        parent = ".".join(package[: len(package) - len(dots) + 1])
        return f"from {parent}.{module} import" if module else f"from {parent} import"

    return re.sub(r"^from (\.+)([\w.]*) import", found, text, flags=re.MULTILINE)


def importable(name, folder):
    """Return whether a module of tests can be imported here; say why not."""
    sys.path.insert(0, folder)
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"left out: {name}: {error}")
        return False
    finally:
        sys.path.remove(folder)
        sys.modules.pop(name, None)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
