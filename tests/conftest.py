import os

from hypothesis import settings

# On a build machine a property is tried on the same examples each time; elsewhere every run looks further.
settings.register_profile("build", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("build")
