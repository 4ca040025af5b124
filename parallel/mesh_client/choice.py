"""The plan of a client's ranks: from its settings or, with `mesh = "auto"`, the planner; the same on all ranks."""

import os
from collections.abc import Mapping
from functools import partial
from math import gcd
from typing import Any

from atoll.ground.faults import faults_in
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import AUTO, Plan, possible_plans
from atoll.parallel.mesh_client.faults import faults_of_mesh, outline_of
from atoll.parallel.mesh_client.needs import moments_of
from atoll.parallel.planner.choice import Choice, choose
from atoll.parallel.planner.rank_memory import Machine, machine_of
from atoll.task.errors import TaskBroken
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.training.worker.bench import Json
from atoll.training.worker.site_task import SiteTask, device_of

OPTIMIZERS = {0: "sgd", 1: "momentum", 2: "adam", None: "adam"}
"""The planner's name of an optimizer by the numbers that it keeps for each parameter; an unknown one may keep two."""


def plan_for(task: Task, request: Json) -> Choice:
    """Choose the parallel plan that a `load` request (`worker/main`) names; every rank calls it.

    `plan` has the fields of `Plan`; `mesh` is its degrees, or "auto".

    Raises:
        OverridesRefused: the site's values do not fit the task.
        TaskBroken: no mesh of these ranks can train the task; or the ranks would choose different ones.
    """
    fields = dict(request["plan"])
    degrees = fields.pop("mesh")
    if degrees != AUTO:
        return Choice(Plan(mesh=Mesh(**degrees), **fields), "")
    here, ranks = SiteTask(task, request), Ranks()
    try:
        machine = _smallest(ranks, device_of(request))
        choice = choice_for(here.task, here.local, here.algorithm, ranks.size, machine, fields)
        if len(set(found := ranks.gather(choice.why))) > 1:
            raise TaskBroken(f"the ranks have chosen different meshes, so their tasks differ: {'; '.join(set(found))}")
    finally:
        ranks.close()
    return choice


def choice_for(
    task: Task, local: Local, algorithm: str, num_ranks: int, machine: Machine, settings: Mapping[str, Any]
) -> Choice:
    """Choose the plan of a task's local training.

    Args:
        task: the task, with the options of the run.
        local: the settings of a round.
        algorithm: the algorithm of the run.
        num_ranks: on all machines.
        machine: the smallest of them.
        settings: the site's other settings of the plan.

    Raises:
        TaskBroken: there is none; the message lists every reason.
    """
    try:
        return choose(
            outline_of(task),
            possible_plans(num_ranks, settings),
            machine,
            optimizer=OPTIMIZERS[moments_of(local)],
            faults_of=partial(faults_of_mesh, task, local, algorithm),
        )
    except ValueError as error:
        raise TaskBroken(*faults_in(error)) from error


def _smallest(ranks: Ranks, device: str) -> Machine:
    """Return the ranks of a machine that all machines have, with the least memory of any rank."""
    hosts = ranks.gather(os.uname().nodename)
    memory = machine_of(device, hosts.count(os.uname().nodename)).memory
    return Machine(gcd(*map(hosts.count, hosts)), min(ranks.gather(memory)))
