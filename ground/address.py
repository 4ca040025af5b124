"""Address `host:port` of a listener: its parser, its brackets, and whether it is on loopback."""

import ipaddress
import re

HOST_CHARACTERS_MAX = 253

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)


def parsed(address: str) -> tuple[str, int]:
    """Parse `host:port`; port 0: the system chooses.

    Returns:
        Host, without brackets, and port.

    Raises:
        ValueError: the address has another form; the message says what is allowed.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError("allowed: host:port, with a port in 0..65535")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (_is_ipv6(bare) if bare != host else _is_name_or_ipv4(host)):
        raise ValueError("allowed: host:port, where host is a name, an IPv4 address or an IPv6 address in brackets")
    return bare, int(port)


def bracketed(host: str) -> str:
    """Return a host as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_address(host: str) -> bool:
    """Return whether a host, an IPv6 one in brackets, is an address and no name."""
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        version = ipaddress.ip_address(host[1:-1] if is_bracketed else host).version
    except ValueError:
        return False
    return is_bracketed == (version == 6)


def is_loopback(host: str) -> bool:
    """Return whether a host, without brackets, is this machine on its loopback interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    if isinstance(address, ipaddress.IPv6Address):
        return address == ipaddress.IPv6Address("::1")
    return address.is_loopback


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


def _is_name_or_ipv4(host: str) -> bool:
    if not host.rpartition(".")[2].isdigit():
        return len(host) <= HOST_CHARACTERS_MAX and _HOST_NAME.fullmatch(host) is not None
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
