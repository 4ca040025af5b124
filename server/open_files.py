"""How many files and connections a process may have open."""

import resource


def allow_open_files() -> None:
    """As many as the system lets us have: the connections of a thousand clients are more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
