"""`loraplane-engine`: one base model, many adapters, an OpenAI-compatible API."""

import asyncio
import logging
import os
import signal
import sys

from prometheus_client import disable_created_metrics

from loraplane_engine.server.composition import Engine
from loraplane_engine.settings import Settings, parse


def main() -> None:
    settings = parse(sys.argv[1:])
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("httpx", "httpcore", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter, which nobody reads
    # Prompts are tokenised in this process while its threads run; the tokenizer's own pool would fight the core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(asyncio.run(_run(settings)))


async def _run(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    return await Engine(settings).run(stop)


if __name__ == "__main__":
    main()
