"""`python -m loraplane_engine.adapters.convert`: artifact -> engine image, in a short-lived process without torch.

Prints one JSON line: the manifest without its sites on success (exit 0), an error object on refusal (exit 1).
"""

import argparse
import json
import sys
from pathlib import Path

from loraplane_core.errors import LoraplaneError, render
from loraplane_engine.adapters.image import Layout, convert


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert one adapter artifact into an engine image.")
    parser.add_argument("--artifact", type=Path, required=True, help="folder with the two files")
    parser.add_argument("--out", type=Path, required=True, help="the image to write")
    parser.add_argument(
        "--layout", type=Layout.parse, required=True, help="as the core states it, e.g. v1/float32/737280"
    )
    parser.add_argument("--digest", help="refuse the artifact unless it has this digest")
    options = parser.parse_args(arguments)
    try:
        manifest = convert(options.artifact, options.out, options.layout, options.digest)
    except (LoraplaneError, OSError) as error:
        status, body, _ = render(error)
        if isinstance(error, OSError):
            sys.stderr.write(f"{error}\n")
        sys.stdout.write(json.dumps({"status": status, **body}) + "\n")
        return 1
    summary = {
        "digest": manifest.digest,
        "layout": manifest.layout,
        "bytes": manifest.data_bytes,
        "pages": manifest.pages,
        "rank": manifest.rank,
        "parameters": manifest.parameters,
        "sites": len(manifest.sites),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
