"""The number of files that a process may have open."""

import resource

from atoll.server.process_tuning import allow_open_files


def test_as_many_files_may_be_open_as_the_system_allows():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1 if soft > 0 else 4096, hard))  # not above 0: no limit
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
