"""Programs that some tests need, and Debian's packages that have them: the tests are skipped without, and say which."""

import shutil

import pytest

PACKAGES = {
    "buildah": "buildah",
    "cc": "gcc",
    "chromium": "chromium",
    "initdb": "postgresql",
    "kubectl": "kubernetes-client",
    "mmdebstrap": "mmdebstrap",
    "munged": "munge",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "sbatch": "slurm-client",
    "setpriv": "util-linux",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "systemd-analyze": "systemd",
}
"""Package of each program; CONTRIBUTING.md lists them."""


def missing(*programs: str) -> str:
    """Return the packages that this machine lacks, as the reason to skip a test; empty: none."""
    lacking = sorted({PACKAGES[program] for program in programs if shutil.which(program) is None})
    return f"missing here: apt-get install {' '.join(lacking)}" if lacking else ""


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped without these programs."""
    why = missing(*programs)
    return pytest.mark.skipif(bool(why), reason=why)
