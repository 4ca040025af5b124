"""The `atoll` commands of a page's text, parsed by the command line itself, which executes nothing."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from click.exceptions import ClickException, Exit

from atoll.cli.sections import Section, described
from atoll.operations.faults import CommandError
from tests.cli.invoking import COMMAND

SUBSTITUTED = re.compile(r"\$\([^()]*\)|\$\w+|`[^`]*`")
ENDS = re.compile(r"\s(?:&&?|\|\|?|;|>{1,2}|2>&1|#)(?:\s|$)|;(?:\s|$)")


def commands_in(script: str) -> Iterator[list[str]]:
    """Yield the words after `atoll` of each command of a script, also of those inside of `$(...)`."""
    for line in script.replace("\\\n", " ").splitlines():
        for inner in re.findall(r"\$\(([^()]*)\)", line):
            yield from commands_in(inner)
        text = SUBSTITUTED.sub("WORD", line)
        for found in re.finditer(r"(?:^\s*|[;&|] +|\bdo +|\bthen +|[A-Z_]+=\S+ +|\$ |-m )atoll(?= )", text):
            rest = text[found.end() :]
            end = ENDS.search(rest)
            yield shlex.split(rest[: end.start()] if end else rest, comments=True)


def fault_of(words: list[str]) -> str:
    """Return why the command line refuses these words; empty: it takes them.

    The options about the completion act while they are parsed, and install it in a home directory.
    """
    if words[:1] in (["--install-completion"], ["--show-completion"]):
        return ""
    command, context, name, rest = COMMAND, None, "atoll", [*words]
    try:
        while True:
            context = command.make_context(name, rest, parent=context)
            if not hasattr(command, "resolve_command"):
                return _unknown_setting(words)
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    except (ClickException, CommandError) as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return f"atoll {' '.join(words)}: {message}"
    except Exit:  # --help and --version
        return ""


def _unknown_setting(words: list[str]) -> str:
    """Return the first `--set KEY=VALUE` whose key no table of settings has; empty: there is none."""
    for option, value in pairwise(words):
        key = value.partition("=")[0].strip()
        is_of_a_task = key.startswith(("task.", "sites."))  # each task has its own
        if option == "--set" and key not in setting_keys() and key != "KEY" and not is_of_a_task:
            return f"--set {value}: there is no setting {key}"
    return ""


@cache
def setting_keys() -> frozenset[str]:
    """Return the keys of all settings, as `atoll settings` prints them, and the tables that they are in."""
    keys = {setting.key for section in Section for setting in described(section)}
    return frozenset(keys | {key.rpartition(".")[0] for key in keys if "." in key})
