"""Checks for a host with up to 8 GPUs: ranks with a GPU each over NCCL (``make gpu-node``)."""

from __future__ import annotations

import re
from functools import partial

from jobs.gpu.checks import LOSS_WITHIN, compare_with_plain, compare_with_plain_of
from jobs.gpu.registry import GLOBAL, Environment, Skip, check

# ranks -> samples of a micro-batch, so that GLOBAL samples are accumulated
MICRO = {2: 3, 4: 3, 8: 1}


def need_gpus(environment: Environment, number: int) -> None:
    import torch

    if not environment.on_gpu or torch.cuda.device_count() < number:
        raise Skip(f"needs {number} GPUs")


def _curve(environment: Environment, strategy: str, ranks: int, precision: str) -> str:
    need_gpus(environment, ranks)
    shards = ("strategy.shard_size=4",) if strategy == "hsdp" else ()
    job = (f"strategy={strategy}", f"precision={precision}", f"batch.micro_size={MICRO[ranks]}", *shards)
    environment.train(*job, workers=ranks, share=False)
    return compare_with_plain(environment, precision)


for _precision in ("bf16", "fp16"):
    for _strategy, _ranks in (("ddp", 2), ("ddp", 4), ("ddp", 8), ("fsdp", 2), ("fsdp", 4), ("fsdp", 8), ("hsdp", 8)):
        check(
            f"{_strategy}, {_ranks} GPUs, {_precision}",
            f"losses within {LOSS_WITHIN[_precision]:g} of a plain loop on one",
            alone=True,
        )(partial(_curve, strategy=_strategy, ranks=_ranks, precision=_precision))


@check("one GPU out of memory", "losses within 0.0002 of a plain loop", seconds=150, alone=True)
def out_of_memory(environment: Environment) -> str:
    need_gpus(environment, 2)
    room = ("task.megabytes=100", "task.room=1000", "task.room_rank=1", "batch.on_oom=shrink")
    environment.train("strategy=ddp", "precision=fp32", "batch.micro_size=12", *room, workers=2, share=False)
    sizes = [record["batch/micro_size"] for record in environment.records()]
    if max(sizes) > GLOBAL // 4:
        raise AssertionError(f"micro-batches of {sizes}: 12 samples do not fit")
    return f"12 -> {sizes[-1]:.0f} samples; {compare_with_plain_of(environment)}"


@check("a rank that is stopped", "the rank that hangs", seconds=150, alone=True)
def stopped(environment: Environment) -> str:
    """Check the verdict on a rank that kill -STOP has stopped while its peers wait for it in NCCL."""
    need_gpus(environment, 2)
    short = ("train.hang_timeout=20", "cluster.grace_s=5", "train.eval_every=0", "task.trouble=stops")
    job = ("strategy=fsdp", "precision=bf16", "batch.micro_size=3", *short)
    output = " ".join(environment.train(*job, workers=2, status=1, share=False).split())
    verdict = re.search(r"rank 1 hangs on \S+ in step \d+", output)
    if verdict is None:
        raise AssertionError("the output does not name the rank that was stopped")
    return verdict[0]


def _command(environment: Environment, verb: str, wanted: str) -> str:
    import torch

    need_gpus(environment, 2)
    ranks = max(number for number in MICRO if number <= torch.cuda.device_count())
    where = ("cluster.device=cuda", f"cluster.workers_per_node={ranks}", f"run.dir={environment.folder / 'runs'}")
    job = ("task._target_=jobs.gpu.tasks.Words", "strategy=fsdp", "precision=bf16", f"batch.global_size={GLOBAL}")
    output = " ".join(environment.launch(verb, *job, *where, f"batch.micro_size={MICRO[ranks]}").split())
    return output[output.index(wanted) :][:160]


check("launch drill", "nothing is lost", seconds=400, alone=True)(
    partial(_command, verb="drill", wanted="This job survives")
)
check("launch verify, all GPUs", "Verdict: exact", seconds=150, alone=True)(
    partial(_command, verb="verify", wanted="Verdict: ")
)
