"""`python -m tests.cluster.images [NAME …]`: builds, and prints NAME and the path of its archive."""

import argparse
import sys
from collections.abc import Sequence

from tests.cluster.images import IMAGES, ImageError, build
from tests.cluster.images.recipes import DEFAULT


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.images", description=__doc__)
    choices = ", ".join(IMAGES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {choices}; by default all but engine (5 GB)")
    try:
        found = build(parser.parse_args(arguments).names or DEFAULT)
    except ImageError as error:
        print(error, file=sys.stderr)
        return 1
    for name, path in found.items():
        print(f"{name}\t{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
