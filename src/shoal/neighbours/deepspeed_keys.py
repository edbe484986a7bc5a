"""What becomes of every key of a DeepSpeed configuration: kept, told, refused, or of an era.

A row of TABLE is: fate | block | keys | words.

    honoured   read into `Settings`; the words name what it is in a run.toml
    told       DeepSpeed itself ignores it, or no number depends on it; the words say why
    refused    what it asks for is not here; the words name the nearest that is
    0.19.8     as refused, and DeepSpeed refuses it too from this version on

`key=value` is harmless at this value, which is what happens without it: then it is told. A block
with `=off` is harmless where its `enabled` is false or missing. `block{…}` has keys of its own.
Keys are those of docs/_pages/config-json.md, which a test holds against this table, and of
deepspeed/runtime/config.py, 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import ConfigError, nearest, short

TABLE = """
honoured | | train_batch_size | train.batch
honoured | | train_micro_batch_size_per_gpu | train.micro_batch
honoured | | gradient_accumulation_steps | train.accumulate
honoured | | optimizer{type params} | optimizer.name, lr, betas, weight_decay
told     | optimizer | legacy_fusion | only which kernels compute
honoured | | scheduler{type params} | optimizer.schedule, warmup_steps
honoured | | gradient_clipping | optimizer.clip
honoured | | communication_data_type | precision.reduce
honoured | | steps_per_print wall_clock_breakdown dataloader_drop_last | the facade's own
honoured | | fp16{enabled} | precision.compute
honoured | fp16 | loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale
         | consecutive_hysteresis | precision.loss_scale; how it moves: the facade's own
told     | fp16 | auto_cast | inputs are cast to what the model computes in
refused  | fp16 | fp16_master_weights_and_grads=false | fp32 masters, memory.offload=optimizer
honoured | | bf16{enabled} | precision.compute
told     | bf16 | check_grad_overflow | steps with non-finite gradients are always skipped
told     | bf16 | immediate_grad_update | when gradients are copied, not what they are
refused  | bf16 | bf16_master_weights_and_grads=false bf16_optimizer_states=false | fp32 masters
honoured | | zero_optimization{stage} | layout.zero, layout.strategy
honoured | zero_optimization | cpu_offload offload_optimizer{device} | memory.offload=optimizer
honoured | zero_optimization | cpu_offload_param offload_param{device} | memory.offload=parameters
told     | zero_optimization.offload_optimizer | nvme_path pin_memory buffer_count pipeline_read
         | pipeline_write fast_init cpuadam_cores_perc | how it is copied; files lie in TMPDIR
refused  | zero_optimization.offload_optimizer | ratio=1 super_offload=false | all of it: ratio = 1
told     | zero_optimization.offload_param | nvme_path pin_memory buffer_count buffer_size
         | max_in_cpu | how it is copied; files lie in TMPDIR
told     | zero_optimization | contiguous_gradients reduce_scatter reduce_bucket_size
         | use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm
         | sub_group_size round_robin_gradients stage3_prefetch_bucket_size prefetch_bucket_size
         | stage3_param_persistence_threshold param_persistence_threshold parameter_alignment
         | stage3_model_persistence_threshold model_persistence_threshold cpu_offload_use_pin_memory
         | stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance legacy_stage1
         | max_reuse_distance stage3_module_granularity_threshold module_granularity_threshold
         | stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params grad_hooks
         | stage3_allgather_sequential allgather_sequential memory_efficient_linear
         | leaf_module{classes names name_suffixes} | buckets and buffers: the plan's own
told     | zero_optimization | log_trace_cache_warnings enable_sanity_checks | logging only
told     | zero_optimization | override_module_apply | weights are initialised before they are cut
told     | zero_optimization | compute_grad_norm | the norm is always computed
told     | zero_optimization | ignore_unused_parameters | one without a gradient stays as it is
told     | zero_optimization | load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint
         | stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
         | stage3_gather_fp16_weights_on_model_save | checkpoints hold fp32 weights for any layout
refused  | zero_optimization | zero_hpz_partition_size=1 | fsdp.reshard=node
refused  | zero_optimization | zero_quantized_weights=false zero_quantized_gradients=false
         | zero_quantized_nontrainable_weights=false | layout.compress=int8 under stage 1 or 2
