"""The language model of the core's worker with ChunkedHead, run by torchrun in test_chunked_loss.py."""

from __future__ import annotations

from launcher.extensions.hf.chunked_loss import ChunkedHead
from tests.train.parallel import uses_worker

if __name__ == "__main__":
    uses_worker.HEAD = ChunkedHead
    uses_worker.LOSSES = {"vocabulary": uses_worker.LOSSES["vocabulary"]}
    uses_worker.main()
