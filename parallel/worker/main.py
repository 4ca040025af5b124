"""The worker process: `python -m atoll.parallel.worker.main`. Requests and answers are JSON objects, one a line.

    main thread     one request after another, in the order of their arrival
    reader thread   stdin: queues requests; obeys `stop` and `extend` at once, also while the main thread trains;
                    ends the process when stdin ends, which is when its supervisor is gone
    the kernel      SIGALRM ends the process `lease_s` after its deadline, also when a C extension holds the GIL so that
                    neither thread can run, and no supervisor is left to kill it

Requests, and the fields of their answers (`?`: optional):

    load      task, site?, local?, algorithm?, threads?, device?  -> (none)
    describe                                             -> num_examples (null if unknown), layout
    initial   seed, out                                  -> pieces
    train     model, own?, out, own_out, seed, model_seed?, round_id?, local?, algorithm?, codec?, owed?, residual?
                                                         -> num_examples, work, steps, statistics, stopped, pieces,
                                                            has_own, normalizer?, effective_steps? (FedNova's)
    evaluate  model, own?, model_seed?, local?, split: train | test | server
                                                         -> statistics (null, with a reason, if there are none)
    message   kind, group, message, own?, out, own_out, seed, round_id, local?
                                                         -> pieces, has_own
    statistics  local?, model_seed?, only_whether?       -> statistics (of the site's data), or why_not
    values    statistics                                 -> values (null: undefined), by the task's metrics
    quit                                                 -> (none), then the process ends

`model`, `own`, `out` and `own_out` are safetensors files: the version, the site's own tensors before the training, the
update, the site's own tensors after it (written if `has_own`). `message` is a file of `task/content`; its reply is one.

Every request may have `budget_s`, from now to its deadline, and `lease_s` beyond that. Every answer has `seconds`, and,
if the task failed, `error` and `detail` instead of its other fields. `layout` lists [name, dtype, shape], `pieces`
lists [tensor, dtype, offsets, lengths, sha256] of the file that was written, both in canonical order; an encoded piece
also has [codec, encoded_bytes]. `codec` encodes the update, `owed` lists the residual files of biased codecs, and
`residual` is the file for the new residual.

Without an answer of their own, and only for the running request (with a `round_id`: only if it is the same):

    stop      round_id?                 end the training early, with the steps done so far
    extend    budget_s, round_id?       move the deadline to `budget_s` from now

The file descriptors 0 and 1 belong to the user's code: its reads find nothing, and its prints go to stderr, the log. An
`extend` that arrives while a C extension holds the GIL takes effect when it lets go; until then the old lease counts.
"""

import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from atoll.parallel.loading import keep_modules
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.json_text import to_json
from atoll.parallel.worker.operations import Operations


@dataclass(frozen=True, slots=True)
class Job:
    """A request with its deadline, which runs from the moment when the request was read."""

    request: dict[str, Any]
    deadline: Deadline
    began: float


class Inbox:
    """A thread that reads stdin, and maintains the deadline and the kernel's alarm of the running job."""

    def __init__(self, requests_fd: int) -> None:
        self._fd = requests_fd
        self._lock = threading.Lock()
        self._job: Job | None = None
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def read_until_the_end(self) -> None:
        """Run the reader; end the process as soon as stdin ends, whatever it is doing."""
        try:
            with open(self._fd, "rb") as lines:
                for line in lines:
                    self._receive(json.loads(line))
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        os._exit(0)

    def finished(self, job: Job) -> None:
        """Disarm the alarm, unless the next job has armed it already."""
        with self._lock:
            if self._job is job:
                self._job = None
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _receive(self, request: dict[str, Any]) -> None:
        with self._lock:
            if request["op"] not in ("stop", "extend"):
                now = time.monotonic()
                self._job = Job(request, Deadline(time.monotonic), now)
                self._set_deadline(request.get("budget_s"))
                self.jobs.put(self._job)
            elif self._job is None or request.get("round_id") not in (None, self._job.request.get("round_id")):
                pass  # too late: its request has ended
            elif request["op"] == "stop":
                self._job.deadline.stop()
            else:
                self._set_deadline(request["budget_s"])

    def _set_deadline(self, budget_s: float | None) -> None:
        assert self._job is not None
        if budget_s is None or math.isinf(budget_s):
            self._job.deadline.move(math.inf)
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        self._job.deadline.move(time.monotonic() + budget_s)
        alarm_s = budget_s + self._job.request.get("lease_s", math.inf)
        signal.setitimer(signal.ITIMER_REAL, max(alarm_s, 1e-3) if math.isfinite(alarm_s) else 0)


def private_pipes() -> tuple[int, int]:
    """Move the two pipes away from the descriptors of user code; return (requests, replies)."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def main() -> None:
    """Answer requests until `quit` or the end of stdin."""
    keep_modules()
    requests_fd, replies_fd = private_pipes()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    inbox = Inbox(requests_fd)
    threading.Thread(target=inbox.read_until_the_end, name="reader", daemon=True).start()
    operations = Operations()
    with open(replies_fd, "w", encoding="utf-8") as replies:
        while True:
            job = inbox.jobs.get()
            is_last = job.request["op"] == "quit"
            reply = {} if is_last else operations.answer(job.request, job.deadline)
            reply["seconds"] = time.monotonic() - job.began
            replies.write(to_json(reply) + "\n")
            replies.flush()
            inbox.finished(job)
            if is_last:
                return


if __name__ == "__main__":
    main()
