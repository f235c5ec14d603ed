"""Config schema: one dataclass per group, and under every field its meaning and unit.

Types and defaults are here, values in ``conf/``; Hydra composes them. A default of None is decided by the plan, or
belongs to another option of the group. Null for any other key means its default, or is refused if ambiguous. The plan
extends the groups (plan/run_plan.py). All other facts of a key are beside it too: see ``launcher.config.key_facts``.
"""

from __future__ import annotations

import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from launcher.config.added_groups import added_groups, group_name
from launcher.config.choices import (
    Balance,
    BestMode,
    ClusterKind,
    Compress,
    ContainerRuntime,
    Device,
    LrScaling,
    Norm,
    OnError,
    OnNonfinite,
    OnOom,
    OptimizerKind,
    Parameters,
    PrecisionKind,
    Recompute,
    ScheduleKind,
    ShortWindow,
    StrategyKind,
    SumFormat,
    Sync,
    WandbMode,
)
from launcher.config.key_facts import (
    BETAS,
    FREE,
    NAME,
    NEW_RUN,
    PATH,
    STEP,
    TOKENS,
    UPDATE,
    Facts,
    above,
    at_least,
    between,
    default_of,
    facts_of,
    forced,
    key,
    key_of,
    never,
    steps_or_epoch,
)
from launcher.errors import ConfigError

Kind = TypeVar("Kind")

