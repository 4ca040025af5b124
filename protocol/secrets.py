"""Passwords in URLs: they are told to nobody, not in an error, not in a log, not in a file of ours."""

import re

_USERINFO = re.compile(r"(?<=://)([^\s/?#@:]*):.*@", re.DOTALL)
_PARAMETER = re.compile(r"([?&])(?:ssl)?password=[^&\s\"']*(&?)", re.IGNORECASE)


def without_password(text: str) -> str:
    """The text with no password in any URL: `postgresql://user:secret@host/db` becomes `postgresql://user@host/db`.

    What stands between the user's name and the last @ goes, also where the URL is no good one.
    """
    while (shorter := _PARAMETER.sub(lambda found: found[1] if found[2] else "", text)) != text:
        text = shorter
    return _USERINFO.sub(r"\1@", text)
