"""Roles of plays, in the two layouts; and the real text."""

from pathlib import Path

import pytest
import torch

from examples.datasets.folder import BadData, data_folder
from examples.datasets.shakespeare import lines_of, read_shakespeare
from tests.public_data import needs_data

SPEECHES = """ROMEO:
Is the day so young?

BENVOLIO:
But new struck nine.

ROMEO:
Ay me! sad hours seem long.
Was that my father
that went hence so fast?
"""

PLAYS = """The Complete Works of William Shakespeare, by William Shakespeare

THE SONNETS

by William Shakespeare

  From fairest creatures we desire increase.

1601

HAMLET

by William Shakespeare

  Ham. To be, or not to be,
    that is the question:
  OPHELIA. Good my lord,
    How does your honour?
                              [Exit
SCENE II.
  Ham. I humbly thank you.

THE COMEDY OF ERRORS

by William Shakespeare

ACT I. SCENE 1
AEGEON. Proceed, Solinus,
to procure my fall.
DUKE. Merchant of Syracuse, plead no more.
<<THIS ELECTRONIC VERSION>>
this is nobody's
"""


def test_speeches_belong_to_the_name_above_them() -> None:
    assert lines_of(SPEECHES) == {
        "ROMEO": [
            "Is the day so young?",
            "Ay me! sad hours seem long.",
            "Was that my father",
            "that went hence so fast?",
        ],
        "BENVOLIO": ["But new struck nine."],
    }


def test_a_role_belongs_to_its_play() -> None:
    roles = lines_of(PLAYS)
    assert list(roles) == [
        "HAMLET_HAM",
        "HAMLET_OPHELIA",
        "THE_COMEDY_OF_ERRORS_AEGEON",
        "THE_COMEDY_OF_ERRORS_DUKE",
    ]
    assert roles["HAMLET_HAM"] == ["To be, or not to be,", "that is the question:", "I humbly thank you."]
    assert roles["HAMLET_OPHELIA"][:2] == ["Good my lord,", "How does your honour?"]
    assert roles["THE_COMEDY_OF_ERRORS_AEGEON"] == ["Proceed, Solinus,", "to procure my fall."]
    assert roles["THE_COMEDY_OF_ERRORS_DUKE"] == ["Merchant of Syracuse, plead no more."]


def written(path: Path, text: str = SPEECHES) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_windows_give_every_character_but_the_first_as_a_target_once(tmp_path: Path) -> None:
    roles = read_shakespeare(written(tmp_path / "t"), sequence=8, test_fraction=0.25)
    assert roles.sites == ("ROMEO",)  # Benvolio has one line
    train, test = roles("ROMEO", "train"), roles("ROMEO", "test")
    expected = {"train": "Is the day so young?\nAy me! sad hours seem long.\nWas that my father\n", "test": ""}
    expected["test"] = "that went hence so fast?\n"
    for split, part in (("train", train), ("test", test)):
        targets = torch.cat([target for _, target in part])
        inputs = torch.cat([window for window, _ in part])
        assert "".join(roles.characters[c] for c in targets[targets >= 0]) == expected[split][1:]
        text = "".join(roles.characters[c] for c in inputs)
        assert text.startswith(expected[split][: len(text) - 8])
        assert [tuple(window.shape) for window, _ in part] == [(8,)] * len(part)
    assert len(train) == -(-(len(expected["train"]) - 1) // 8)


def test_a_model_never_sees_the_filling_as_a_target(tmp_path: Path) -> None:
    roles = read_shakespeare(written(tmp_path / "t"), sequence=1000, test_fraction=0.0)
    inputs, targets = roles("ROMEO", "train")[0]
    length = len("\n".join(lines_of(SPEECHES)["ROMEO"])) + 1
    assert (targets >= 0).sum() == length - 1
    assert inputs.min() >= 0
    assert inputs.max() < len(roles.characters)
    assert roles("ROMEO", "test") is None


def test_line_ends_of_other_systems_make_no_difference(tmp_path: Path) -> None:
    (tmp_path / "dos").write_bytes(b"\xef\xbb\xbf" + SPEECHES.replace("\n", "\r\n").encode())
    here, there = (read_shakespeare(path, sequence=8) for path in (written(tmp_path / "t"), tmp_path / "dos"))
    assert torch.equal(here.dataset.tensors[0], there.dataset.tensors[0])


def test_what_is_no_play_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="has neither plays"):
        read_shakespeare(written(tmp_path / "t", "Once upon a time\nthere was.\n"))
    with pytest.raises(BadData, match="of a role with 9 lines or more"):
        read_shakespeare(written(tmp_path / "t"), min_lines=9)
    (tmp_path / "t").write_bytes(b"\xff\xfe")
    with pytest.raises(BadData, match="is UTF-16; save it as UTF-8"):
        read_shakespeare(tmp_path / "t")
    with pytest.raises(ValueError, match="sequence must be at least 1"):
        read_shakespeare(written(tmp_path / "t"), sequence=0)


@needs_data
def test_the_real_text_has_65_characters_and_its_heroes() -> None:
    roles = read_shakespeare(data_folder("tinyshakespeare") / "input.txt")
    assert len(roles.characters) == 65
    assert {"ROMEO", "JULIET", "KING RICHARD II", "First Citizen"} <= set(roles.sites)
    inputs, targets = roles.dataset.tensors
    assert torch.equal(inputs[:, 1:][targets[:, 1:] >= 0], targets[:, :-1][targets[:, 1:] >= 0])
    total = sum(len(part) for split in roles.parts.values() for part in split.values())
    assert total == len(inputs)
