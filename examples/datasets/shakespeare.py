"""Shakespeare's plays as text, each speaking role an owner; examples are windows of characters.

Two layouts are supported. "plays": Project Gutenberg's complete works (pg100.txt), from which McMahan et al. 2017 and
LEAF made their data; there a role belongs to its play. "headings": one file of speeches, separated by empty lines, each
under a line "NAME:", as in tinyshakespeare; there a role is a name.

    MARK ANTONY:                                        plays:      Ant. Friends, Romans, countrymen,
    Friends, Romans, countrymen,                                      lend me your ears.

Source:
    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section
    3: a client for each role with at least two lines; the first 80 % of its lines to train on, the last 20 % to test.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from atoll.ground.text_files import NotText, text_of
from atoll.parallel.data.batch import IGNORED
from examples.datasets.folder import BadData, read_checked
from examples.datasets.owned import Ints, Owned

AUTHOR = "by William Shakespeare"
"""The line by which the complete works are recognized."""
UNINDENTED = "THE COMEDY OF ERRORS"
"""The one play whose lines the file does not indent."""

_HEADING = re.compile(r"[^\n:]{1,60}:")
_SPEAKER, _CONTINUED = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)")


@dataclass(frozen=True)
class Roles(Owned):
    """Windows of every role's lines: inputs (n, S) and targets (n, S), the characters that follow, int64."""

    characters: str
    """All characters of the text, sorted; a character's code is its index in them."""


def read_shakespeare(
    path: Path, *, sequence: int = 80, test_fraction: float = 0.2, min_lines: int = 2, sha256: str | None = None
) -> Roles:
    """Read the roles of a text, with their lines in windows of `sequence` characters.

    The end of a role's last window is padded, and its targets are -100 there, which `cross_entropy` ignores.

    Args:
        path: of the text, UTF-8, in one of the two layouts.
        sequence: characters of a window (S >= 1).
        test_fraction: of each role's lines, the last, at least one, for the test split; 0: none.
        min_lines: roles with fewer are left out.
        sha256: of the file; as for `read_checked`.

    Raises:
        NoData: there is no such file.
        BadData: it is no text in one of the layouts.
        ValueError: an argument is out of range.
    """
    if sequence < 1 or not 0 <= test_fraction < 1:
        raise ValueError(f"sequence must be at least 1 and test_fraction in [0, 1), got {sequence}, {test_fraction}")
    content = read_checked(path, sha256)
    try:
        text = text_of(content, path).replace("\r\n", "\n")
    except NotText as error:
        raise BadData(str(error)) from error
    roles = {role: lines for role, lines in lines_of(text).items() if len(lines) >= min_lines}
    if not roles:
        layouts = f'plays "{AUTHOR}", nor speeches under headings "NAME:"'
        raise BadData(f"{path}: has neither {layouts}, of a role with {min_lines} lines or more")
    characters = "".join(sorted({letter for lines in roles.values() for line in lines for letter in line} | {"\n"}))
    return _windows(roles, characters, sequence, test_fraction)


def lines_of(text: str) -> dict[str, list[str]]:
    """Return the lines of each role, in the order in which the roles first speak."""
    return _of_plays(text) if layout_of(text) == "plays" else _of_headings(text)


def layout_of(text: str) -> Literal["plays", "headings"]:
    """Return the layout of a text."""
    return "plays" if AUTHOR in text else "headings"


def _of_headings(text: str) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = {}
    for speech in re.split(r"\n\s*\n", text.strip()):
        heading, *lines = speech.split("\n")
        if _HEADING.fullmatch(heading):
            roles.setdefault(heading[:-1], []).extend(line for line in lines if line.strip())
    return {role: lines for role, lines in roles.items() if lines}


def _of_plays(text: str) -> dict[str, list[str]]:
    """Return the lines of each role, named PLAY_NAME, without lines of no speaker; a play with one role is a sonnet."""
    plays: dict[str, dict[str, list[str]]] = {}
    play, speaker, title = "", None, ""
    for line in text.split("\n"):
        if AUTHOR in line:
            play, speaker = title, None
        elif line.strip():
            indented = f"  {line}" if play == UNINDENTED else line
            if play and (spoken := _SPEAKER.fullmatch(indented)) and not spoken[1].upper().startswith("ACT "):
                speaker = re.sub(r"\W+", "_", f"{play}_{spoken[1].upper()}")
                plays.setdefault(play, {}).setdefault(speaker, []).append(spoken[2])
            elif _ends_speech(indented, play):
                speaker = None
            elif speaker and (continued := _CONTINUED.fullmatch(f"  {indented}" if play == UNINDENTED else line)):
                plays[play][speaker].append(continued[1])
            title = line.strip()
    return {role: lines for roles in plays.values() if len(roles) > 1 for role, lines in roles.items()}


def _ends_speech(line: str, play: str) -> bool:
    """Return whether a line ends a speech; without indentation, only the beginning of an act or a remark does."""
    return play == UNINDENTED and line.strip().startswith(("ACT ", "<"))


def _windows(roles: Mapping[str, list[str]], characters: str, sequence: int, test_fraction: float) -> Roles:
    codes = {letter: code for code, letter in enumerate(characters)}
    parts: dict[str, dict[str, Ints]] = {"train": {}, "test": {}}
    blocks: list[Ints] = []
    begin = 0
    for role, lines in roles.items():
        num_test = max(int(len(lines) * test_fraction), 1) if test_fraction and len(lines) > 1 else 0
        for split, own in (("train", lines[: len(lines) - num_test]), ("test", lines[len(lines) - num_test :])):
            if own:
                block = _cut(np.array([codes[c] for c in "\n".join(own) + "\n"], np.int64), sequence)
                parts[split][role] = np.arange(begin, begin := begin + len(block))
                blocks.append(block)
    both = torch.from_numpy(np.concatenate(blocks))
    targets = both[:, 1:].clone()
    return Roles(TensorDataset(both[:, :-1].clamp(min=0), targets), parts, characters)


def _cut(tokens: Ints, sequence: int) -> Ints:
    """Return (n, S + 1) windows that begin where the one before has its last target; the padding at the end is -100."""
    num_windows = max(1, -(-(len(tokens) - 1) // sequence))
    padded = np.full(num_windows * sequence + 1, IGNORED, np.int64)
    padded[: len(tokens)] = tokens
    return np.stack([padded[k * sequence : (k + 1) * sequence + 1] for k in range(num_windows)])