refused  | zero_optimization | zenflow=null | offload_optimizer
refused  | zero_optimization | save_muon_momentum_buffer_in_memory=false | optimizer.name=muon
0.19.7   | zero_optimization | mics_shard_size=-1 mics_hierarchical_params_gather=false | hsdp
0.19.8   | zero_optimization | zeropp_loco_param=null | layout.compress=int8 under stage 1 or 2
told     | | prescale_gradients gradient_predivide_factor | where the mean is divided
refused  | | gradient_allreduce_op="mean" | mean
refused  | | managed_gradient_accumulation=true | true: step() after every micro-batch
told     | | disable_allgather seq_parallel_communication_data_type vocabulary_size allgather_size
         | use_data_before_expert_parallelism pipeline{stages partition seed_layers
         | activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant} | nothing
         | that is here reads it
told     | | zero_allow_untested_optimizer zero_force_ds_cpu_optimizer | every one is tried out
told     | | dump_state memory_breakdown log_level disable_python_gc timers datastates_ckpt
         | tensorboard{enabled output_path job_name} csv_monitor{enabled output_path job_name}
         | wandb{enabled group team project} comet{enabled workspace project samples_log_interval
         | experiment_name api_key experiment_key online mode} comms_logger{enabled verbose prof_all
         | debug prof_ops} flops_profiler{enabled profile_step module_depth top_modules detailed
         | output_file recompute_fwd_factor} | logging only: train.on, train.trace, shoal report
told     | | autotuning{enabled results_dir exps_dir overwrite metric start_profile_step fast
         | end_profile_step max_train_batch_size min_train_batch_size mp_size tuner_type
         | num_tuning_micro_batch_sizes tuner_early_stopping tuner_num_trials arg_mappings
         | metric_path model_info model_info_path max_train_micro_batch_size_per_gpu
         | min_train_micro_batch_size_per_gpu} | only DeepSpeed's launcher reads it: shoal plan
refused  | | data_types{grad_accum_dtype=null grad_accum_dtype="fp32" param_dtype=null
         | buffer_dtype=null keep_in_fp32_modules="auto"} | fp32, in which gradients are added up
refused  | | torch_autocast=off{enabled dtype lower_precision_safe_modules} | bf16.enabled = true
told     | | activation_checkpointing{partition_activations cpu_checkpointing number_checkpoints
         | contiguous_memory_optimization synchronize_checkpoint_boundary profile} | only a model
         | that calls deepspeed.checkpointing reads it; for any model: memory.recompute
told     | | aio{block_size queue_depth thread_count intra_op_parallelism single_submit
         | overlap_events use_gds} | files are mapped, and the system reads ahead
refused  | | tensor_parallel=off{autotp_size preset_model tp_overlap_comm partition_config
         | use_default_specs layer_specs patterns partition_type shape partition_dim model_types
         | tensor_parallel tp tp_size dtype vocab_parallel_lm_head vocab_parallel_ce_backend
         | injection_policy_tuple} | layout.tp of a run.toml
refused  | | sequence_parallel_size=1 | layout.cp of a run.toml
refused  | | expert_parallel=off{enabled autoep_size expert_tensor_parallel_size preset_model
         | use_grouped_mm disable_triton_grouped_mm moe_layer_pattern router_pattern expert_pattern
         | score_func score_apply route_norm route_scale top_k routed_scaling_factor
         | num_expert_groups num_limited_groups load_balance_coeff expert_w1 expert_w2 expert_w3
         | num_experts_attr top_k_attr has_shared_experts shared_experts_pattern} | layout.ep of a
         | run.toml
refused  | | hybrid_engine=off{enabled max_out_tokens inference_tp_size release_inference_cache
         | pin_parameters tp_gather_partition_size enable_cuda_graph} | shoal sample
refused  | | weight_quantization=null | bf16.enabled = true
refused  | | compile=off{deepcompile passes offload_activation offload_activation_pin_memory
         | autoep_non_moe free_activation free_activation_threshold offload_opt_states double_buffer
         | symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce
         | sync_before_allgather sync_after_allgather keep_int_input_tensors
         | keep_all_input_tensors} | train.compile=blocks
told     | | checkpoint{tag_validation load_universal writer parallel_write{pipeline_stage}} | any
         | layout loads any checkpoint
refused  | checkpoint | use_node_local_storage=false | false, or checkpoint.remote
refused  | | data_efficiency=off{enabled seed data_routing data_sampling} | mix: in data.source
0.19.8   | | curriculum_learning=off{enabled curriculum_type min_difficulty max_difficulty
         | schedule_type schedule_config params} | runs one after the other, by data.sequence
0.19.8   | | sparse_gradients=false | false: they travel dense
0.19.8   | | amp=off | bf16.enabled = true
0.19.7   | | sparse_attention=null | an attention of the model's own
0.19.7   | | compression_training=null quantize_training=off | a tool for trained weights
0.19.8   | | eigenvalue=off progressive_layer_drop=off | a model that does so itself
0.19.8   | | elasticity=off{enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus
         | min_time prefer_large_batch prefer_larger_batch version ignore_non_elastic_batch_info
         | num_gpus_per_node model_parallel_size} | train_batch_size: any layout resumes any
