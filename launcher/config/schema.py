"""Config schema: one dataclass per group, and under every field its meaning and unit.

Types and defaults are here, values in ``conf/``; Hydra composes them. A default of None is decided by the plan, or
belongs to another option of the group. Null for any other key means its default, or is refused if ambiguous. The plan
extends the groups (plan/run_plan.py). A new key may need a bound (plan/validation.py) and a rule (plan/resumable.py).
"""

from __future__ import annotations

import typing
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from launcher.config.choices import (
    Balance,
    BestMode,
    ClusterKind,
    Compress,
    ContainerRuntime,
    Device,
    Float8Recipe,
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
    Tracker,
)
from launcher.config.run_groups import OuterConfig, RunConfig, SweepConfig
from launcher.config.tracker_groups import MlflowConfig, TensorboardConfig, WandbConfig


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Machines that the job runs on."""

    kind: ClusterKind = ClusterKind.local
    """local: this machine; hosts: several, with the same command typed on each; slurm: a Slurm job; elsewhere: only for
    `launch plan`, which takes it for several hosts if no other cluster is named."""
    nodes: int | str = 1
    """Number of hosts; 1 in a local job. Otherwise also a range, "2:4": the job continues with those present."""
    rendezvous: str | None = None
    """hosts: HOST:PORT of the rendezvous, an address of the first host."""
    interface: str | None = None
    """hosts, slurm: a host's network interface to the others. Default: the one that leads to the first host."""
    workers_per_node: int | None = None
    """Ranks per host. Default: the number of visible GPUs (slurm: of a node of the partition), else 2."""
    device: Device = Device.auto
    """auto: cuda if a GPU is visible (slurm: if the partition has GPUs), else cpu."""
    gpu: str | None = None
    """Only for `launch plan`: GPU of the hosts, such as h100, h200 or a100-40gb, which this machine need not have. The
    plan is for its memory and formats. Names: launcher/plan/gpus.py. Default: what this machine has (slurm: unknown
    memory)."""
    price_per_gpu_hour: float | None = None
    """Price of one rank's device for an hour, in any currency: `launch report` then shows costs."""
    max_restarts: int = 0
    """Restarts of the workers by torchrun after a failure; a training job resumes from its last checkpoint."""
    grace_s: int = 30
    """Seconds that workers have to finish their window and save when the job is stopped."""
    env: list[str] = field(default_factory=list[str])
    """Environment variables that workers get in addition to the usual ones; a trailing * matches any ending."""
    partition: str | None = None
    """slurm: partition. Default: that of the cluster."""
    account: str | None = None
    """slurm: account that is charged."""
    qos: str | None = None
    """slurm: quality of service."""
    time: str | None = None
    """slurm: time limit, "HH:MM:SS" or "D-HH:MM:SS". A longer run is requeued and continues."""
    mem: str | None = None
    """slurm: memory per node, such as "64G"."""
    cpus_per_worker: int | None = None
    """slurm: CPU cores per rank. Default: a node's cores divided by its GPUs; 2 without GPUs."""
    constraint: str | None = None
    """slurm: required features of the nodes."""
    exclude: str | None = None
    """slurm: nodes to exclude."""
    dependency: str | None = None
    """slurm: dependency on other jobs, such as "afterok:1234"."""
    setup: list[str] = field(default_factory=list[str])
    """slurm: shell lines that run on the first node before the job, such as "module load cuda". A command that
    fails ends the job."""
    login: str | None = None
    """slurm: [USER@]HOST of a login node, as ssh knows it: the command copies the project there and runs there
    (docs/guides/laptop.md). train, run, plan, drill and doctor; later commands find the runs."""
    login_dir: str | None = None
    """slurm: directory on the login node for the project and for a relative run.dir. Default: launcher/NAME in the home
    directory, with the name of this directory and a digest of its path."""
    login_setup: list[str] = field(default_factory=list[str])
    """slurm: shell lines after which a login shell on the login node finds `launch`, such as
    "source venv/bin/activate"."""
    container: str | None = None
    """slurm: container image for the job's tasks: the path of a .sif file or an address such as oras://HOST/IMAGE:TAG
    (apptainer), or IMAGE:TAG or the path of a .sqsh file (pyxis)."""
    container_runtime: ContainerRuntime | None = None
    """slurm: what starts the container: pyxis, or apptainer (singularity on nodes that have that instead). Default: by
    the form of the image."""
    sbatch: dict[str, Any] = field(default_factory=dict[str, Any])
    """slurm: any other option of sbatch by its long name; true for an option without a value."""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Distribution of the model over the ranks, and synchronisation of gradients."""

    kind: StrategyKind = StrategyKind.ddp
    """single: one rank; ddp: a full copy of the model on each rank; fsdp: sharded over all ranks; hsdp: sharded over
    shard_size ranks, and replicated; auto: the simplest one that is predicted to fit into memory."""
    sync: Sync = Sync.auto
    """every: synchronise gradients in each micro-batch; boundary: in the last of a window; gather_once (fsdp, hsdp):
    also gather parameters once per window; replicas_at_boundary (hsdp): in each micro-batch within a shard group, at
    the boundary between replicas; auto: of the policies whose predicted memory fits, the one with the fewest wire
    bytes."""
    bucket_mb: float | None = None
    """ddp: size of the gradient buckets, MiB. Default: 25."""
    static_graph: bool = False
    """ddp: DDP's static_graph; only with sync=every."""
    find_unused_parameters: bool = False
    """ddp: DDP's find_unused_parameters; only with sync=every. The gradient of a parameter that no rank uses in a
    window is zero after its first use: momentum and weight decay still change it."""
    compress: Compress = Compress.none
    """ddp: format in which gradients are sent: bf16, or powersgd (low-rank factors, with error feedback); fp16 is
    refused."""
    powersgd_rank: int | None = None
    """powersgd: rank of the factors. Default: 1."""
    powersgd_start: int | None = None
    """powersgd: synchronisations sent uncompressed before compression starts. Default: 10."""
    shard_size: int | None = None
    """hsdp: ranks that share one copy of the model. Default: the workers of one host."""
    recompute: Recompute = Recompute.none
    """blocks: recompute the activations inside the model's repeated blocks in the backward pass."""
    cpu_offload: bool = False
    """fsdp, hsdp on GPUs: keep parameters, gradients and optimizer state in host memory between uses."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the parameters and of the forward and backward passes."""

    kind: PrecisionKind = PrecisionKind.auto
    """fp32, or autocast to bf16 or fp16 (with loss scaling), or float8: bf16, with linear layers whose products are
    computed in float8 by torchao. auto: bf16 if every worker's device computes it without emulation, else fp32; decided
    once for a run."""
    init_scale: float | None = None
    """fp16: first loss scale."""
    reduce_dtype: SumFormat | None = None
    """fsdp, hsdp: format in which gradients are summed between ranks. Default: fp32."""
    growth_interval: int | None = None
    """fp16: steps without overflow after which the scale doubles."""
    parameters: Parameters = Parameters.fp32
    """Trained parameters that model() returns in bf16 or fp16. fp32: convert them; keep: they stay, and their
    gradients and optimizer state have that format too. Frozen parameters stay, except with precision=fp32."""
    tf32: bool = False
    """GPUs: use TF32 for fp32 matrix products and convolutions; it rounds their inputs to 10 mantissa bits."""
    float8_recipe: Float8Recipe | None = None
    """float8: what shares a scale. rowwise_with_gw_hp: the numbers of a token, and the gradient of weights is computed
    in bf16, so that no number depends on the other tokens of a micro-batch; rowwise, tensorwise: faster, and the
    gradient depends on how samples are divided into micro-batches. Default: rowwise_with_gw_hp."""
    float8_exclude: list[str] | None = None
    """float8: regular expressions; a linear layer whose name contains a match stays in bf16. Default: [lora_], the
    adapters of PEFT."""
    float8_emulate: bool = False
    """float8: round to float8 and multiply in fp32, on any device: slow, for tests."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch contract. Any two of the first three keys fix the third; with global_size alone micro_size follows."""

    global_size: int | None = None
    """Samples in one optimizer step, over all ranks. Default: 64."""
    micro_size: int | str | None = None
    """Samples that one rank passes forward and backward at once. auto: the largest that fits into memory, found by
    trying (on_oom=shrink). Default: the largest of 4, 3, 2, 1 that divides a rank's share."""
    accumulation: int | None = None
    """Micro-batches of one rank in one optimizer step."""
    uneven: bool = False
    """If the ranks cannot share global_size in whole micro-batches: true: micro-batches differ by one sample, one
    without a sample has weight zero, and accumulation is rounded up; false: refuse the combination."""
    ramp: list[list[int]] = field(default_factory=list[list[int]])
    """Stages before global_size holds: [[100, 16], [200, 32]] is 100 windows of 16 samples, then 200 of 32. The
    micro-batch stays, accumulation grows."""
    short_window: ShortWindow = ShortWindow.exact
    """A window at the end of an epoch that is not full. exact: use it with its true weight; drop: leave it out."""
    balance: Balance = Balance.none
    """Division of a window's samples into micro-batches. none: in the order of the data; length: by their lengths,
    so that micro-batches hold little padding and ranks finish together. The gradient is the same."""
    on_oom: OnOom = OnOom.stop
    """A rank that runs out of memory. stop: end the run; shrink: all ranks halve the micro-batch, accumulate more of
    them, and repeat the window."""
    norm: Norm = Norm.leave
    """Statistics of a BatchNorm: leave: of one rank's micro-batch; sync: of that micro-batch of all ranks; freeze: the
    running ones, which stay as they are; window: of the whole window, with the gradient of one big batch, at the cost
    of two more passes for each BatchNorm."""


