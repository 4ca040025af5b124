"""A simulated run of messages that dies at a planned place, and goes on from its journal.

The places are those at which a coordinator can die: before an entry is on disk, after it, and before each of its
effects; and the deaths of the program's own process, after each answer that it got. The journal is that of a
coordinator, encoded and decoded; a process of the program is a fork of this one, with all modules that it needs.
"""

import atexit
import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

from atoll.ground.process.forking import leaving_garbage
from atoll.protocol.vocabulary import TERMINAL, Digest
from atoll.server.exchanges.events import Event, RecordExchange
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.journal.codec import decode, encode_event
from atoll.server.rounds.events import CoordinatorStarted, RunStarted
from atoll.simulations.messages.federation import MessageFederation
from atoll.simulations.messages.program import Program
from atoll.simulations.messages.service import MessageService
from atoll.task.programs import main as program

EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
DOWN_S = 20.0
"""Virtual time in which no coordinator runs."""

RECONNECTS_S = 5.0
"""Virtual time between the reconnections of two sites, all within their lease."""


@dataclass(frozen=True)
class Death:
    """A place: "before" or "after" an entry, before an "effect", each with its number, or after an "answer"."""

    where: str
    number: int


class CoordinatorDied(Exception):
    """The coordinator is at the planned place."""


@dataclass
class Course:
    """What has happened so far, over all processes."""

    death: Death | None = None
    entries: list[tuple[float, str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    num_deaths: int = 0

    def is_at(self, where: str) -> bool:
        """Count a visit; return whether this is the place of the death."""
        self.counts[where] += 1
        if self.death != Death(where, self.counts[where]):
            return False
        self.num_deaths += 1
        return True


class JournaledService(MessageService):
    """A coordinator with a journal."""

    course: Course
    is_dead = False
    allowance = 0.0

    def post(self, event):
        if self.is_dead:
            return ()
        now = self._timeline.now
        effects = self.machine.receive(event, now)
        if self.course.is_at("before"):
            raise CoordinatorDied
        self.course.entries.append((now, *encode_event(event)))
        self.course.kinds[type(event).__name__] += 1
        for effect in effects:
            if isinstance(effect, RecordExchange):  # its row is in the group commit of the entry
                self._act(effect)
        if self.course.is_at("after"):
            raise CoordinatorDied
        for effect in effects:
            if self.course.is_at("effect"):
                raise CoordinatorDied
            if not isinstance(effect, RecordExchange):
                self._act(effect)
        self._timer.arm()
        return effects

    def left(self, site):
        if self.is_dead:
            del self._connected[site.client_id]  # a lease of the dead coordinator ends no client
        else:
            super().left(site)

    def recover(self):
        """Replay the journal, and go on."""
        self.machine = ExchangeMachine(self.config.exchange_rules)
        for at, kind, body in self.course.entries:
            self.machine.receive(decode(EVENTS[kind], body, "the journal"), at)
        self.is_dead = False
        down_since = self._timeline.now - DOWN_S
        self.post(CoordinatorStarted(down_since, self.allowance) if self.course.entries else RunStarted(Digest("")))


class ForkedProgram(Program):
    """A process of the program, forked."""

    def __init__(self, order, folder, log, lines):
        folder.mkdir(parents=True, exist_ok=True)
        self._connection, theirs = socket.socketpair()
        with warnings.catch_warnings(), leaving_garbage():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            self._run(theirs, folder, log)
        theirs.close()
        self.answer(0, **order)
        threading.Thread(target=self._read, args=(lines,), name="program", daemon=True).start()

    def _run(self, connection, folder, log):
        try:
            vars(atexit)["_clear"]()  # an end of the program calls its functions, not those of the tests' process
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._connection.close()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)  # those of the tests are captured
            os.chdir(folder)
            program.sys.argv = ["program", str(connection.detach())]
            program.main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(71)

    def stop(self):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._connection.close()

    def kill(self):
        os.kill(self._pid, signal.SIGKILL)


class DyingFederation(MessageFederation):
    """A federation whose coordinator, or program, dies once."""

    service_type, program_type = JournaledService, ForkedProgram
    starts_s = 0.0

    def plan(self, death, starts_s=0.0):
        """Plan the death; None: it is undisturbed. After it all sites start anew, which takes `starts_s` virtual
        seconds: it is more than a message may take.
        """
        self.course = self.service.course = Course(death)
        self.starts_s, self.service.allowance = starts_s, 5 * starts_s
        return self

    def run(self):
        try:
            return super().run()
        except CoordinatorDied:
            self._restart()
        return self._go_on()

    def _go_on(self):
        while not self._is_over:
            self._step()
        return self._result()

    def _step(self):
        try:
            super()._step()
        except CoordinatorDied:
            self._restart()

    def _restart(self):
        """Start a coordinator after one that has died, with all connections cut and the program's process gone."""
        self.service.is_dead, self._is_over = True, False
        self._stop_program()
        self._program = None
        for site in self.sites.values():
            site.sleep()
        self.timeline.now += DOWN_S
        try:
            self.service.recover()
        except CoordinatorDied as error:
            raise AssertionError("one death is planned") from error
        self._is_over = self.service.machine.ledger.state in TERMINAL
        for place, site in enumerate(self.sites.values()):
            self.timeline.after(self.starts_s + place * RECONNECTS_S, site.wake)

    def _answer(self, call, **fields):
        super()._answer(call, **fields)
        if self.course.is_at("answer") and self._program is not None:
            self._program.kill()

    def digests(self):
        """Return what each message was and its reply, by exchange."""
        exchanges = (exchange for _, exchange in sorted(self._closed.items()))
        return [[(one.number, one.message, str(one.fate), one.reply) for one in e.sent] for e in exchanges]
