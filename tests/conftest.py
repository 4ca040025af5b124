import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# On a build machine a property is tried on the same examples each time; elsewhere every run looks further.
settings.register_profile("build", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("build")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let what a test has printed be text: the processes that run tests beside each other send it to the first one."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