_BATCH = forced("it defines what a step and its learning rate mean")
_STATE = never("the checkpoint's optimizer state does not fit another one; " + NEW_RUN)
SCHEDULE_STATE = never("a schedule of your own continues from its saved state; " + NEW_RUN)
_GROUPS = never(
    "the checkpoint's optimizer state is stored by group: only the arguments of groups may change; " + NEW_RUN
)
_ORDER = never("it is the order of the samples; " + NEW_RUN)
_IDENTITY = never("it identifies the run and its files")
_MIRROR = never("W&B stores the run there")
_NEW = never("it has no effect on an existing run")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Machines that the job runs on."""

    kind: str = key(
        ClusterKind.local.value, resume=never("its code and files are there; " + NEW_RUN), affects="", nullable=False
    )
    """local: this machine; slurm: a Slurm job; elsewhere: only for `launch plan`, which takes it for several hosts if
    no other cluster is named. Extensions add others."""
    nodes: int | str = key(1, affects="time memory")
    """Number of hosts; 1 in a local job. Otherwise also a range, "2:4": the job continues with those present."""
    rendezvous: str | None = key(None, affects="")
    """Clusters without a scheduler: HOST:PORT of the rendezvous, an address of the first host."""
    interface: str | None = key(None, affects="")
    """Several hosts: a host's network interface to the others. Default: the one that leads to the first host."""
    workers_per_node: int | None = key(None, at_least(1), affects="time memory")
    """Ranks per host. Default: the number of visible GPUs (slurm: of a node of the partition), else 2."""
    device: Device = key(Device.auto, affects="time memory")
    """auto: cuda if a GPU is visible (slurm: if the partition has GPUs), else cpu."""
    gpu: str | None = key(None, affects="memory")
    """Only for `launch plan`: GPU of the hosts, such as h100, h200 or a100-40gb, which this machine need not have. The
    plan is for its memory and formats. Names: launcher/plan/gpus.py. Default: what this machine has (slurm: unknown
    memory)."""
    price_per_gpu_hour: float | None = key(None, at_least(0), affects="")
    """Price of one rank's device for an hour, in any currency: `launch report` then shows costs."""
    max_restarts: int = key(0, at_least(0), affects="")
    """Restarts of the workers by torchrun after a failure, unless the input is wrong; a training job resumes from its
    last checkpoint."""
    grace_s: int = key(30, at_least(1), affects="")
    """Seconds that workers have to finish their window and save when the job is stopped."""
    partition: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: partition. Default: that of the cluster."""
    account: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: account that is charged."""
    qos: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: quality of service."""
    time: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: time limit, "HH:MM:SS" or "D-HH:MM:SS". A longer run is requeued and continues."""
    mem: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: memory per node, such as "64G"."""
    cpus_per_worker: int | None = key(None, at_least(1), only="cluster=slurm", affects="")
    """slurm: CPU cores per rank. Default: a node's cores divided by its GPUs; 2 without GPUs."""
    constraint: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: required features of the nodes."""
    exclude: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: nodes to exclude."""
    dependency: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: dependency on other jobs, such as "afterok:1234"."""
    setup: list[str] = key([], only="cluster=slurm", affects="")
    """slurm: shell lines that run on the first node before the job, such as "module load cuda". A command that
    fails ends the job."""
    login: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: [USER@]HOST of a login node, as ssh knows it: the command copies the project there and runs there
    (docs/guides/laptop.md). train, run, plan, drill and doctor; later commands find the runs."""
    login_dir: str | None = key(None, PATH, only="cluster=slurm", affects="")
    """slurm: directory on the login node for the project and for a relative run.dir. Default: launcher/NAME in the home
    directory, with the name of this directory and a digest of its path."""
    login_setup: list[str] = key([], only="cluster=slurm", affects="")
    """slurm: shell lines after which a login shell on the login node finds `launch`, such as
    "source venv/bin/activate"."""
    container: str | None = key(None, only="cluster=slurm", affects="")
    """slurm: container image for the job's tasks: the path of a .sif file or an address such as oras://HOST/IMAGE:TAG
    (apptainer), or IMAGE:TAG or the path of a .sqsh file (pyxis)."""
    container_runtime: ContainerRuntime | None = key(None, only="cluster=slurm cluster.container", affects="")
    """slurm: what starts the container: pyxis, or apptainer (singularity on nodes that have that instead). Default: by
    the form of the image."""
    sbatch: dict[str, Any] = key({}, only="cluster=slurm", affects="")
    """slurm: any other option of sbatch by its long name; true for an option without a value."""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Distribution of the model over the ranks, and synchronisation of gradients."""

    kind: StrategyKind = key(StrategyKind.ddp, affects="time memory", nullable=False)
    """single: one rank; ddp: a full copy of the model on each rank; fsdp: sharded over all ranks; hsdp: sharded over
    shard_size ranks, and replicated; auto: the simplest one that is predicted to fit into memory."""
    sync: Sync = key(Sync.auto, affects="time memory")
    """every: synchronise gradients in each micro-batch; boundary: in the last of a window; gather_once (fsdp, hsdp):
    also gather parameters once per window; replicas_at_boundary (hsdp): in each micro-batch within a shard group, at
    the boundary between replicas; auto: of the policies whose predicted memory fits, the one with the fewest wire
    bytes."""
    bucket_mb: float | None = key(None, above(0), only="strategy=ddp", affects="time memory")
    """ddp: size of the gradient buckets, MiB. Default: 25."""
    static_graph: bool = key(False, only="strategy=ddp", affects="time memory")
    """ddp: DDP's static_graph; only with sync=every."""
    find_unused_parameters: bool = key(False, only="strategy=ddp|single", affects="time memory")
    """ddp: DDP's find_unused_parameters; only with sync=every. The gradient of a parameter that no rank uses in a
    window is zero after its first use: momentum and weight decay still change it."""
    compress: Compress = key(Compress.none, only="strategy=ddp", resume=FREE, affects=STEP)
    """ddp: format in which gradients are sent: bf16, or one that an extension adds; fp16 is refused."""
    shard_size: int | None = key(None, at_least(1), only="strategy=hsdp", affects="time memory")
    """hsdp: ranks that share one copy of the model. Default: the workers of one host."""
    recompute: Recompute = key(Recompute.none, affects="time memory")
    """blocks: recompute the activations inside the model's repeated blocks in the backward pass."""
    cpu_offload: bool = key(False, only="strategy=fsdp|hsdp", affects="time memory")
    """fsdp, hsdp on GPUs: keep parameters, gradients and optimizer state in host memory between uses."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the parameters and of the forward and backward passes."""

    kind: PrecisionKind = key(PrecisionKind.auto, resume=FREE, affects=STEP)
    """fp32, or autocast to bf16 or fp16 (with loss scaling). auto: bf16 if every worker's device computes it without
    emulation, else fp32; decided once for a run. Extensions add others."""
    init_scale: float | None = key(None, above(0), only="precision=fp16", resume=FREE, affects="learning")
    """fp16: first loss scale."""
    reduce_dtype: SumFormat | None = key(
        None, only="strategy=fsdp|hsdp", hint="DDP sends narrower gradients with strategy.compress=bf16.", resume=FREE,
        affects=STEP,
    )  # fmt: skip
    """fsdp, hsdp: format in which gradients are summed between ranks. Default: fp32."""
    growth_interval: int | None = key(None, at_least(1), only="precision=fp16", resume=FREE, affects="learning")
    """fp16: steps without overflow after which the scale doubles."""
    parameters: Parameters = key(Parameters.fp32, resume=FREE, affects=STEP)
    """Trained parameters that model() returns in bf16 or fp16. fp32: convert them; keep: they stay, and their
    gradients and optimizer state have that format too. Frozen parameters stay, except with precision=fp32."""
    tf32: bool = key(False, resume=FREE, affects="learning time")
    """GPUs: use TF32 for fp32 matrix products and convolutions; it rounds their inputs to 10 mantissa bits."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch contract. Any two of the first three keys fix the third; with global_size alone micro_size follows."""

    global_size: int | None = key(None, resume=_BATCH, affects=STEP)
    """Samples in one optimizer step, over all ranks. Default: 64."""
    micro_size: int | str | None = key(None, affects="time memory")
    """Samples that one rank passes forward and backward at once. auto: the largest that fits into memory, found by
    trying (on_oom=shrink). Default: the largest of 4, 3, 2, 1 that divides a rank's share."""
    accumulation: int | None = key(None, affects="time memory")
    """Micro-batches of one rank in one optimizer step."""
    global_tokens: int | str | None = key(None, TOKENS, resume=_BATCH, affects="")
    """In place of global_size, if all samples have equally many tokens (the task's tokens_per_sample()): tokens in one
    optimizer step, such as 65536, 64K or 4M (K: 1,024; M: 1,048,576)."""
    uneven: bool = key(False, affects="")
    """If the ranks cannot share global_size in whole micro-batches: true: micro-batches differ by one sample, one
    without a sample has weight zero, and accumulation is rounded up; false: refuse the combination."""
    ramp: list[list[int]] = key([], resume=_BATCH, affects=STEP, form=" of lists: [[100, 16], [200, 32]]")
    """Stages before global_size holds: [[100, 16], [200, 32]] is 100 windows of 16 samples, then 200 of 32. The
    micro-batch stays, accumulation grows."""
    short_window: ShortWindow = key(
        ShortWindow.exact, resume=never("the windows so far were counted with it; " + NEW_RUN), affects="learning"
    )
    """A window at the end of an epoch that is not full. exact: use it with its true weight; drop: leave it out."""
    balance: Balance = key(Balance.none, affects="time memory")
    """Division of a window's samples into micro-batches. none: in the order of the data; length: by their lengths,
    so that micro-batches hold little padding and ranks finish together. The gradient is the same."""
    micro_tokens: int | str | None = key(
        None, TOKENS, only="batch.balance=length", affects="time memory",
        hint="Which samples fit is known by the task's lengths(data); samples of one length need micro_size only.",
    )  # fmt: skip
    """Most tokens of a micro-batch, padding included, in the unit of the samples' lengths, such as 16K; micro_size is
    the most samples. A window of long samples then has more micro-batches. Default: no bound."""
    on_oom: OnOom = key(OnOom.stop, affects="")
    """A rank that runs out of memory. stop: end the run; shrink: all ranks halve the micro-batch, accumulate more of
    them, and repeat the window."""
    norm: Norm = key(Norm.leave, resume=forced("it changes what the model computes"), affects=STEP)
    """Statistics of a BatchNorm: leave: of one rank's micro-batch; sync: of that micro-batch of all ranks; freeze: the
    running ones, which stay as they are; window: of the whole window, with the gradient of one big batch, at the cost
    of two more passes for each BatchNorm."""


