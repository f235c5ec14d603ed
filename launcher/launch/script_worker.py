"""Worker of `launch run`: runs the user's program under the agent, as `python SCRIPT ARGS...` would.

Its arguments are those of the program after a script, a command, or ``-m DIRECTORY MODULE``.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

from launcher.launch.program import program_file
from launcher.process import prepare_worker, run_and_exit, unblock_stop_signals


def main() -> None:
    prepare_worker()
    unblock_stop_signals()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        directory, module = sys.argv[1:3]
        del sys.argv[:2]
        place = Path(directory).resolve()
        run = partial(runpy.run_module, module, alter_sys=True)
    else:
        script = program_file(sys.argv[0])
        if script is None:  # in a container that lacks it
            sys.exit(f"launch run: {sys.argv[0]}: there is no such script or command.")
        sys.argv[0] = str(script)
        place = script.resolve().parent
        run = partial(runpy.run_path, sys.argv[0])
    sys.path.insert(0, str(place))  # as Python does

    from torch.distributed.elastic.multiprocessing.errors import record

    run_and_exit(partial(record(run), run_name="__main__"))


if __name__ == "__main__":
    main()
