"""What a user can set: one dataclass per config group, a line with the unit under every field.

Python holds types and defaults, ``conf/`` holds values, ``launcher.compose`` puts them together with Hydra. A field
whose default is None is decided by the plan, or belongs to another option of its group. Null for any other key is its
default here, or is refused where that would be ambiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ClusterKind(StrEnum):
    local = "local"
    hosts = "hosts"
    slurm = "slurm"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class StrategyKind(StrEnum):
    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class Sync(StrEnum):
    auto = "auto"
    every = "every"
    boundary = "boundary"
    gather_once = "gather_once"
    replicas_at_boundary = "replicas_at_boundary"


class Compress(StrEnum):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"  # only for an error that says why not, and to read plans of earlier versions
    powersgd = "powersgd"


class Recompute(StrEnum):
    none = "none"
    blocks = "blocks"


class PrecisionKind(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Parameters(StrEnum):
    fp32 = "fp32"
    keep = "keep"


class ShortWindow(StrEnum):
    exact = "exact"
    drop = "drop"


class Norm(StrEnum):
    leave = "leave"
    sync = "sync"
    freeze = "freeze"
    window = "window"


class OnOom(StrEnum):
    stop = "stop"
    shrink = "shrink"


class OptimizerKind(StrEnum):
    adamw = "adamw"
    sgd = "sgd"


class LrScaling(StrEnum):
    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class ScheduleKind(StrEnum):
    constant = "constant"
    cosine = "cosine"
    linear = "linear"


OnError = StrEnum("OnError", {"stop": "stop", "continue": "continue"})  # a keyword cannot be written in a class


class WandbMode(StrEnum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass(kw_only=True)
class ClusterConfig:
    """Where the job runs."""

    kind: ClusterKind = ClusterKind.local
    """local: this machine; hosts: several, on each of which the same command is typed; slurm: a job of Slurm's."""
    nodes: int | str = 1
    """Hosts; a local job has one. slurm, hosts: "MIN:MAX", such as 2:4: it goes on with as many as there are, at
    the same global batch; in a YAML file in quotes."""
    rendezvous: str | None = None
    """hosts: HOST:PORT where they meet, an address of the first of them."""
    interface: str | None = None
    """hosts, slurm: a host's network interface to the others. Default: the one that leads to the first of them."""
    link_gbit: float | None = None
    """hosts, slurm: Gbit/s of a host's link to the others, for the predicted time on the wire."""
    workers_per_node: int | None = None
    """Ranks a host. Default: the GPUs seen (slurm: of a node of the partition), else 2."""
    device: Device = Device.auto
    """auto: cuda where a GPU is seen (slurm: where the partition has some), else cpu."""
    max_restarts: int = 0
    """How often torchrun starts the workers again after one failed; a training job goes on from its last checkpoint."""
    grace_s: int = 30
    """Seconds that workers get to finish their window and save when they are asked to stop."""
    env: list[str] = field(default_factory=list[str])
    """Names of environment variables that workers get beside the usual ones; a trailing * matches any ending."""
    partition: str | None = None
    """slurm: where the job queues. Default: Slurm's."""
    account: str | None = None
    """slurm: who pays."""
    qos: str | None = None
    """slurm: quality of service."""
    time: str | None = None
    """slurm: time limit, "HH:MM:SS" or "D-HH:MM:SS". A run that is longer goes on in the job's next turn."""
    mem: str | None = None
    """slurm: memory a node, such as "64G"."""
    cpus_per_worker: int | None = None
    """slurm: CPU cores a rank. Default: a node's cores by its GPUs; without GPUs 2."""
    constraint: str | None = None
    """slurm: features that nodes must have."""
    exclude: str | None = None
    """slurm: nodes not to use."""
    dependency: str | None = None
    """slurm: jobs to wait for, such as "afterok:1234"."""
    setup: list[str] = field(default_factory=list[str])
    """slurm: shell lines run on the first node before the job, such as "module load cuda"."""
    container: str | None = None
    """slurm: container image for the job's tasks (pyxis)."""
    sbatch: dict[str, Any] = field(default_factory=dict[str, Any])
    """slurm: any other option of sbatch by its long name; true for one without a value."""


