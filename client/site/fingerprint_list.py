r"""The list of a federation's fingerprints, a text file that sites exchange. Pure.

    # a comment
    east   0123 4567 89ab cdef 0123 4567 89ab cdef
    north  ...

The fingerprint of a list is the same for equal sites in any order, whatever blanks and comments the file has: so two
operators compare a whole list by reading out one line.

    first 32 hexadecimal digits of SHA-256("NAME DIGITS\\n" of each site, sorted by name)
"""

import hashlib
from collections.abc import Mapping

from atoll.client.site.peers import NUM_MAX, fingerprint_of
from atoll.ground.printable import count_of
from atoll.ground.text_files import NotText, text_of
from atoll.protocol.identity.names import NAME_ALLOWED, is_name
from atoll.protocol.secure.site_key import FINGERPRINT_DIGITS, shown
from atoll.protocol.settings import ConfigError, short

BYTES_MAX = 2**20


def list_text(fingerprints: Mapping[str, str]) -> str:
    """Return the content of a list."""
    width = max(map(len, fingerprints), default=0)
    lines = [f"{name:{width}}  {shown(digits)}" for name, digits in sorted(fingerprints.items())]
    return "\n".join(["# fingerprints of the site keys of a federation (atoll site fingerprints)", *lines, ""])


def list_fingerprint(fingerprints: Mapping[str, str]) -> str:
    """Return the fingerprint of a list: 32 hexadecimal digits."""
    content = "".join(f"{name} {digits}\n" for name, digits in sorted(fingerprints.items()))
    return hashlib.sha256(content.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def parse_list(content: bytes, name: object) -> dict[str, str]:
    """Read a list.

    Args:
        content: of the file.
        name: of the file, for the messages.

    Raises:
        ConfigError: all lines that are none, or that repeat a name or a fingerprint.
    """
    if len(content) > BYTES_MAX:
        raise ConfigError([f"{name}: {count_of(len(content), 'byte')}; allowed: at most {BYTES_MAX}"])
    try:
        lines = text_of(content, name).splitlines()
    except NotText as error:
        raise ConfigError([str(error)]) from None
    found: dict[str, str] = {}
    owners: dict[str, str] = {}
    faults = []
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        try:
            site, digits = _site(text)
            if site in found:
                raise ValueError(f"{site} has a line before; allowed: one line for each site")
            if (other := owners.setdefault(digits, site)) != site:
                raise ValueError(f"{site} has the fingerprint of {other}; allowed: one site for each")
            found[site] = digits
        except ValueError as fault:
            faults.append(f"{name}: line {number}: {fault}")
    if not faults and not 1 <= len(found) <= NUM_MAX:
        faults = [f"{name}: {count_of(len(found), 'site')}; allowed: 1 to {NUM_MAX}, one line for each"]
    if faults:
        raise ConfigError(faults)
    return found


def _site(text: str) -> tuple[str, str]:
    """Return the name and the digits in a line."""
    site, *groups = text.split()
    if not is_name(site):
        raise ValueError(f"name {short(site)}; allowed: {NAME_ALLOWED}")
    return site, fingerprint_of(" ".join(groups))