# metadata of a field whose key has another name; "*": all keys of the group that have no field
TARGET, ARGUMENTS = {"key": "_target_"}, {"key": "*"}
# groups whose option `custom` is a class, whose arguments are further keys of the group
WITH_TARGET = ("optimizer", "schedule")


def key_of(field: Field[Any]) -> str:
    """Return the key of a field within its group; "*" for the field that has all other keys."""
    return field.metadata.get("key", field.name)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule. A task's own method optimizer(model) replaces it."""

    kind: OptimizerKind = OptimizerKind.adamw
    """adamw: AdamW; sgd: SGD with momentum; custom: the class that _target_ names."""
    target: str | None = field(default=None, metadata=TARGET)
    """custom: class, such as torch.optim.Adagrad; the group's other keys are its arguments. Implies custom."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any], hash=False, metadata=ARGUMENTS)
    """custom: further arguments of the class."""
    lr: float = 1e-3
    """Learning rate at reference_batch, or at any batch without lr_scaling."""
    weight_decay: float | None = None
    """Decay per step, multiplied by the learning rate. Default: 0; custom: that of the class."""
    betas: list[float] | None = None
    """adamw: decay of the first and second moment."""
    eps: float | None = None
    """adamw: added to the denominator."""
    momentum: float | None = None
    """sgd: momentum."""
    nesterov: bool | None = None
    """sgd: Nesterov's form of it."""
    groups: list[dict[str, Any]] | None = None
    """Parameters with settings of their own, such as [{match: embed, lr: 1e-4}]. match: a regular expression for names,
    or a number of dimensions ("ndim<2"); the first match counts. _target_: another optimizer. Default: no weight decay
    for fewer than two dimensions (biases and norms)."""
    lr_scaling: LrScaling = LrScaling.none
    """k = global/reference. linear: lr k (for SGD: Goyal et al. 2017); sqrt, adamw only: lr sqrt(k), each of betas
    1 - k (1 - beta), eps / sqrt(k) (Malladi et al. 2022); both with schedule.warmup_steps up to that rate."""
    reference_batch: int | None = None
    """Samples: the global batch that lr was tuned for."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over optimizer steps, as a factor of lr; or a task's own method schedule(optimizer, steps)."""

    kind: ScheduleKind = ScheduleKind.cosine
    """constant; cosine or linear: falls from 1 to min_ratio, which it reaches after the last step; custom: _target_."""
    target: str | None = field(default=None, metadata=TARGET)
    """custom: class, such as torch.optim.lr_scheduler.OneCycleLR, stepped after each optimizer step; the group's other
    keys are its arguments (${train.steps}: the run's length). Implies custom."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any], hash=False, metadata=ARGUMENTS)
    """custom: arguments of the class."""
    warmup_steps: int = 0
    """Optimizer steps over which the factor rises to 1."""
    min_ratio: float | None = None
    """cosine, linear: the factor after the last step."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run, reproducibility, evaluation, hang and straggler detection."""

    steps: int | None = None
    """Optimizer steps. Default, without epochs: 300."""
    epochs: int | None = None
    """Passes over the data, instead of steps."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    """A window whose loss or gradient is inf or nan. stop: end the run; skip: leave the window out, without a step, and
    continue; more than 20 in a row end the run. fp16's overflows are not among them."""
    seed: int = 0
    """Seed of the initial parameters, the sample order, dropout, and what the task draws, such as a random split."""
    shuffle: bool = True
    """Read an indexed dataset in another random order each epoch; false: in its own order."""
    deterministic: bool = False
    """Use deterministic kernels only: slower, bitwise repeatable."""
    compile: bool = False
    """torch.compile the model: as a whole; under FSDP and HSDP its shard units one by one; or the modules that the
    task names (compile_units)."""
    log_every: int = 1
    """Optimizer steps between two records."""
    eval_every: int = 0
    """Optimizer steps between two evaluations; 0 or null: once, at the end."""
    eval_micro_size: int | None = None
    """Samples that one rank evaluates at once. Default: batch.micro_size."""
    eval_samples: int | None = None
    """Limit of samples per evaluation and held-out set: the first ones of a stream; of a data set with a length, spread
    evenly over it. The same ones for every world size. Default: all."""
    patience: int | None = None
    """Evaluations in a row without a better value of checkpoint.best after which the run ends; null: never."""
    loader_workers: int = 1
    """Processes per rank that read and collate ahead of the step; 0: in the step's own process."""
    data_shards: int | None = None
    """Shards of a stream that are read in turn: sample k of an epoch is the next one of shard k mod data_shards. Ranks
    whose number divides it read their own shards only. It must divide each window. 1: the stream's own order. Default:
    as many as a Hugging Face stream has, up to 64, if its operations allow it; 1 for other streams."""
    hang_timeout: float | None = 1800.0
    """Seconds without progress after which a rank counts as hanging and the workers are ended, and restarted as after
    any failure. Must exceed the start, any micro-batch, any batch of an evaluation and any checkpoint. null: never."""
    straggler_share: float | None = 0.1
    """Report the slowest rank once it lengthens a step by this share of it; null: never."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints. The last step is always saved, unless enabled is false."""

    enabled: bool = True
    """Save checkpoints."""
    every: int | None = None
    """Optimizer steps between two checkpoints."""
    every_minutes: float | None = None
    """Minutes between two checkpoints. Default, without every: 5; slurm: 10."""
    keep: int | None = None
    """Number of newest checkpoints to keep. Default: all; if every and every_minutes are not set: 3."""
    best: str | None = None
    """Metric of the evaluation, such as eval/accuracy: the checkpoint of the best one so far is saved, if none is
    otherwise due, and kept beside the newest. Default: none."""
    best_mode: BestMode | None = None
    """Better value of that metric: min or max. Default: min for names with loss or perplexity; others need a value."""
    init_from: str | None = None
    """Initial parameters and buffers of a new run: those of another run's newest checkpoint (its name, its directory or
    a prefix of its name), of a checkpoint (.../checkpoints/step_000100), of a safetensors file, or of a directory with
    model.safetensors or its index. Default: those that model() returns."""
    async_save: bool = True
    """Copy the state to host memory and write it while training continues; the last checkpoint is written at once."""
    on_error: OnError = OnError.stop
    """If a checkpoint cannot be written. stop: the run ends as failed; continue: training continues, and the next due
    checkpoint is tried."""


