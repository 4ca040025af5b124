"""Processes as the kernel sees them."""

from pathlib import Path


def descendants(process: int) -> list[int]:
    """Processes that it has started, directly or not; grandchildren after their parents."""
    found = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return found + [grandchild for child in found for grandchild in descendants(child)]


def is_running(process: int) -> bool:
    """Whether it has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
