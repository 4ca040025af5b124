"""`python -m atoll.parallel.crew FOLDER`: a rank that another launcher has started, of the crew with this folder."""

import sys

from atoll.parallel.crew.main import main

if __name__ == "__main__":
    main(sys.argv[1])