@dataclass(kw_only=True)
class StrategyConfig:
    """How the model lies over the ranks, and when gradients are synchronised."""

    kind: StrategyKind = StrategyKind.ddp
    """single: one rank; ddp: a whole model on each rank; fsdp: sharded over all ranks; hsdp: sharded over shard_size
    ranks, and replicated."""
    sync: Sync = Sync.auto
    """every: gradients on each micro-batch; boundary: on the last of a window; gather_once (fsdp, hsdp): parameters too
    once a window; replicas_at_boundary (hsdp): within a shard group each time, between replicas at the boundary; auto:
    the one with the fewest wire bytes whose predicted memory fits."""
    bucket_mb: float | None = None
    """ddp: size of the gradient buckets, MiB. Default: 25."""
    static_graph: bool = False
    """ddp: its static_graph; only with sync=every."""
    find_unused_parameters: bool = False
    """ddp: its find_unused_parameters; only with sync=every."""
    compress: Compress = Compress.none
    """ddp: gradients on the wire as bf16, or as low-rank factors (powersgd, with error feedback). fp16 is refused."""
    powersgd_rank: int | None = None
    """powersgd: rank of the factors. Default: 1."""
    powersgd_start: int | None = None
    """powersgd: synchronisations sent whole before compression starts. Default: 10."""
    shard_size: int | None = None
    """hsdp: ranks that share one copy of the model. Default: the workers of one host."""
    recompute: Recompute = Recompute.none
    """blocks: activations within the model's repeated blocks are computed again in backward, not kept."""
    cpu_offload: bool = False
    """fsdp, hsdp on GPUs: parameters, gradients and optimizer state lie in host memory between uses."""


@dataclass(kw_only=True)
class PrecisionConfig:
    """Number formats of parameters and of the forward and backward pass."""

    kind: PrecisionKind = PrecisionKind.auto
    """fp32, or autocast to bf16 or fp16 (with loss scaling). auto: bf16 if every worker's device computes it without
    emulation, else fp32; decided once for a run."""
    init_scale: float | None = None
    """fp16: first loss scale."""
    reduce_dtype: PrecisionKind | None = None
    """fsdp, hsdp: format in which gradients are summed between ranks. Default: fp32."""
    growth_interval: int | None = None
    """fp16: steps without overflow after which the scale doubles."""
    parameters: Parameters = Parameters.fp32
    """Trained parameters that model() returns in bf16 or fp16. fp32: they become fp32; keep: they stay, and their
    gradients and optimizer state have that format too. Frozen ones stay, except with precision=fp32."""
    tf32: bool = False
    """GPUs: whether fp32 matrix products and convolutions use TF32, which rounds their inputs to 10 mantissa bits."""


@dataclass(kw_only=True)
class BatchConfig:
    """The contract. Any two of the first three fix the third; global_size alone lets micro_size follow."""

    global_size: int | None = None
    """Samples in one optimizer step, over all ranks. Default: 64."""
    micro_size: int | str | None = None
    """Samples one rank passes forward and backward at once. auto: the largest that memory has room for, found by trying
    (on_oom=shrink). Default: the largest of 4, 3, 2, 1 that divides a rank's share."""
    accumulation: int | None = None
    """Micro-batches a rank in one optimizer step."""
    uneven: bool = False
    """Where the ranks cannot share global_size in whole micro-batches: true: their micro-batches differ by one sample,
    one without a sample counts for nothing, and accumulation is rounded up; false: refused."""
    ramp: list[list[int]] = field(default_factory=list[list[int]])
    """Stages before global_size holds: [[100, 16], [200, 32]] is 100 windows of 16 samples, then 200 of 32. The
    micro-batch stays, accumulation grows."""
    short_window: ShortWindow = ShortWindow.exact
    """The window at an epoch's end that is not full: exact: used, with its true weight; drop: left out."""
    on_oom: OnOom = OnOom.stop
    """A rank that runs out of memory: stop: ends the run; shrink: all ranks halve the micro-batch, run as many more of
    them, and do the window again."""
    norm: Norm = Norm.leave
    """What a BatchNorm normalises by: leave: one rank's micro-batch; sync: that micro-batch of all ranks; freeze: its
    running statistics, which stay as they are; window: the whole window, with the gradient of one big batch, at the
    price of two more passes for each BatchNorm."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """The update rule."""

    kind: OptimizerKind = OptimizerKind.adamw
    """adamw or sgd."""
    lr: float = 1e-3
    """Learning rate at reference_batch, or at any batch without lr_scaling."""
    weight_decay: float = 0.0
    """Decay a step, times the learning rate."""
    betas: list[float] | None = None
    """adamw: decay of the first and second moment."""
    eps: float | None = None
    """adamw: added to the denominator."""
    momentum: float | None = None
    """sgd: momentum."""
    nesterov: bool | None = None
    """sgd: Nesterov's form of it."""
    lr_scaling: LrScaling = LrScaling.none
    """k = global/reference. linear: lr k (for SGD: Goyal et al. 2017); sqrt, adamw only: lr sqrt(k), each of betas
    1 - k (1 - beta), eps / sqrt(k) (Malladi et al. 2022); both with schedule.warmup_steps up to that rate."""
    reference_batch: int | None = None
    """Samples: the global batch that lr was tuned for."""


