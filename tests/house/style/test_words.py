"""The banned turns, in made-up texts."""

import pytest

from tests.house.style.words import turns


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("A key of whoever asks.", "whoever"),
        ("A key of whosoever asks.", "whosoever"),
        ("The limit: so many bytes.", "so many"),
        ("The limit: so\n    much.", "so much"),
        ("A pause, so long as it lasts.", "so long"),
        ("The rank that is to be asked.", "is to be"),
        ("Ranks that are to be asked.", "are to be"),
        ("An update that comes to nothing.", "comes to nothing"),
        ("An update that came to nothing.", "came to nothing"),
        ("The turn of what is said of it.", "what is said of"),
        ("A line in which it is said.", "it is said"),
        ("A file that nobody reads.", "nobody"),
        ("Everybody reads it.", "Everybody"),
        ("A mistake that somebody makes.", "somebody"),
        ("A file for anybody.", "anybody"),
        ("The turn of those who wait.", "those who"),
        ("An algorithm of one's own.", "of one's own"),
        ("A rule of a user's own.", "of a user's own"),
        ("A fault that a person mends.", "mends"),
        ("A process that ends in order.", "ends in order"),
        ("A run goes on after a restart.", "goes on"),
        ("A run that is begun anew.", "begun anew"),
        ("A digest is another one than before.", "is another one than"),
    ],
)
def test_a_banned_turn_is_reported(text: str, turn: str) -> None:
    (found,) = turns(text)
    assert found.text.startswith(f'"{turn}": ')


@pytest.mark.parametrize(
    "text",
    [
        "As many bytes as the window has; the body is so large.",
        "A caller who waits.",
        "The option `nobody` and ``so many`` of it.",
        "A value that is, to be exact, one.",
        "A busybody.",
        "The site's own policy, amended.",
        "A client that ends in orderly time.",
        "Also many.",
    ],
)
def test_other_turns_and_code_are_let_through(text: str) -> None:
    assert list(turns(text)) == []


def test_turns_come_in_their_order_with_their_lines() -> None:
    found = list(turns("One.\n\nNobody reads so many.\n`nobody`\n\nWhoever\n"))
    assert [(remark.line, remark.text.split(":")[0]) for remark in found] == [
        (2, '"Nobody"'),
        (2, '"so many"'),
        (5, '"Whoever"'),
    ]


def test_a_lone_backtick_hides_no_later_paragraph() -> None:
    assert len(list(turns("The key ` alone.\n\nA file that nobody reads, `x`."))) == 1