# groups whose option `custom` is a class, whose arguments are further keys of the group
WITH_TARGET = ("optimizer", "schedule")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule. A task's own method optimizer(model) replaces it."""

    kind: OptimizerKind = key(OptimizerKind.adamw, resume=_STATE, affects=STEP, nullable=False)
    """adamw: AdamW; sgd: SGD with momentum; custom: the class that _target_ names."""
    target: str | None = key(None, resume=_STATE, affects=STEP, name="_target_")
    """custom: class, such as torch.optim.Adagrad; the group's other keys are its arguments. Implies custom."""
    arguments: dict[str, Any] = key({}, resume=UPDATE, affects=STEP, name="*")
    """custom: further arguments of the class."""
    lr: float = key(1e-3, above(0), resume=UPDATE, affects="learning")
    """Learning rate at reference_batch, or at any batch without lr_scaling."""
    weight_decay: float | None = key(None, at_least(0), resume=UPDATE, affects=STEP)
    """Decay per step, multiplied by the learning rate. Default: 0; custom: that of the class."""
    betas: list[float] | None = key(None, BETAS, only="optimizer=adamw|custom", resume=UPDATE, affects="learning")
    """adamw: decay of the first and second moment."""
    eps: float | None = key(None, above(0), only="optimizer=adamw|custom", resume=UPDATE, affects="learning")
    """adamw: added to the denominator."""
    momentum: float | None = key(None, between(0, 1), only="optimizer=sgd|custom", resume=UPDATE, affects=STEP)
    """sgd: momentum."""
    nesterov: bool | None = key(None, only="optimizer=sgd|custom optimizer.momentum", resume=UPDATE, affects=STEP)
    """sgd: Nesterov's form of it."""
    groups: list[dict[str, Any]] | None = key(
        None, resume=_GROUPS, affects=STEP, form=', one {...} for each group: [{match: "ndim<2", weight_decay: 0}]'
    )
    """Parameters with settings of their own, such as [{match: embed, lr: 1e-4}]. match: a regular expression for names,
    or a number of dimensions ("ndim<2"); the first match counts. _target_: another optimizer. Default: no weight decay
    for fewer than two dimensions (biases and norms)."""
    lr_scaling: LrScaling = key(LrScaling.none, resume=UPDATE, affects="learning")
    """k = global/reference. linear: lr k (for SGD: Goyal et al. 2017); sqrt, adamw only: lr sqrt(k), each of betas
    1 - k (1 - beta), eps / sqrt(k) (Malladi et al. 2022); both with schedule.warmup_steps up to that rate."""
    reference_batch: int | None = key(
        None, at_least(1), only="optimizer.lr_scaling=linear|sqrt", resume=UPDATE, affects="learning"
    )
    """Samples: the global batch that lr was tuned for."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over optimizer steps, as a factor of lr; or a task's own method schedule(optimizer, steps)."""

    kind: ScheduleKind = key(ScheduleKind.cosine, resume=UPDATE, affects="learning", nullable=False)
    """constant; cosine or linear: falls from 1 to min_ratio, which it reaches after the last step; wsd (warm-up,
    stable, decay): 1 until the last decay_share of the steps, in which it falls linearly; custom: _target_."""
    target: str | None = key(None, resume=SCHEDULE_STATE, affects="learning", name="_target_")
    """custom: class, such as torch.optim.lr_scheduler.OneCycleLR, stepped after each optimizer step; the group's other
    keys are its arguments (${train.steps}: the run's length). Implies custom."""
    arguments: dict[str, Any] = key({}, resume=SCHEDULE_STATE, affects="learning", name="*")
    """custom: arguments of the class."""
    warmup_steps: int = key(0, at_least(0), resume=UPDATE, affects="learning")
    """Optimizer steps over which the factor rises to 1."""
    min_ratio: float | None = key(
        None, between(0, 1), only="schedule=cosine|linear|wsd|custom", resume=UPDATE, affects="learning"
    )
    """cosine, linear, wsd: the factor after the last step."""
    decay_share: float | None = key(None, between(0, 1), only="schedule=wsd|custom", resume=UPDATE, affects="learning")
    """wsd: share of the steps, warm-up included, in which the factor falls. Default: 0.2."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run, reproducibility, evaluation, hang and straggler detection."""

    steps: int | None = key(None, at_least(1), resume=FREE, affects="learning")
    """Optimizer steps. Default, without epochs: 300."""
    epochs: int | None = key(None, at_least(1), resume=FREE, affects="learning")
    """Passes over the data, instead of steps."""
    clip_norm: float | None = key(1.0, above(0), resume=UPDATE, affects=STEP)
    """Largest global gradient norm; null: no clipping."""
    on_nonfinite: OnNonfinite = key(OnNonfinite.stop, resume=FREE, affects="learning")
    """A window whose loss or gradient is inf or nan. stop: end the run; skip: leave the window out, without a step, and
    continue; more than 20 in a row end the run. fp16's overflows are not among them."""
    seed: int = key(
        0, between(0, 2**63 - 1), resume=never("the order of the samples is drawn from it; " + NEW_RUN),
        affects="learning", nullable=False,
    )  # fmt: skip
    """Seed of the initial parameters, the sample order, dropout, and what the task draws, such as a random split."""
    shuffle: bool = key(True, resume=_ORDER, affects="learning")
    """Read an indexed dataset in another random order each epoch; false: in its own order."""
    deterministic: bool = key(False, affects="time memory")
    """Use deterministic kernels only: slower, bitwise repeatable."""
    compile: bool = key(False, affects="time memory")
    """torch.compile the model: as a whole; under FSDP and HSDP its shard units one by one; or the modules that the
    task names (compile_units)."""
    log_every: int = key(1, at_least(1), affects="record")
    """Optimizer steps between two records."""
    eval_every: int | str = key(0, steps_or_epoch(0), affects="record")
    """Optimizer steps between two evaluations; epoch: at the end of each epoch; 0 or null: once, at the end."""
    eval_micro_size: int | None = key(None, at_least(1), affects="record")
    """Samples that one rank evaluates at once; batch.micro_tokens does not bound them. Default: batch.micro_size."""
    eval_samples: int | None = key(None, at_least(1), affects="record")
    """Limit of samples per evaluation and held-out set: the first ones of a stream; of a data set with a length, spread
    evenly over it. The same ones for every world size. Default: all."""
    patience: int | None = key(
        None, at_least(1), only="checkpoint.best", hint="Such as checkpoint.best=eval/loss.", affects="record"
    )
    """Evaluations in a row without a better value of checkpoint.best after which the run ends; null: never."""
    loader_workers: int = key(1, at_least(0), affects="time")
    """Processes per rank that read and collate ahead of the step; 0: in the step's own process."""
    data_shards: int | None = key(None, at_least(1), resume=_ORDER, affects="learning")
    """Shards of a stream that are read in turn: sample k of an epoch is the next one of shard k mod data_shards. Ranks
    whose number divides it read their own shards only. It must divide each window. 1: the stream's own order. Default:
    as many as a Hugging Face stream has, up to 64, if its operations allow it; 1 for other streams."""
    hang_timeout: float | None = key(1800.0, above(0), affects="")
    """Seconds without progress after which a rank counts as hanging and the workers are ended, and restarted as after
    any failure. Must exceed the start, any micro-batch, any batch of an evaluation and any checkpoint. null: never."""
    straggler_share: float | None = key(0.1, between(0, 1), affects="")
    """Report the slowest rank once it lengthens a step by this share of it; null: never."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints. The last step is always saved, unless enabled is false."""

    enabled: bool = key(True, affects="record", nullable=False)
    """Save checkpoints."""
    every: int | str | None = key(None, steps_or_epoch(1), affects="record")
    """Optimizer steps between two checkpoints; epoch: at the end of each epoch."""
    every_minutes: float | None = key(None, above(0), affects="record")
    """Minutes between two checkpoints. Default, without every: 5; slurm: 10."""
    keep: int | None = key(None, at_least(1), affects="record")
    """Number of newest checkpoints to keep. Default: all; if every and every_minutes are not set: 3."""
    best: str | None = key(None, affects="record")
    """Metric of the evaluation, such as eval/accuracy: the checkpoint of the best one so far is saved, if none is
    otherwise due, and kept beside the newest. Default: none."""
    best_mode: BestMode | None = key(None, only="checkpoint.best", affects="record")
    """Better value of that metric: min or max. Default: min for names with loss or perplexity; others need a value."""
    init_from: str | None = key(
        None, PATH, resume=never("the run has started with other parameters; " + NEW_RUN), affects="learning"
    )
    """Initial parameters and buffers of a new run: those of another run's newest checkpoint (its name, its directory or
    a prefix of its name), of a checkpoint (.../checkpoints/step_000100), of a safetensors file, or of a directory with
    model.safetensors or its index. Default: those that model() returns."""
    async_save: bool = key(True, affects="record")
    """Copy the state to host memory and write it while training continues; the last checkpoint is written at once."""
    on_error: OnError = key(OnError.stop, affects="")
    """If a checkpoint cannot be written. stop: the run ends as failed; continue: training continues, and the next due
    checkpoint is tried."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name and directory of the run, calibration."""

    name: str | None = key(None, NAME, resume=_IDENTITY, affects="")
    """Name of its directory. Default: the task's name, the time and four random characters."""
    dir: str = key("runs", PATH, resume=_IDENTITY, affects="")
    """Parent of the run directories."""
    calibrate_s: float | None = key(None, at_least(0), affects="record")
    """Maximum seconds of the calibration before training, which measures the first window's micro-batches with
    sync=every, with the job's own policy and without communication: the speed-up and the exposed communication.
    0: never. Default: 15, and no more than a tenth of the predicted run time; but three rounds are measured where that
    takes a tenth of the run, or less than 15 seconds and no longer than the run."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Many runs from one command (-m)."""

    name: str | None = key(None, NAME, resume=_NEW, affects="")
    """Name of its directory, and W&B group. Default: the task's name and a digest of the command, so that the same
    command continues the same sweep."""
    at_once: int | None = key(None, at_least(1), only="cluster=local|slurm", resume=_NEW, affects="")
    """Cells that run at the same time: of one array (slurm; default: no limit), or on this machine, each with an equal
    share of its GPUs or cores (local; default: 1)."""
    objective: str | None = key(None, resume=_NEW, affects="")
    """Result that a sweeper which learns from results, such as Optuna's, receives for a cell: a number in its
    summary.json, such as eval/accuracy; or best, the best value of checkpoint.best. Default: eval/loss if there is
    one, else train/loss."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, a mirror of metrics.jsonl."""

    mode: WandbMode = key(WandbMode.offline, affects="", nullable=False)
    """offline: write files for `wandb sync`; online: upload live; disabled: off."""
    project: str = key("launcher", resume=_MIRROR, affects="")
    """W&B project."""
    entity: str | None = key(None, resume=_MIRROR, affects="")
    """W&B user or team. Default: that of the API key."""
    group: str | None = key(None, resume=_MIRROR, affects="")
    """W&B group. Default: the sweep's name, else WANDB_RUN_GROUP."""
    tags: list[str] = key([], affects="")
    """W&B tags. Default: WANDB_TAGS."""
    notes: str | None = key(None, affects="")
    """W&B notes, such as the purpose of the run. Default: WANDB_NOTES."""
    job_type: str | None = key(None, affects="")
    """W&B job type, such as train, to filter runs by. Default: WANDB_JOB_TYPE."""


