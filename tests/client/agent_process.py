"""An agent as a process: `python -m tests.client.agent_process COORDINATOR STATE TASK`."""

import asyncio
import logging
import sys
from pathlib import Path

from atoll.client.config import AgentConfig
from atoll.client.process import run_agent, tasks_by_name

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    address, state, task = sys.argv[1:]
    config = AgentConfig(
        site="north", coordinator=address, insecure=True, state=Path(state), reconnect_min=0.05, reconnect_max=0.5
    )
    sys.exit(asyncio.run(run_agent(config, tasks_by_name([task]))))
