"""Texts of other machines and sizes, fit for a log and a terminal."""


def printable(text: str) -> str:
    r"""Return a text on one line with \uXXXX for each character that does not print: no text may control a terminal."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def printable_size(num_bytes: int) -> str:
    """Return a number of bytes for a person, in decimal units: 512 B, 19.5 kB, 1.2 GB."""
    amount, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