@dataclass(kw_only=True)
class Config:
    """Everything a user can set. A group is frozen: replace it to change one of its keys."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    task: dict[str, Any] = key(
        {}, resume=forced("another task, or other data, would be learned from here on"), affects=STEP + " record"
    )
    """``_target_``: the task's class by its dotted path; every other key is a parameter of that class."""
    callbacks: list[dict[str, Any]] = key(
        [], resume=FREE, affects=STEP + " record",
        form=", one {...} for each callback: [{_target_: my_module.MyCallback}]",
    )  # fmt: skip
    """List of callbacks, called in this order: ``[{_target_: Ema, decay: 0.999}]``. ``_target_``: the name of one that
    a package adds, such as launcher's own Ema, Profile, MemorySnapshot, GeneratedSamples and Webhook, or the class by
    its dotted path; every other key is an argument of that class."""
    notify: list[str] = key([], affects="", form=": [bell, https://example.org/hook, env:NAME]")
    """Where a message is sent when the run is done, stopped, failed, killed or requeued: ``bell`` (of the terminal in
    which `launch` waits for the run, or `launch top` shows it), an ``https://`` address (a POST, as Slack and
    Mattermost take it; it is stored with the run), ``env:NAME`` (an address in that environment variable, which is not
    stored: a web address, or with samebatch[notify] one of apprise, such as ``mailtos://USER:PASSWORD@HOST``). The
    callback Webhook has more options."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trackers: list[str] = key(["wandb"], affects="")
    """List of the trackers that mirror metrics.jsonl: wandb, and those that installed packages add, such as
    launcher's own tensorboard and mlflow."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    added: dict[str, Any] = field(default_factory=lambda: {name: kind() for name, kind in added_groups().items()})

    def groups(self) -> dict[str, Any]:
        """Return the value of each group by its name, those of other packages (``added``) too."""
        own = {name: value for name, value in vars(self).items() if name != "added"}
        return {**own, **self.added, **own}

    def extension(self, kind: type[Kind]) -> Kind:
        """Return the value of the added group with the dataclass ``kind``."""
        return self.added.get(group_name(kind)) or kind()

    def added_values(self) -> dict[str, dict[str, Any]]:
        return {name: asdict(value) for name, value in self.added.items()}


