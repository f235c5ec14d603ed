"""`launch export RUN --to DIR`: write the trained model as safetensors, in Hugging Face's layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from launcher.cli.names import command_parser, resolve
from launcher.errors import EXIT_DONE
from launcher.quantities import bytes_text, count, first_names, printable
from launcher.report.tables import near

FLAGS = (
    "--to", "--step", "--best", "--ema", "--merge-lora", "--dtype", "--max-shard-size", "--json", "--dir",
)  # fmt: skip


def launch_export(arguments: list[str]) -> int:
    from launcher.extensions.export.request import DTYPES, export_run

    parser = command_parser("export", "Write the trained model of a run as safetensors, in Hugging Face's layout.")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory to create")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation (checkpoint.best)")
    parser.add_argument("--ema", action="store_true", help="the averages of the callback Ema")
    parser.add_argument("--merge-lora", action="store_true", help="merge adapters of peft (default: write them alone)")
    parser.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors (default: as they are)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default: 5GB)")
    parser.add_argument("--json", action="store_true", help="one object")
    given = parser.parse_args(arguments)
    exported = export_run(
        resolve(given.run, given.dir), given.to, step=given.step, best=given.best, ema=given.ema,
        merge_lora=given.merge_lora, dtype=given.dtype, max_shard_size=given.max_shard_size,
    )  # fmt: skip
    if given.json:
        print(json.dumps(dataclasses.asdict(exported), indent=2))
        return EXIT_DONE
    size = f"{count(exported.tensors, 'tensor')}, {bytes_text(exported.bytes)}"
    print(f"Exported step {exported.step} of {printable(exported.run)} to {near(exported.directory)}: {size}.")
    print(f"Files: {first_names(exported.files, 12)}")
    if exported.tied:
        print(f"Tied: {first_names([f'{name} is {kept}' for name, kept in exported.tied.items()])}")
    return EXIT_DONE
