"""Text files that a person wrote with any editor: UTF-8, with or without a byte order mark, with any line ends."""

import codecs

_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""The byte order marks, the longer ones first: UTF-32 LE's begins with UTF-16 LE's."""


class NotText(ValueError):
    """A file that is no text in UTF-8; the message has its name and the way out."""


def text_of(content: bytes, name: object) -> str:
    """Return the text of a file without its byte order mark; line ends stay, as every parser accepts them.

    Args:
        content: the bytes of the file.
        name: the file, for the message.

    Raises:
        NotText: it is UTF-16 or UTF-32, as Excel and PowerShell write it, or no text in UTF-8.
    """
    if encoding := wide_encoding(content):
        raise NotText(f"{name}: is {encoding}; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise NotText(f"{name}: line {line} is not UTF-8; save the file as UTF-8") from error


def wide_encoding(content: bytes) -> str:
    """Return "UTF-16" or "UTF-32" if a file begins in that encoding, with or without its byte order mark; else ""."""
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return encoding
    head = content[:4]
    if len(head) >= 2 and head.count(0) == len(head) // 2 and (head[0] == 0) != (head[1] == 0):
        return "UTF-16"  # Latin letters, each beside a zero
    return ""
