"""Elasticity, autotuning, hybrid engine, compiler."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from .base import ConfigSection, Int, Ints, as_list, key, section


class Elasticity(ConfigSection):
    """`elasticity`: batch sizes that fit many numbers of ranks."""

    enabled: bool = key(False, "Choose the batch size from the number of ranks.")
    max_train_batch_size: Int = key(2000, "Largest global batch.", gt=0)
    micro_batch_sizes: Ints = key([2, 4, 6], "Micro-batch sizes to choose from.")
    min_gpus: Int = key(1, "Fewest ranks.", ge=1)
    max_gpus: Int = key(10_000, "Most ranks.", ge=1)
    min_time: Int = key(0, "Shortest run in minutes: a hint to the scheduler.", ge=0)
    prefer_larger_batch: bool = key(True, "Prefer larger global batches.", names=("prefer_large_batch",))
    ignore_non_elastic_batch_info: bool = key(False, "Ignore the three batch keys instead of refusing them.")
    version: float = key(0.2, "Version of the rules: 0.1 or 0.2.")
    num_gpus_per_node: Int = key(1, "Ranks per node.", ge=1)
    model_parallel_size: Int = key(1, "Ranks that share one model copy.", ge=1)


class ModelInfo(ConfigSection):
    """`autotuning.model_info`."""

    profile: bool = key(False, "Write facts about the model and stop.")
    num_params: Int | None = key(None, "Parameters.", gt=0)
    hidden_size: Int | None = key(None, "Hidden size.", gt=0)
    num_layers: Int | None = key(None, "Layers.", gt=0)


class Autotuning(ConfigSection):
    """`autotuning`: search of stage, micro-batch and bucket sizes."""

    enabled: bool = key(False, "Search.")
    fast: bool = key(True, "Search only stage and micro-batch.")
    results_dir: str | None = key(None, "Directory of results; null: autotuning_results.", min_length=1)
    exps_dir: str | None = key(None, "Directory of trials; null: autotuning_exps.", min_length=1)
    overwrite: bool = key(
        False,
        "Overwrite earlier results.",
        default_note="DeepSpeed's documentation says false, its code true; results are kept by default",
    )
    num_nodes: Int | None = key(None, "Nodes to use; null: all.", gt=0)
    num_gpus: Int | None = key(None, "Devices per node to use; null: all.", gt=0)
    start_profile_step: Int = key(3, "First measured step.", ge=0)
    end_profile_step: Int = key(5, "Last measured step.", ge=0)
    metric: Literal["throughput", "latency", "flops"] = key("throughput", "What is optimised.")
    metric_path: str | None = key(None, "File of a trial's result.")
    tuner_type: Literal["gridsearch", "random", "model_based"] = key("gridsearch", "Search method.")
    tuner_early_stopping: Int = key(5, "Trials without progress after which the search ends.", gt=0)
    tuner_num_trials: Int = key(50, "Most trials.", gt=0)
    arg_mappings: dict[str, Any] | None = key(
        None, "Command-line flags that repeat configuration keys.", free_form=True
    )
    max_train_batch_size: Int | None = key(None, "Largest global batch.", gt=0)
    min_train_batch_size: Int = key(1, "Smallest global batch.", gt=0)
    max_train_micro_batch_size_per_gpu: Int = key(1024, "Largest micro-batch.", gt=0)
    min_train_micro_batch_size_per_gpu: Int = key(1, "Smallest micro-batch.", gt=0)
    num_tuning_micro_batch_sizes: Int = key(3, "Micro-batch sizes that are tried.", gt=0)
    mp_size: Int = key(1, "Model-parallel degree.", ge=1)
    model_info: ModelInfo = section(ModelInfo, "Facts about the model.")
    model_info_path: str | None = key(None, "File of facts about the model.")


class HybridEngine(ConfigSection):
    """`hybrid_engine`: training and generation in one engine."""

    enabled: bool = key(False, "Use it.")
    max_out_tokens: Int = key(512, "Most tokens of an answer.", gt=0)
    inference_tp_size: Int = key(1, "Tensor-parallel degree of generation.", ge=1)
    release_inference_cache: bool = key(False, "Free the cache after generation.")
    pin_parameters: bool = key(True, "Page-lock parameters for generation.")
    tp_gather_partition_size: Int = key(8, "Layers gathered at a time.", gt=0)
    enable_cuda_graph: bool = key(False, "Record CUDA graphs.")


class Compile(ConfigSection):
    """`compile`: compiler passes around collectives."""

    deepcompile: bool = key(False, "Use the passes.")
    passes: Annotated[list[Literal["z1", "z3", "autosp", "autotp"]], BeforeValidator(as_list)] | None = key(
        None, "Passes to run; null: those of the stage."
    )
    free_activation: bool = key(False, "Free large activations early.")
    free_activation_threshold: Int = key(10_485_760, "Bytes from which an activation is large.", ge=0)
    offload_activation: bool = key(False, "Move activations to the host.")
    offload_activation_pin_memory: bool = key(True, "Page-lock the host memory of activations.")
    offload_opt_states: bool = key(False, "Move optimizer state to the host.")
    offload_parameters: bool = key(False, "Move parameters to the host.")
    double_buffer: bool = key(True, "Two buffers for reductions.")
    symmetric_memory: bool = key(False, "Use symmetric memory.")
    debug_log: bool = key(False, "Write logs of the passes.")
    sync_before_reduce: bool = key(False, "Synchronize before a reduction.")
    sync_after_reduce: bool = key(False, "Synchronize after a reduction.")
    sync_before_allgather: bool = key(False, "Synchronize before a gather.")
    sync_after_allgather: bool = key(False, "Synchronize after a gather.")
    keep_int_input_tensors: bool = key(True, "Keep integer inputs alive.")
    keep_all_input_tensors: bool = key(False, "Keep all inputs alive.")
    autoep_non_moe: bool = key(False, "Compile the layers around distributed experts.")