@dataclass(kw_only=True)
class ScheduleConfig:
    """The learning rate over optimizer steps, as a factor of lr."""

    kind: ScheduleKind = ScheduleKind.cosine
    """constant; cosine or linear: falls from 1 to min_ratio, which it reaches after the last step."""
    warmup_steps: int = 0
    """Optimizer steps over which the factor rises to 1."""
    min_ratio: float | None = None
    """cosine, linear: the factor after the last step."""


@dataclass(kw_only=True)
class TrainConfig:
    """How long, and with what care."""

    steps: int | None = None
    """Optimizer steps. Default, without epochs: 300."""
    epochs: int | None = None
    """Passes over the data, instead of steps."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    seed: int = 0
    """Of the initial parameters, the sample order and dropout."""
    deterministic: bool = False
    """Only deterministic kernels: slower, bitwise repeatable."""
    compile: bool = False
    """torch.compile the model."""
    log_every: int = 1
    """Optimizer steps between two records."""
    eval_every: int = 0
    """Optimizer steps between two evaluations; 0 or null: once, at the end."""
    loader_workers: int = 1
    """Processes a rank that read and collate ahead of the step; 0: in the step's own process."""
    hang_timeout: float | None = 1800.0
    """Seconds after which a rank that does not get on hangs, and the workers are ended, to be started again as after a
    death: longer than the start, any micro-batch, any batch of an evaluation and any checkpoint; null: never."""
    straggler_share: float | None = 0.1
    """The slowest rank is named once it makes a step longer by this share of it; null: never."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is kept. The last step is always saved, unless enabled is false."""

    enabled: bool = True
    """Save at all."""
    every: int | None = None
    """Optimizer steps between two checkpoints."""
    every_minutes: float | None = None
    """Minutes between two checkpoints. Default, without every: none; slurm: 10."""
    keep: int | None = None
    """Checkpoints kept, the newest. Default: all; slurm, where every and every_minutes are not set: 3."""
    async_save: bool = True
    """Copy what is to be saved to host memory, and write it while training goes on; the last one is written at once."""
    on_error: OnError = OnError.stop
    """When a checkpoint cannot be written: stop: the run ends as failed; continue: it goes on, and tries again when the
    next one is due."""


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases, the mirror of metrics.jsonl."""

    mode: WandbMode = WandbMode.offline
    """offline: files for `wandb sync`; online: live; disabled: none."""
    project: str = "launcher"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; default: the key's own."""
    group: str | None = None
    """Runs shown together. Default: a sweep's name, else WANDB_RUN_GROUP."""
    tags: list[str] = field(default_factory=list[str])
    """W&B tags. Default: WANDB_TAGS."""
    notes: str | None = None
    """Purpose of the run, shown beside it. Default: WANDB_NOTES."""
    job_type: str | None = None
    """W&B job type, such as train, to filter runs by. Default: WANDB_JOB_TYPE."""


@dataclass(kw_only=True)
class RunConfig:
    """The run itself."""

    name: str | None = None
    """Its directory's name. Default: the task's name, the time and four random characters."""
    dir: str = "runs"
    """Where run directories lie."""
    calibrate_s: float | None = None
    """Seconds, at most, in which the first window's micro-batches are measured before training: with sync=every, with
    the job's own policy and without communication. That gives the speed-up and the exposed communication. 0: never.
    Default: 15, and no more than a tenth of what the run is predicted to take."""


@dataclass(kw_only=True)
class SweepConfig:
    """Many runs from one command (-m)."""

    name: str | None = None
    """Its directory's name, and W&B's group. Default: the task's name and what was typed, as a digest: the same command
    goes on with the same sweep."""
    at_once: int | None = None
    """slurm: cells of one array that run at the same time. Default: as many as there is room for."""
    objective: str | None = None
    """What a sweeper that learns from results, such as Optuna's, is told of a cell: a number in its summary.json.
    Default: eval/loss where there is one, else train/loss."""


@dataclass(kw_only=True)
class Config:
    """Everything a user can set."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    """``_target_``: the task's class by its dotted path; every other key is a parameter of that class."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
