"""Worker of `launch run`: runs the user's script under the agent, as `python SCRIPT ARGS...` would."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

from launcher.process import prepare_worker, run_and_exit, unblock_stop_signals


def main() -> None:
    prepare_worker()
    unblock_stop_signals()
    del sys.argv[0]
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as `python SCRIPT` does

    from torch.distributed.elastic.multiprocessing.errors import record

    run_and_exit(partial(record(runpy.run_path), script, run_name="__main__"))


if __name__ == "__main__":
    main()
