"""The files for outsiders, held against the project: licence, changelog, templates, commit hooks and pins."""

import hashlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll import __version__
from tools.docs import commands

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
HOOKS = ROOT / ".pre-commit-config.yaml"
TEMPLATES = [*sorted((ROOT / ".github").rglob("*.yml")), *sorted((ROOT / ".github").rglob("*.md"))]
FORMS = [path for path in TEMPLATES if path.suffix == ".yml" and path.name != "config.yml"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *TEMPLATES, HOOKS, ROOT / "constraints.txt"]

APACHE_2_0 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""

COPYRIGHT = re.compile(r"Copyright \d{4} the Atoll authors")


def test_the_licence_is_the_whole_apache_licence_with_our_name_in_its_appendix() -> None:
    text, count = COPYRIGHT.subn("Copyright [yyyy] [name of copyright owner]", (ROOT / "LICENSE").read_text("ascii"))
    assert count == 1
    assert hashlib.sha256(text.encode()).hexdigest() == APACHE_2_0


def test_the_changelog_has_the_version_of_the_project() -> None:
    assert PROJECT["version"] == __version__
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    if len(headings) == 1:
        assert f"{__version__}, the first release" in changelog
    else:
        assert headings[1].split()[0] == __version__


# ---------------------------------------------------------------- make


def make_targets_named(text: str) -> set[str]:
    """The targets of `make NAME` in backticks, at the beginning of a fenced or commented line, or as a hook's entry."""
    fenced = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^ *make ([a-z][a-z-]*)", fenced, re.MULTILINE)
    return {*lines, *re.findall(r"(?:`|# +|entry: )make ([a-z][a-z-]*)", text)}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))


def test_every_make_target_that_a_page_names_is_there() -> None:
    for page in PAGES:
        assert make_targets_named(page.read_text("utf-8")) <= make_targets(), page


def test_a_make_target_that_is_not_there_is_noticed() -> None:
    named = make_targets_named(
        "do `make moon` first\nmake sense\n```bash\nmake tide\n```\n#  make waves\nentry: make check\n"
    )
    assert named == {"moon", "tide", "waves", "check"}
    assert named & make_targets() == {"check"}


def test_every_make_target_is_declared_phony() -> None:
    """Most have a folder or a file of the same name, now or one day: `docs`, `tests`."""
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())  # type: ignore[index]
    assert phony == make_targets()


# ---------------------------------------------------------------- commit hooks


def hooks() -> list[dict[str, Any]]:
    repositories = yaml.safe_load(HOOKS.read_text("utf-8"))["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    return [hook for repository in repositories for hook in repository["hooks"]]


def test_the_commit_hooks_run_all_that_make_check_runs() -> None:
    [check] = [hook for hook in hooks() if hook["entry"] == "make check"]
    assert check["always_run"]
    assert not check["pass_filenames"]
    assert "pre-commit" in check.get("stages", ["pre-commit"])


def test_the_commit_hooks_for_staged_files_ask_for_nothing_beyond_make_check() -> None:
    recipe = re.search(r"^check: setup\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    checks = {" ".join(shlex.split(line.replace("$(BIN)", ".venv/bin"))[:2]) for line in recipe[1].splitlines()}
    quick = [hook["entry"] for hook in hooks() if hook["entry"] != "make check"]
    assert quick
    assert {" ".join(entry.split()[:2]) for entry in quick} <= checks


def test_the_commit_hooks_download_nothing() -> None:
    assert {hook["language"] for hook in hooks()} == {"system"}


# ---------------------------------------------------------------- pins


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert lines[0].startswith("#")
    return [line for line in lines if not line.startswith("#")]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_all_that_a_checkout_asks_for_is_pinned_and_torch_where_the_makefile_says() -> None:
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    names = {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in asked}  # type: ignore[index]
    assert names <= {canonical(pin.partition("==")[0]) for pin in pins()}
    assert re.search(r"^TORCH := (.*)$", MAKEFILE, re.MULTILINE)[1] in pins()  # type: ignore[index]


def test_the_pins_are_versions_in_the_order_that_make_constraints_gives() -> None:
    assert [pin for pin in pins() if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert pins() == sorted(pins(), key=str.upper)


# ---------------------------------------------------------------- issue forms

KINDS = {"markdown": {"value"}, "textarea": {"label"}, "input": {"label"}, "dropdown": {"label", "options"}}
"""Of an element of a form: what it must have, by its type."""


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_is_one_that_the_platform_shows(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    assert form.keys() == {"name", "description", "labels", "body"}
    for element in form["body"]:
        assert KINDS[element["type"]] <= element["attributes"].keys(), element
        assert all(isinstance(option, str) for option in element["attributes"].get("options", ())), element
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 1


def faults_of_command(line: str) -> list[str]:
    """The words of a command line that `atoll` does not know: its command, or an option."""
    words = line.split()
    known = dict(commands())
    known["atoll backup"] = known["atoll backup make"]  # the group's default
    path = next((" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in known), None)
    if path is None:
        return [] if words[1:] in (["--version"], ["--install-completion"], ["--show-completion"]) else [line]
    options = {option for parameter in known[path].params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in words if word.startswith("--") and word not in options]


@pytest.mark.parametrize("path", [ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *TEMPLATES], ids=lambda path: path.name)
def test_every_command_that_an_outsider_reads_is_there(path: Path) -> None:
    named = re.findall(r"`(atoll [^`]+)`|^ *(?:\$ )?(atoll [^#&\n]+)", path.read_text("utf-8"), re.MULTILINE)
    assert [fault for quoted, line in named for fault in faults_of_command(" ".join((quoted or line).split()))] == []


def test_a_command_that_is_not_there_is_noticed() -> None:
    assert faults_of_command("atoll run show RUN --json") == faults_of_command("atoll --version") == []
    assert faults_of_command("atoll run explain RUN") == ["atoll run explain RUN"]
    assert faults_of_command("atoll simulate TASK --fast") == ["--fast"]