@cache
def group_kinds() -> dict[str, Any]:
    """Return the type of each group by its name: a dataclass, or that of a group that is a single key."""
    kinds = typing.get_type_hints(Config)
    del kinds["added"]
    return {**kinds, **added_groups(), **kinds}  # an added group cannot replace one of the core


@cache
def facts_by_key() -> dict[str, Facts]:
    """Return the facts of every key, dotted; GROUP.* for the keys of a group that have no field."""
    facts: dict[str, Facts] = {}
    own = {each.name: each for each in fields(Config)}
    for name, kind in group_kinds().items():
        if is_dataclass(kind):
            facts |= {f"{name}.{key_of(each)}": facts_of(each) for each in fields(kind)}
        else:
            facts[name] = facts_of(own[name])
    return facts


@cache
def groups_without_effect() -> tuple[str, ...]:
    """Return "GROUP." for each group whose keys affect nothing in a run, as those of its trackers."""
    kinds = {name: kind for name, kind in group_kinds().items() if is_dataclass(kind)}
    return tuple(f"{name}." for name, kind in kinds.items() if not any(facts_of(each).affects for each in fields(kind)))


def known_keys() -> list[str]:
    """Return every key that a user can set, dotted, and the groups themselves."""
    keys = [each for each in facts_by_key() if not each.endswith(".*")]
    return list(dict.fromkeys(name for each in keys for name in (each.partition(".")[0], each)))


