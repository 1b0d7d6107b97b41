"""`python -m loraplane_engine.core ENDPOINT OPTIONS_JSON`."""

import sys

from loraplane_engine.core.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
