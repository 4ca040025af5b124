"""When a condition is told: once for each hour and subject, by a clock that may jump. Pure."""

import random

import pytest

from atoll.ground.printable import NAMES_MAX
from atoll.protocol.notices.book import HOUR_S, REMIND_S, Book, Told
from atoll.protocol.notices.notice import FEW, Condition, Notice, merged

NOW = 1_800_000_000.0
DISK = Notice(Condition.DISK, "/state", "the disk has 1 B free: free some")
FAILED = Notice(Condition.RUN_FAILED, "digits-1", "run digits-1 is failed", run="digits-1")


def tell(book, *active, at):
    """Look, and tell everything that is due; returns the sentences."""
    book.look(active, at)
    return told_of(book, at)


def told_of(book, at):
    found = []
    for group in book.ready(at):
        book.attempted(group, at)
        book.succeeded(group)
        found.append(merged([due.notice for due in group]).sentence)
    return found


def test_a_condition_is_told_when_it_begins_and_again_after_a_day():
    book = Book()
    assert tell(book, DISK, at=NOW) == [DISK.sentence]
    told = [at for at in range(0, 3 * 86400, 600) if tell(book, DISK, at=NOW + at)]
    assert told == [REMIND_S, 2 * REMIND_S]


def test_a_condition_that_comes_and_goes_is_told_once_an_hour():
    book, told = Book(), []
    for second in range(0, 4 * 3600, 30):
        active = [DISK] if second // 30 % 2 == 0 else []
        if tell(book, *active, at=NOW + second):
            told.append(second)
    assert told == [0, 3600, 7200, 10800]


def test_two_subjects_of_a_condition_are_two_messages_and_many_are_one():
    sites = [Notice(Condition.AWAY, f"site{i:02}", f"site {i} is away") for i in range(NAMES_MAX + 9)]
    assert tell(Book(), *sites[:FEW], at=NOW) == [each.sentence for each in sites[:FEW]]
    (sentence,) = tell(Book(), *sites, at=NOW)
    assert sentence.startswith("site 0 is away; the same of site01, ")
    assert sentence.endswith(f"site{NAMES_MAX:02} and 8 more")


def test_a_run_that_had_ended_before_the_first_look_is_not_told_and_one_that_ends_later_is_once():
    book = Book()
    assert tell(book, FAILED, at=NOW) == []
    later = Notice(Condition.RUN_FAILED, "digits-2", "run digits-2 is failed")
    assert tell(book, FAILED, later, at=NOW + 1) == ["run digits-2 is failed"]
    assert [at for at in range(2, 40) if tell(book, FAILED, later, at=NOW + at * 86400)] == []


def test_a_run_that_is_resumed_and_fails_again_is_told_again_an_hour_after_the_first_message():
    book = Book(is_new=False)
    assert tell(book, FAILED, at=NOW)
    assert not tell(book, at=NOW + 60)
    assert not tell(book, FAILED, at=NOW + 120)
    assert not tell(book, FAILED, at=NOW + HOUR_S - 1)
    assert tell(book, FAILED, at=NOW + HOUR_S)


def test_an_absence_is_told_when_it_has_lasted_and_one_that_ends_before_is_not():
    book, away = Book(), Notice(Condition.AWAY, "north", "site north is away", hold=600.0)
    for second in (*range(0, 600, 60), *range(660, 1200, 60)):
        assert not tell(book, *([away] if second != 540 else []), at=NOW + second)
    assert book.since(away.key, NOW + 1200) == NOW + 660
    assert tell(book, away, at=NOW + 1260) == [away.sentence]
    assert book.lasting == [away.sentence]
    assert not tell(book, at=NOW + 1300)
    assert book.lasting == []


def test_an_event_is_told_once_in_the_same_words_and_a_further_one_after_an_hour():
    book = Book()
    for second, words in ((0, "0.8"), (10, "0.8"), (20, "0.9"), (3700, "0.9")):
        book.look((), NOW + second)
        book.post(Notice(Condition.VERSION, "north", f"north runs {words}"), NOW + second)
        assert told_of(book, NOW + second) == {0: ["north runs 0.8"], 3700: ["north runs 0.9"]}.get(second, [])