def check_values(config: Config, *groups: str) -> None:
    """Check that each value is within its bound and has an effect.

    Args:
        groups: those to check. Default: all.

    Raises:
        ConfigError: for the first value that is not, or has none.
    """
    for name, group in config.groups().items():
        if not is_dataclass(group) or (groups and name not in groups):
            continue
        for each in fields(group):
            facts, value, key = facts_of(each), getattr(group, each.name), f"{name}.{key_of(each)}"
            if value is None or value is False or value == default_of(each):
                continue
            for condition in facts.only.split():
                _require_effect(config, key, value, condition, facts.hint)
            if facts.bound is not None and not facts.bound.holds(value):
                raise ConfigError(key, value, facts.bound.problem)


def _require_effect(config: Config, key: str, value: Any, condition: str, hint: str) -> None:
    where, _, allowed = condition.partition("=")
    group, _, leaf = where.partition(".")
    part = config.groups()[group]
    chosen, is_custom = getattr(part, leaf or "kind"), getattr(part, "kind", None) == OptimizerKind.custom
    if not allowed and not chosen and not is_custom:  # a custom class may have a default of its own
        raise ConfigError(
            key, value, f"has no effect without {where}.", f"Set {where} too, or leave it out. {hint}".rstrip()
        )
    if allowed and chosen not in allowed.split("|"):
        raise without_effect(key, value, f"{where}={chosen}", f"{where}={' or '.join(allowed.split('|'))}", hint)


def without_effect(key: str, value: Any, chosen: str, needed: str, hint: str = "") -> ConfigError:
    """Return the error of a key that has no effect with the value ``chosen`` of another key, but with ``needed``."""
    remedy = f"It belongs to {needed}: otherwise leave it out (=null). {hint}".rstrip()
    return ConfigError(key, value, f"has no effect with {chosen}.", remedy)
