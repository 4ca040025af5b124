"""Strings of other machines, sizes and names, made safe for a log and a terminal."""

from collections.abc import Iterable
from difflib import get_close_matches

NAMES_MAX = 20
"""Largest number of names in a row, of known ones in a refusal."""


def printable(text: str) -> str:
    r"""Return a text on one line with \uXXXX for each character that does not print: no text may control a terminal."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def shortened(text: str, num_letters: int = 80) -> str:
    """Return the first `num_letters` letters of a text of any length, as one line."""
    line = " ".join(text.split())
    return line if len(line) <= num_letters else line[: num_letters - 1].rstrip() + "…"


def lines_of(text: str) -> list[str]:
    r"""Return the lines of a text that `printable` has put on one line, without those that are empty."""
    return [line.rstrip() for line in text.replace("\\u000a", "\n").splitlines() if line.strip()]


def conclusion(text: str) -> str:
    """Return the end of a message on one line; of a traceback it is the exception, which follows the last frame.

    Frames and their code are indented; the exception's text may have several lines.
    """
    lines = lines_of(text)
    indented = [number for number, line in enumerate(lines) if line.startswith(" ")]
    is_traceback = bool(indented) and indented[-1] + 1 < len(lines)
    return " ".join(line.strip() for line in (lines[indented[-1] + 1 :] if is_traceback else lines[-1:]))


def count_of(number: float, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural unless it is one: 1 fault, 2 faults, 0.8 examples.

    Args:
        number: the number of things; a fraction is printed with six digits.
        noun: the words for one, with the verb if there is one: `round is`.
        plural: the words for any other number; empty: `noun` with an s.
    """
    digits = format(number, "g") if isinstance(number, float) else number
    return f"{digits} {noun if number == 1 else plural or noun + 's'}"


def printable_size(num_bytes: int) -> str:
    """Return a number of bytes for a person, in decimal units: 512 B, 19.5 kB, 1.2 GB."""
    amount, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def span(seconds: float) -> str:
    """Return the length of a difference between two instants [s], without its sign, in at most two units."""
    whole = round(abs(seconds))
    for unit, size, smaller, parts in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // parts} {smaller}"
    return f"{whole} s"


def some_of(names: Iterable[str], most: int = NAMES_MAX, between: str = ", ") -> str:
    """Return the first names in a row, and the number of the others: `a, b and 3 more`."""
    listed = [*names]
    more = f"{between.strip(', ')} and {len(listed) - most} more" if len(listed) > most else ""
    return between.join(listed[:most]) + more


def instead_of(name: str, known: Iterable[str]) -> str:
    """Return the end of the refusal of an unknown name: `: did you mean north? (known: north, south)`."""
    names = list(dict.fromkeys(known))
    near = get_close_matches(name, names)
    return (f": did you mean {' or '.join(near)}?" if near else "") + f" (known: {some_of(names) or 'none'})"