@dataclass(kw_only=True)
class Config:
    """Everything a user can set. A group is frozen: replace it to change one of its keys."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    """``_target_``: the task's class by its dotted path; every other key is a parameter of that class."""
    callbacks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """List of callbacks, called in this order: ``[{_target_: launcher.callbacks.Ema, decay: 0.999}]``. ``_target_``:
    the callback's class by its dotted path; every other key is an argument of that class."""
    notify: list[str] = field(default_factory=list[str])
    """Where a message is sent when the run is done, stopped, failed, killed or requeued: ``bell`` (of the terminal in
    which `launch` waits for the run, or `launch top` shows it), an ``https://`` address (a POST, as Slack and
    Mattermost take it; it is stored with the run), ``env:NAME`` (an address in that environment variable, which is not
    stored: a web address, or with launcher[notify] one of apprise, such as ``mailtos://USER:PASSWORD@HOST``). The
    callback Webhook has more options."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trackers: list[Tracker] = field(default_factory=lambda: [Tracker.wandb])
    """List of the trackers that mirror metrics.jsonl: wandb, tensorboard, mlflow."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


def known_keys() -> list[str]:
    """Return every key that a user can set, dotted, and the groups themselves."""
    keys: list[str] = []
    for name, kind in typing.get_type_hints(Config).items():
        keys.append(name)
        if is_dataclass(kind):
            keys += [f"{name}.{key_of(field)}" for field in fields(kind) if key_of(field) != "*"]
    return keys
