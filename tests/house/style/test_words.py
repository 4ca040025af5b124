"""The style's rules, on made-up texts."""

import pytest

from tests.house.style.words import OPENINGS, brevity, opening, turns


@pytest.mark.parametrize(
    "text",
    [
        "What the round still needs.",
        "Who is there.",
        "Of a run: its rounds.",
        "To a rank.",
        "Those that are late.",
        "Whether it ended.",
        "How many, at most.",
        "It's over.",
        "Nothing: it is away.",
        "(As `Layer`.)",
        '"When" it ends.',
        "  Where the file lies.",
        "if it ends.",
        "None: no limit.",
        "Is it over?",
        "Whoever asks.",
        "By client, the newest.",
    ],
)
def test_an_opening_without_noun_or_verb_is_reported(text: str) -> None:
    found = opening(text)
    assert found is not None
    assert found.line == 0
    assert "begin with a noun phrase" in found.text


@pytest.mark.parametrize(
    "text",
    [
        "The admission of updates to one round.",
        "Return the manifest of a version.",
        "Folds a block into the sum.",
        "Each rank's share.",
        "All rounds of a run.",
        "No caller gets more than this.",
        "One client's training.",
        "On-disk layout of a version.",
        "At-most-once delivery of an effect.",
        "I/O of the journal.",
        "`of` and `by`: two options.",
        "Whatsit of a round.",
        "IT systems.",
        "as_json of a value.",
        "(B, T) tokens.",
        "Bytes of an update.",
        "[s] of a step.",
        "",
    ],
)
def test_a_noun_phrase_or_a_verb_is_let_through(text: str) -> None:
    assert opening(text) is None


def test_the_words_that_the_style_names_are_all_there() -> None:
    named = (
        "what who whoever how of to those that where whether so when if as it they everyone everybody everything nobody"
        " nothing somebody anybody with for from in on at by"
    )
    assert set(named.split()) <= set(OPENINGS)
    assert {"a", "an", "the", "each", "all", "every", "no", "one", "both", "let", "see"}.isdisjoint(OPENINGS)


@pytest.mark.parametrize("text", ["The run.", "Zero.", " Measure. ", "\nThe rank.\n", "Bytes."])
def test_a_line_of_two_words_is_reported(text: str) -> None:
    found = brevity(text)
    assert found is not None
    assert "fewer than 3 words" in found.text


@pytest.mark.parametrize(
    "text", ["A round's deadline.", "The run.\n\nIts members and their updates.", "Size [bytes] of it."]
)
def test_a_longer_text_is_let_through(text: str) -> None:
    assert brevity(text) is None


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [("Bytes.", True), ("Length [bytes].", True), ("In s.", True), ("The length.", False), ("Its bytesize.", False)],
)
def test_a_property_may_restate_its_name_with_a_unit(text: str, is_fine: bool) -> None:
    assert (brevity(text, may_be_unit=True) is None) == is_fine


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
