"""The removal of passwords from URLs, before they get into an error, a log or a file."""

import re

_USERINFO = re.compile(r"(?<=://)([^\s/?#@:]*):.*@", re.DOTALL)
_PARAMETER = re.compile(r"([?&])(?:ssl)?password=[^&\s\"']*(&?)", re.IGNORECASE)


def without_password(text: str) -> str:
    """Remove the passwords from the URLs in a string: `https://user:secret@host/` becomes `https://user@host/`.

    Removes everything between the user's name and the last @, in malformed URLs, too.
    """
    while (shorter := _PARAMETER.sub(lambda found: found[1] if found[2] else "", text)) != text:
        text = shorter
    return _USERINFO.sub(r"\1@", text)
