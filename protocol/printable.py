"""What others say, fit for a log and a terminal."""


def printable(text: str) -> str:
    r"""The text on one line, every character that does not print as \uXXXX: nothing in it may steer a terminal."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def in_mb(num_bytes: int) -> str:
    """For a person."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 50_000 else f"{num_bytes} bytes"
