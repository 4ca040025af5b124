"""The check of a PostgreSQL URL. Pure: no connection is made, and the driver need not be installed."""

import re
from typing import Annotated

from pydantic import AfterValidator

SCHEMES = ("postgresql://", "postgres://")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:@\s]*)(:[0-9]{0,5})?")


def check_url(url: str) -> str:
    """Return the URL unchanged; an empty one means no database server.

    Raises:
        ValueError: libpq would misread the URL; the message contains no part of a password.
    """
    if not url:
        return url
    scheme = next((scheme for scheme in SCHEMES if url.startswith(scheme)), None)
    if scheme is None:
        raise ValueError("allowed: postgresql://[USER@][HOST][:PORT]/DATABASE, or empty for SQLite in the directory")
    if url.count("@") > 1 or not url.isprintable() or " " in url:
        raise ValueError("a character of the name or the password must be written as %40 for @, %2F for /, %3A for :")
    authority = re.split(r"[/?#]", url.removeprefix(scheme), maxsplit=1)[0]
    userinfo, _, hosts = authority.rpartition("@")
    if "@" in url and "@" not in authority:
        raise ValueError("an @ after the host must be written as %40, and so must a / in the password: %2F")
    if userinfo.count(":") > 1 or not all(_HOST.fullmatch(host) for host in hosts.split(",")):
        raise ValueError("allowed before the database: [USER[:PASSWORD]@][HOST][:PORT], several hosts with commas")
    return url


DatabaseUrl = Annotated[str, AfterValidator(check_url)]
"""A setting that holds a PostgreSQL URL; empty: no database server."""