0.19.7   | | nebula=off | checkpoint.remote
0.19.8   | | graph_harvesting=false | train.compile=blocks
"""


@dataclass(frozen=True)
class Key:
    """One key's row: its fate, the words beside it, and the values (as JSON) that are harmless."""

    fate: str
    words: str
    harmless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What becomes of one key that a user wrote: its path, its value, its row's fate and words."""

    path: str
    value: Any
    fate: str
    words: str


def keys() -> dict[str, Key]:
    """Read TABLE. Gives a key's whole path, as `zero_optimization.stage`, → its row."""
    found: dict[str, Key] = {}
    for row in TABLE.replace("\n         |", "").strip().splitlines():
        fate, block, names, words = (" ".join(part.split()) for part in row.split("|"))
        path, inside = block, [f"{block}." if block else ""]
        for name in names.replace("{", " { ").replace("}", " } ").split():
            if name == "{":
                inside.append(f"{path}.")
            elif name == "}":
                inside.pop()
            else:
                key, _, harmless = name.partition("=")
                path = f"{inside[-1]}{key}"
                before = found[path].harmless if path in found else ()
                found[path] = Key(fate, words, (*before, harmless) if harmless else before)
    return found


def version(text: str) -> tuple[int, ...]:
    """Read a version's numbers.

    >>> version("0.19.8+cu130"), version("")
    ((0, 19, 8), ())
    """
    numbers = text.partition("+")[0].split(".")
    return tuple(int(one) for one in numbers if one.isdecimal())


@dataclass(frozen=True)
class Judge:
    """Looks keys up: `judge(config)` gives a verdict on each.

    era   DeepSpeed's version, as (0, 19, 8); () not known · where  the file, for messages
    """

    era: tuple[int, ...]
    where: str
    table: Mapping[str, Key]

    def __call__(
        self, block: Mapping[str, Any], inside: str = "", *, off: bool = False
    ) -> Iterator[Verdict]:
        """Gives a verdict per key; `off`: of a block that is switched off, whatever it holds.

        Errors   ConfigError for a key that nobody knows, with the nearest, and for a refused one
        """
        for name, value in block.items():
            path = f"{inside}{name}"
            key = self.table.get(path)
            if key is None:
                raise ConfigError(f"{self.where}: {short(path)}: no such key{self._hint(path)}")
            gone = version(key.fate)
            if gone and self.era >= gone:
                raise ConfigError(
                    f"{self.where}: {path} = {shown(value)}: DeepSpeed {key.fate} took it "
                    f"away; nearest: leave it out, or {key.words}"
                )
            own = any(one.startswith(f"{path}.") for one in self.table)
            nested = own and isinstance(value, Mapping)
            if gone or key.fate == "refused":
                if not off and not _harmless(value, key, nested=nested):
                    raise ConfigError(
                        f"{self.where}: {path} = {shown(value)}: is not here; nearest: {key.words}"
                    )
                yield Verdict(path, value, "told", "is as without it")
            else:
                yield Verdict(path, value, key.fate, key.words)
            if nested:
                yield from self(value, f"{path}.", off=off or "off" in key.harmless)

    def _hint(self, path: str) -> str:
        """The nearest spelling in the same block, else the block in which the name is one."""
        inside, dot, name = path.rpartition(".")
        here = [x[len(inside + dot) :] for x in self.table if x.startswith(inside + dot)]
        if close := nearest(name, [one for one in here if "." not in one]):
            return f"; nearest: {inside}{dot}{close}"
        elsewhere = [one for one in self.table if one.rpartition(".")[2] == name]
        return f"; nearest: {elsewhere[0]}" if elsewhere else ", here or in DeepSpeed"


def _harmless(value: Any, key: Key, *, nested: bool) -> bool:
    if "off" in key.harmless and isinstance(value, Mapping):
        switches = (value.get("enabled"), value.get("deepcompile"), value.get("autotp_size"))
        return all(
            one in (None, False, "auto") or (one == 1 and one is not True) for one in switches
        )
    if not key.harmless and nested:  # its own keys decide
        return True
    plain = (json.loads(one) for one in key.harmless if one != "off")
    return not value or value == "auto" if "off" in key.harmless else value in ("auto", *plain)


def shown(value: Any) -> str:
    """A value as it stands in JSON, cut where it is long."""
    return short(json.dumps(value, default=str))