def test_a_failed_attempt_stays_due_and_uses_up_no_hour():
    book = Book()
    book.look([DISK], NOW)
    for second in (0, 10, 30):
        (group,) = book.ready(NOW + second)
        book.failed(book.attempted(group, NOW + second))
        book.look([DISK], NOW + second)
    assert told_of(book, NOW + 31) == [DISK.sentence]
    assert told_of(book, NOW + 32) == []


def test_a_failed_attempt_to_tell_an_event_or_what_begins_again_uses_up_no_hour():
    book, jump = Book(), Notice(Condition.CLOCK, "jump", "the clock was set")
    assert tell(book, DISK, at=NOW) == [DISK.sentence]
    tell(book, at=NOW + 60)
    later = NOW + HOUR_S - 30
    book.look([DISK], later)
    book.post(jump, later)
    for second in (30, 40):
        for group in book.ready(later + second):
            book.failed(book.attempted(group, later + second))
    assert told_of(book, later + 41) == [jump.sentence, DISK.sentence]


def test_what_is_over_before_it_could_be_told_is_not_told():
    book = Book()
    book.look([DISK], NOW)
    (group,) = book.ready(NOW)
    book.failed(book.attempted(group, NOW))
    assert tell(book, at=NOW + 60) == []


def test_an_attempt_whose_outcome_a_crash_has_hidden_is_repeated_an_hour_later():
    book = Book()
    book.look([DISK], NOW)
    book.attempted(book.ready(NOW)[0], NOW)
    after = Book(dict(book.told), dict(book.begun), dict(book.due), is_new=False)  # as it was written
    assert [at for at in range(0, 7200, 60) if tell(after, DISK, at=NOW + at)] == [3600]


def test_a_clock_that_was_ahead_delays_a_message_by_an_hour_at_most():
    book = Book()
    assert tell(book, DISK, at=NOW + 30 * 86400)
    assert not tell(book, at=NOW)
    assert not tell(book, DISK, at=NOW + 60)
    assert tell(book, DISK, at=NOW + HOUR_S)


def test_facts_are_compared_with_the_ones_before():
    book = Book()
    assert [book.note_fact("north", each) for each in ("1", "1", "2", "2", "1")] == [None, None, "1", None, "2"]


@pytest.mark.parametrize("seed", range(200))
def test_no_history_has_two_messages_of_one_key_within_an_hour(seed):
    """Conditions come and go, attempts fail, processes die before and after them: an hour lies between two messages."""
    rng = random.Random(seed)
    subjects = [
        Notice(rng.choice([Condition.DISK, Condition.RUN_FAILED, Condition.AWAY]), f"s{i}", f"s{i}", is_once=i == 0)
        for i in range(5)
    ]
    book, at, lasts, reached = Book(), NOW, set(), {}
    for _ in range(400):
        at += rng.choice([1.0, 30.0, 600.0, 2000.0])
        lasts ^= {i for i in range(5) if rng.random() < 0.2}
        book.look([subjects[i] for i in sorted(lasts)], at)
        if rng.random() < 0.2:
            book.post(Notice(Condition.CLOCK, "jump", f"jump at {at}"), at)
        for group in book.ready(at):
            before = book.attempted(group, at)
            fate = rng.random()
            if fate < 0.7:  # it has reached the person; perhaps the process dies before it knows
                for due in group:
                    assert at - reached.get(due.notice.key, 0.0) >= HOUR_S
                    reached[due.notice.key] = at
            if fate < 0.5:
                book.succeeded(group)
            elif fate > 0.8:
                book.failed(before)
    assert reached


def test_old_entries_are_forgotten():
    book = Book(told={"disk gone": Told(NOW - 2 * HOUR_S, "x"), "disk young": Told(NOW - 60, "x")}, is_new=False)
    book.look((), NOW)
    assert set(book.told) == {"disk young"}
