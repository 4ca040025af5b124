from atoll.parallel.engine import forked
from tests import preloaded

preloaded.extend(forked.PRELOAD)
