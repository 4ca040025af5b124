from atoll.simulations.engines.processes import processes
from tests import preloaded

preloaded.extend(processes.PRELOAD)  # of the two, the first to start the fork server decides
