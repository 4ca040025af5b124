"""`python -m atoll.parallel.mesh_client FOLDER`: a rank, started by another launcher, of the crew with that folder."""

import sys

from atoll.parallel.mesh_client.main import main

if __name__ == "__main__":
    main(sys.argv[1])
