"""The modules that the fork server of the tests imports once, instead of each rank that it forks."""

MODULES = (
    "pytest",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.debug",
    "torch._subclasses.fake_tensor",
    "torch.utils.flop_counter",
    "atoll.parallel.engine.assemble",
    "atoll.parallel.engine.step",
    "atoll.parallel.checkpoint.checkpointer",
    "atoll.parallel.planner.dry_run",
    "tests.parallel.communication.learners",  # scikit-learn: a second
    "tests.parallel.engine.cases",
    "tests.parallel.trainer.training",
)


def extend(preload: list[str]) -> None:
    """Add the modules to a list that is handed to the fork server when it starts."""
    preload.extend(module for module in MODULES if module not in preload)
