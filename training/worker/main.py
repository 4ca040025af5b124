"""The worker process: `python -m atoll.training.worker.main`. Requests and answers are JSON objects, one a line.

    main thread     one request after another, in the order of their arrival
    reader thread   stdin: queues requests; obeys `stop` and `extend` at once, also while the main thread trains;
                    ends the process when stdin ends, which is when its supervisor is gone
    the kernel      SIGALRM ends the process `lease_s` after its deadline, also when a C extension holds the GIL so that
                    neither thread can run, and no supervisor is left to kill it

Requests, and the fields of their answers (`?`: optional):

    load      task, site?, local?, algorithm?, threads?, device?, folder?  -> (none)
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
    plan      nodes                                      -> strategy, settings, became, notes, reasons (of a Flower app)
    conclude  model, history                             -> (none), at the end of the app's main()
    values    statistics                                 -> values (null: undefined), by the task's metrics
    quit                                                 -> (none), then the process ends

`model`, `own`, `out` and `own_out` are safetensors files: the version, the site's kept tensors before the training, the
update, the site's kept tensors after it (written if `has_own`). `message` is a file of `task/content`; its reply is
one.

Every request may have `budget_s`, from now to its deadline, and `lease_s` beyond that. Every answer has `seconds`, and,
if the task failed, `error` and `detail` instead of its other fields. `layout` lists [name, dtype, shape], `pieces`
lists [tensor, dtype, offsets, lengths, sha256] of the file that was written, both in canonical order; an encoded piece
also has [codec, encoded_bytes]. `codec` encodes the update, `owed` lists the residual files of biased codecs, and
`residual` is the file for the new residual.

These have no answer, and act only on the running request (with a `round_id`: only if it is the same):

    stop      round_id?                 end the training early, with the steps done so far
    extend    budget_s, round_id?       move the deadline to `budget_s` from now

The file descriptors 0 and 1 belong to the user's code: its reads find nothing, and its prints go to stderr, the log. An
`extend` that arrives while a C extension holds the GIL takes effect when it lets go; until then the old lease counts.
"""

import json
import math
import os
import signal
import threading
import time
import traceback

from atoll.ground.process.heap import keep_freed_blocks
from atoll.ground.process.loading import keep_modules
from atoll.ground.process.log_streams import write_to_log
from atoll.task.json_text import to_json
from atoll.training.worker.inbox import Inbox
from atoll.training.worker.operations import Operations


def read_until_the_end(inbox: Inbox, requests_fd: int) -> None:
    """Deliver the requests; end the process as soon as stdin ends, whatever it is doing."""
    try:
        with open(requests_fd, "rb") as lines:
            for line in lines:
                inbox.receive(json.loads(line))
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


def set_alarm(seconds: float) -> None:
    """Set the kernel's alarm, which ends the process after some seconds; infinite: disarm it."""
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3) if math.isfinite(seconds) else 0)


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
    keep_freed_blocks()
    requests_fd, replies_fd = private_pipes()
    write_to_log()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    inbox = Inbox(set_alarm)
    threading.Thread(target=read_until_the_end, args=(inbox, requests_fd), name="reader", daemon=True).start()
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
