"""The images of deploy/Containerfile, built here and run with a read-only root (`make image-test`)."""

import http.cookiejar
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest

from benchmarks.processes import free_address
from tests.deploy import containers
from tests.deploy.containers import ROOT, Image
from tests.waiting import BOUND_S

if lacking := containers.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = pytest.mark.timeout(3600)  # the first test builds all images

UID = 10001
PROGRAMS = ("coordinator", "agent", "dashboard")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """The context of the build: a wheel of this tree, and the versions."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    shutil.copy(ROOT / "constraints.txt", folder)
    return folder


@pytest.fixture(scope="session")
def images(wheels):
    containers.base()
    built = {target: containers.build(target, wheels) for target in PROGRAMS}
    yield built
    for image in built.values():
        image.remove()


@pytest.fixture
def volume(tmp_path):
    """Make a new volume, as the image's user may write it."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        shutil.chown(folder, UID, UID)
        return folder

    for each in (tmp_path, *tmp_path.parents):  # pytest's folders are closed to other users
        if each.stat().st_uid == 0 and str(each).startswith("/tmp/"):
            each.chmod(each.stat().st_mode | 0o711)
    return make


def said(image: Image, *arguments, state, mounts=None, code=0):
    command = image.command(*arguments, state=state, mounts=mounts)
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * BOUND_S, check=False)
    assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("target", PROGRAMS)
def test_an_image_says_its_version_from_a_read_only_root(images, volume, target):
    assert re.search(r"\d+\.\d+", said(images[target], "--version", state=volume("state")))


@pytest.mark.parametrize("target", PROGRAMS)
def test_an_image_has_no_pip_no_root_user_and_nothing_of_the_machine_that_built_it(images, target):
    image = images[target]
    config = image.config
    assert config["User"] == f"{UID}:{UID}"
    assert config["StopSignal"] in ("SIGTERM", "15")
    packages = {path.name for path in (image.root / "opt/atoll").glob("lib/python3*/site-packages/*")}
    assert "pip" not in packages
    assert ("torch" in packages) == (target != "dashboard")
    assert (image.root / "var/lib/atoll").stat().st_uid == UID
    settings, paths = containers.pip_settings()
    hosts = {host for host in re.findall(r"\w+://(?:[^/@\s]*@)?([^/:\s]+)", settings) if host}
    outside = [path for path in paths if not path.startswith("/etc/")]
    for path in outside:
        assert not (image.root / path.lstrip("/")).exists(), "a mount of the build left its place in the image"
    private = hosts | set(outside) | {str(ROOT)}
    described = str(image.described)
    assert not [each for each in private if each in described], "history and configuration go with the image"
    assert not (image.root / "run/secrets/pip").exists()
    for path in [*(image.root / "opt/atoll").rglob("*"), *(image.root / "etc").rglob("*")]:
        is_ours = path.is_file() and not path.is_symlink() and path.stat().st_size < 2**20
        if is_ours and path.suffix not in (".so", ".h"):
            data = path.read_bytes()
            assert not [each for each in private if each.encode() in data], path


def test_a_first_project_is_simulated(images, volume):
    image, state = images["coordinator"], volume("state")
    said(image, "new", "/var/lib/atoll/project", state=state)
    said(
        *(image, "simulate", "project/task.py:task", "--set", "rounds=2", "--out", "/var/lib/atoll/simulated"),
        state=state,
    )
    rounds = (state / "simulated/rounds.jsonl").read_text().splitlines()
    assert len(rounds) == 2
    assert (state / "simulated/rounds.jsonl").stat().st_uid == UID


def test_a_coordinator_and_two_agents_in_three_roots_commit_every_round(images, volume, tmp_path):
    coordinator, agent = images["coordinator"], images["agent"]
    states = {name: volume(name) for name in ("hub", "north", "south", "project")}
    said(coordinator, "new", "/var/lib/atoll/digits", state=states["project"])
    tasks = {"/mnt": states["project"] / "digits"}  # a folder that each Debian root has
    running = []

    def start(image, name, *arguments):
        with (tmp_path / f"{name}.log").open("ab") as log:
            command = image.command(*arguments, state=states[name], mounts=tasks)
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        return running[-1]

    def logs():
        return "\n".join(path.read_text()[-1500:] for path in tmp_path.glob("*.log"))

    address = free_address()
    chosen = {"rounds": 3, "round.cohort_size": 2, "round.quorum": 2, "coordinator.listen": address}
    overrides = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    overrides += ["--set", f"coordinator.enrol={free_address()}"]
    try:
        hub = start(coordinator, "hub", "coordinator", "/mnt/task.py:task", "--state", "/var/lib/atoll/s", *overrides)
        deadline = time.monotonic() + BOUND_S
        while "serves" not in logs() and "listen" not in logs():
            assert hub.poll() is None, logs()
            assert time.monotonic() < deadline, logs()
            time.sleep(0.2)
        for site in ("north", "south"):
            code = said(coordinator, "client", "invite", site, "--state", "/var/lib/atoll/s", state=states["hub"])
            command = (
                "agent",
                "/mnt/task.py:task",
                "--site",
                site,
                "--state",
                "/var/lib/atoll/s",
                "--join",
                code.split()[-1],
            )
            start(agent, site, *command, "--set", "exit_when_done=true", "--set", "threads=1")
        for process in running:
            assert process.wait(2 * BOUND_S) == 0, logs()
        shown = said(coordinator, "round", "list", "--state", "/var/lib/atoll/s", "--json", state=states["hub"])
        assert shown.count('"committed"') == 3, shown
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_sigterm_ends_the_default_command_of_a_coordinator_in_order(images, volume, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        command = images["coordinator"].command(
            *images["coordinator"].config["Cmd"],
            "--set",
            f"coordinator.listen={free_address()}",
            *("--set", f"coordinator.enrol={free_address()}"),
            state=volume("state"),
        )
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + BOUND_S
        while b"no run yet" not in (tmp_path / "log").read_bytes():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


def test_a_dashboard_without_torch_shows_a_run(images, volume, tmp_path):
    state = volume("state")
    said(images["coordinator"], "new", "/var/lib/atoll/p", state=state)
    said(
        images["coordinator"],
        "simulate",
        "p/task.py:task",
        "--set",
        "rounds=1",
        "--out",
        "/var/lib/atoll/sim",
        state=state,
    )
    with (tmp_path / "log").open("wb") as log:
        command = images["dashboard"].command("dashboard", "/var/lib/atoll", "--listen", "127.0.0.1:0", state=state)
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + BOUND_S
        while not (found := re.search(r"(?m)^http://\S+$", (tmp_path / "log").read_text())):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        opener.open(found.group(), timeout=BOUND_S).close()  # the link; its cookie opens the pages
        runs = opener.open(urllib.parse.urljoin(found.group(), "/runs.json"), timeout=BOUND_S).read().decode()
        assert '"run": "sim"' in runs, runs
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 0
    finally:
        process.kill()
        process.wait()
