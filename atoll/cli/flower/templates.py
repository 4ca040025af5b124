"""The files of an exported app, with `$name` as placeholders."""

from string import Template

CLIENT_APP = Template('''\
"""The client of $task as a ClientApp: it trains and measures as an agent of Atoll does."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from atoll.flower.exported.client import Client
from $package import TASK

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the node's data from the model of the message."""
    return Client(TASK, context).train(message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the model of the message on the node's test data."""
    return Client(TASK, context).evaluate(message)
''')

SERVER_APP = Template('''\
"""The rounds of $task as a ServerApp: Flower's $strategy, from the task's model."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import $strategy

from atoll.flower.exported.server import Server
from $package import TASK

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and save the last model."""
    server = Server(TASK, context)
    strategy = $strategy(  # a fraction of $a_number is none: the least number of nodes is their number
$arguments
        train_metrics_aggr_fn=server.merged,
        evaluate_metrics_aggr_fn=server.merged,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=server.initial(),
        num_rounds=server.num_rounds,
        timeout=$timeout,$evaluate_fn
    )
    server.save(result.arrays, "final_model.safetensors")
''')

EVALUATE_FN = "\n        evaluate_fn=server.evaluate,"

INIT_OF_FILE = Template('''\
"""$task as a Flower app."""

from pathlib import Path

TASK = f"{Path(__file__).parent / 'task' / '$file'}:$attribute"
''')

INIT_OF_MODULE = Template('''\
"""$task as a Flower app."""

TASK = "$reference"
''')

README = Template("""\
# $task as a Flower app

Written by `atoll flower export`. The task's code is in $code; data files are not
copied$data. Each node needs Atoll and the packages of `pyproject.toml`, as the training is Atoll's: an update has the
bits of an agent's, by the seed of run, round and site.

    flwr run . --stream

A SuperNode names its site, and may set the task's settings and the `device`:

    flower-supernode --node-config 'site="north"'

Without `site` the number `partition-id`, which Flower's simulation gives, is the place among the task's sites$sites.

- Settings of the local training, options of the task and the seed are in `[tool.flwr.app.config]`; `flwr run
  --run-config "local.lr=0.05"` changes them.
- Metrics of all nodes are merged by their sums, and equal the pooled data's.
- Local layers, kept optimizers and states of algorithms are in the context's state. Flower loses it when a SuperNode
  ends, and keeps it also for a training that did not count.
- A straggler trains to its end; its reply after the timeout is dropped. Rounds, replies and the model are lost with the
  SuperLink or the ServerApp, which start over.
- The last model is `final_model.safetensors`, from which a run of Atoll can start (`model.start`).
$left_out""")
