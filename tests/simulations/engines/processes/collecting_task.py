"""Train in a forked process that collects garbage, while this one has channels of gRPC in garbage of its own."""

import asyncio
import gc
import os

import grpc
import torch

from atoll import Task
from atoll.simulations.engines.engine import Job, Training
from atoll.simulations.engines.processes.processes import Processes
from atoll.training.worker.model_bench import ModelBench
from tests.simulations.federation import line_task


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    gc.collect()
    return torch.nn.functional.cross_entropy(outputs, targets)


async def leave_garbage() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for _ in range(20):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        try:
            await channel.unary_unary("/a/b")(b"", timeout=10)
        except grpc.RpcError as error:
            in_a_circle = [channel, error]
            in_a_circle.append(in_a_circle)


if __name__ == "__main__":
    gc.disable()  # the garbage stays until the child collects
    asyncio.run(leave_garbage())
    in_a_circle = [grpc.insecure_channel("127.0.0.1:1")]
    in_a_circle.append(in_a_circle)
    del in_a_circle
    task = Task(model=line_task.model, data=line_task.data, loss=loss, sites=line_task.SITES)
    engine = Processes(Training(task=task), workers=1)
    version = ModelBench(task, {}).initial(0)
    print(len(list(engine.train(version, [Job("a", 1), Job("b", 2)]))), "trained", flush=True)
    engine.close()
    os._exit(0)  # this process, too, frees none of it
