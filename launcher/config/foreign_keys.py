"""Names that other trainers have for a setting, with the key to write here.

Sources: Accelerate, DeepSpeed, Lightning, Megatron, torchrun, torchtitan, transformers and Slurm.
"""

from __future__ import annotations

import re

# what to write -> names, without what stands before the last dot
_NAMES = {
    "Write batch.global_size=N, the samples of an optimizer step: accumulation follows from it, batch.micro_size "
    "and the ranks. To fix it: batch.accumulation=K.": (
        "gradient_accumulation_steps accumulate_grad_batches gradient_accumulation grad_accum grad_accum_steps "
        "accumulation_steps gradient_accumulation_fusion iter_size"
    ),
    "Write batch.global_size=N, the samples of an optimizer step on all ranks.": (
        "train_batch_size global_batch_size effective_batch_size effective_batch total_batch_size"
    ),
    "Write batch.micro_size=N: samples of one rank in one forward pass. batch.global_size is that of all in a step.": (
        "per_device_train_batch_size train_micro_batch_size_per_gpu micro_batch_size local_batch_size batch_size "
        "device_train_microbatch_size per_gpu_train_batch_size"
    ),
    "Write train.eval_micro_size=N.": "per_device_eval_batch_size eval_batch_size",
    "Write train.steps=N.": "max_steps train_iters max_iters num_steps total_steps num_training_steps max_duration",
    "Write train.epochs=N.": "num_train_epochs max_epochs num_epochs n_epochs",
    "Write optimizer.lr=X.": "learning_rate lr base_lr",
    "Write optimizer.weight_decay=X.": "wd decay",
    "Write optimizer.betas=[B1,B2].": "adam_beta1 adam_beta2 beta1 beta2",
    "Write optimizer.eps=X.": "adam_epsilon epsilon",
    "Write optimizer=adamw, or optimizer._target_=MODULE.CLASS.": "optim",
    "Write schedule=cosine, linear, wsd or constant, or schedule._target_=MODULE.FUNCTION.": (
        "lr_scheduler_type lr_scheduler lr_decay_style decay_type"
    ),
    "Write schedule.warmup_steps=N.": "warmup_steps num_warmup_steps lr_warmup_iters",
    "Write schedule.warmup_steps=N, a count of steps and not a share of them.": "warmup_ratio warmup_fraction",
    "Write train.clip_norm=X.": "max_grad_norm gradient_clip_val gradient_clipping clip_grad max_norm grad_clip",
    "Write precision=fp16, bf16 or fp32.": (
        "fp16 bf16 mixed_precision amp use_amp half_precision mixed_precision_param autocast dtype torch_dtype"
    ),
    "Write precision.reduce_dtype=fp32.": "mixed_precision_reduce grad_reduce_dtype",
    "Write strategy=fsdp (parameters, gradients and optimizer state sharded), hsdp or ddp.": (
        "fsdp zero_optimization zero_stage deepspeed sharding_strategy fsdp_sharding_strategy sharded_ddp fsdp_config "
        "data_parallel_shard_degree use_distributed_optimizer"
    ),
    "Write strategy=hsdp strategy.shard_size=N: ranks of a group that shards; groups replicate.": (
        "data_parallel_replicate_degree hybrid_shard"
    ),
    "Write strategy.cpu_offload=true.": "offload_optimizer offload_param fsdp_offload_params cpu_offload",
    "Write strategy.recompute=blocks.": (
        "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_activations"
    ),
    "Write strategy.find_unused_parameters=true.": "ddp_find_unused_parameters find_unused_parameters",
    "Write strategy.bucket_mb=N.": "ddp_bucket_cap_mb bucket_cap_mb",
    "Leave it out: strategy.sync says when gradients are synchronised, and strategy=auto chooses.": (
        "no_sync sync_each_batch sync_gradients overlap_grad_reduce backward_prefetch reshard_after_forward"
    ),
    "The launcher has data parallelism only: strategy=ddp, fsdp or hsdp.": (
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size tp "
        "pipeline_parallel pipeline_parallel_degree pipeline_model_parallel_size pp_size pp context_parallel "
        "context_parallel_degree context_parallel_size cp_size expert_parallel expert_parallel_degree ep_size"
    ),
    "Write cluster.workers_per_node=N (processes of a host) and cluster.nodes=N (hosts).": (
        "nproc_per_node num_processes devices num_gpus gpus ngpus gpus_per_node ntasks_per_node nnodes num_nodes "
        "num_machines world_size"
    ),
    "Write cluster.device=cuda or cpu.": "accelerator use_cpu no_cuda",
    "Write cluster.sbatch.NAME=VALUE for an option of sbatch that has no key.": "ntasks gres",
    "Write cluster.cpus_per_worker=N.": "cpus_per_task",
    "Write cluster.max_restarts=N.": "max_restarts",
    "Leave it out: the launcher chooses a free port; cluster.interface names the network.": (
        "master_port master_addr main_process_port main_process_ip rdzv_backend rdzv_endpoint rdzv_id"
    ),
    "Use `launch resume RUN`; weights of another run: checkpoint.init_from=RUN.": (
        "resume_from_checkpoint resume ckpt_path load_checkpoint load resume_from"
    ),
    "Write checkpoint.every=N, in optimizer steps, or checkpoint.every=epoch.": (
        "save_steps save_interval checkpointing_steps save_strategy every_n_train_steps every_n_epochs save_every_epoch"
    ),
    "Write checkpoint.keep=N.": "save_total_limit save_top_k keep_latest_k",
    "Write checkpoint.best=METRIC.": "metric_for_best_model load_best_model_at_end monitor",
    "Write train.patience=N.": "early_stopping_patience early_stopping",
    "Write train.eval_every=N, in optimizer steps, or train.eval_every=epoch.": (
        "eval_steps eval_interval eval_strategy evaluation_strategy val_check_interval check_val_every_n_epoch"
    ),
    "Write train.log_every=N.": "logging_steps log_interval log_freq log_every_n_steps",
    "Write trackers=[wandb].": "report_to log_with logger with_tracking use_wandb",
    "Write run.dir=DIR.": "output_dir default_root_dir dump_folder save_dir logging_dir work_dir",
    "Write run.name=NAME.": "run_name experiment_name exp_name",
    "Write train.seed=N.": "seed manual_seed random_seed",
    "Write train.deterministic=true.": "full_determinism deterministic_algorithms",
    "Write train.compile=true.": "torch_compile compile use_compile",
    "Write train.loader_workers=N.": "dataloader_num_workers num_workers num_data_workers",
    "Write batch.norm=sync.": "sync_batchnorm sync_bn",
    "Write batch.balance=length.": "group_by_length length_grouped",
    "Write batch.on_oom=shrink.": "auto_find_batch_size auto_scale_batch_size find_executable_batch_size",
    "A model and its data belong to a task: task=NAME task.ARGUMENT=VALUE (`launch keys task=NAME`).": (
        "model_name_or_path model_name model dataset_name dataset seq_len block_size max_seq_length"
    ),
}
_REMEDIES = {name: remedy for remedy, names in _NAMES.items() for name in names.split()}


def translation(name: str) -> str:
    """Return what to write in place of another trainer's ``name`` (``training.max_steps``, ``--max-steps``, ``max
    steps``); "" if it is not known."""
    return _REMEDIES.get(re.sub(r"[ -]", "_", name.strip("-+~").rpartition(".")[2]).lower(), "")
