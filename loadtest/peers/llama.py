"""llama.cpp's own server from the package xllamacpp, in that package's virtual environment.

    python -m loadtest.peers.llama FILE.gguf PORT SLOTS TOKENS_PER_SLOT THREADS

Serves until it is killed. Knows nothing of Octavo.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Serve."""
    import xllamacpp

    path, port, slots, slot_tokens, threads = arguments[0], *map(int, arguments[1:5])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.hostnames, parameters.port = ["127.0.0.1"], port
    parameters.n_parallel, parameters.n_ctx = slots, slots * slot_tokens
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.cont_batching = True
    parameters.n_batch, parameters.n_ubatch = 2048, 512
    server = xllamacpp.Server(parameters)
    print("listening on", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
