"""The other side of `fold`: Flower's aggregate function, run by the Python of .venv-peers.

    .venv-peers/bin/python benchmarks/flower_fold.py WEIGHT,FILE ...

It loads the files as Flower has replies in memory (a RecordDict with the serialized array and a weight), prints
`ready`, and for each line of standard input aggregates once and prints one JSON object. It has no code of Atoll's.
"""

import json
import resource
import sys
import time

import numpy as np
from flwr.common import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords


def main() -> None:
    """Aggregate on demand, until standard input ends."""
    records = []
    for argument in sys.argv[1:]:
        weight, path = argument.split(",", 1)
        arrays = ArrayRecord({"w": Array(np.fromfile(path, np.float32))})
        records.append(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": int(weight)})}))
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        mean = aggregate_arrayrecords(records, "num-examples")["w"].numpy()
        seconds = time.perf_counter() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "peak_bytes": peak, "first": mean[:8].tolist()}), flush=True)


if __name__ == "__main__":
    main()
