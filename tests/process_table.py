"""Processes as the kernel sees them."""

from pathlib import Path

from tests.warm.start import is_zygote


def descendants(process: int) -> list[int]:
    """Processes that it has started, directly or not; grandchildren after their parents. Zygotes are none."""
    threads = Path(f"/proc/{process}/task").glob("*/children")
    found = [int(child) for thread in threads for child in thread.read_text().split() if not is_zygote(int(child))]
    return found + [grandchild for child in found for grandchild in descendants(child)]


def is_running(process: int) -> bool:
    """Whether it has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
