"""What others say, fit for a log and a terminal."""


def printable(text: str) -> str:
    r"""The text on one line, every character that does not print as \uXXXX: nothing in it may steer a terminal."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
