"""A machine's clock that a test sets, for one real process: a preloaded library shifts the system's clock by a file.

All of the process sees the shifted clock, TLS included. The monotonic clock stays as it is, as in a machine that
sleeps; a night passes on the count since the boot, too.
"""

import os
import subprocess
from pathlib import Path

from tests.debian import needs

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long shift_ns(int is_count) {
    static int file = -2;
    if (file == -2) file = open(getenv("TEST_CLOCK") ? getenv("TEST_CLOCK") : "", O_RDONLY | O_CLOEXEC);
    char text[64] = {0}, *rest;
    if (file < 0 || pread(file, text, 63, 0) <= 0) return 0;
    double clock = strtod(text, &rest), nights = strtod(rest, NULL);
    return llround((is_count ? nights : clock + nights) * 1e9);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(id, at);
    if (rc == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_BOOTTIME)) {
        long long ns = at->tv_sec * 1000000000LL + at->tv_nsec + shift_ns(id == CLOCK_BOOTTIME);
        at->tv_sec = ns / 1000000000LL;
        at->tv_nsec = ns % 1000000000LL;
    }
    return rc;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    out->tv_sec = at.tv_sec;
    out->tv_usec = at.tv_nsec / 1000;
    return 0;
}
"""

needs_compiler = needs("cc")


class SetClock:
    """The clock of the processes that are started with `environment`; `set` shifts it at once."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        folder.mkdir(exist_ok=True)
        self._seconds = self._nights = 0.0
        self._file, library = folder / "clock.txt", folder / "clock.so"
        (folder / "clock.c").write_text(SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, folder / "clock.c", "-ldl", "-lm"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "TEST_CLOCK": str(self._file)}
        self.set(seconds)

    def set(self, seconds: float) -> None:
        """Let the clock show this many seconds more than the true time."""
        self._seconds = seconds
        self._write()

    def sleep(self, seconds: float) -> None:
        """Let this much time pass at once, as while the machine sleeps."""
        self._nights += seconds
        self._write()

    def _write(self) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:  # in place: the library has it open
            os.pwrite(file.fileno(), f"{self._seconds:.3f} {self._nights:.3f}".ljust(60).encode(), 0)
