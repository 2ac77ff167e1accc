"""The root of the configuration: batch sizes, communication, and one field for every section."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from . import observe
from .attention import SparseAttention
from .base import ConfigSection, DType, ExactInt, Int, LogLevel, Size, StepCount, key, section
from .checkpoint import CheckpointOptions
from .compression_training import CompressionTraining, QuantizeTraining
from .data import CurriculumLearning, DataEfficiency, ProgressiveLayerDropping
from .elasticity import Elasticity
from .gradients import Compression
from .inference import HybridEngine
from .local import LocalSGD, UnequalBatches
from .offload import AIO, ActivationOffload, MemoryLimits
from .optimizers import Optimizer
from .parallel import ActivationCheckpointing, ExpertParallel, Pipeline, TensorParallel
from .precision import BF16, FP16, DataTypes, Float8, TorchAutocast
from .schedules import Scheduler
from .tables import NotBuilt, not_built, with_unused_keys
from .tuning import Autotuning, CostBudget
from .zero import ZeroConfig


@with_unused_keys
class Config(ConfigSection):
    """A complete configuration, such as `config.zero_optimization.stage`.

    After `resolve` the three batch keys are integers.
    """

    schema_version: Annotated[Literal[1], ExactInt] = key(
        1, "Version of the defaults, which change only with this number."
    )

    train_batch_size: Int | None = key(None, "Samples per optimizer step over all ranks.", gt=0)
    train_micro_batch_size_per_gpu: Int | None = key(None, "Samples per rank per forward pass.", gt=0)
    gradient_accumulation_steps: Int | None = key(None, "Micro-batches per optimizer step.", gt=0)
    managed_gradient_accumulation: bool = key(
        True,
        "The engine counts micro-batches and takes their mean; false: every step() updates, with the sum of the "
        "gradients (gradient_accumulation_steps is 1 then).",
    )
    sample_seed: Int | None = key(
        None,
        "Set torch's random number generators before each micro-batch from this seed, the step and the micro-batch's "
        "number in the step, and give each micro-batch adjacent samples: dropout then follows samples, not ranks, when "
        "the number of ranks changes and the micro-batch size does not.",
        ge=0,
    )
    dataloader_drop_last: bool = key(False, "The engine's loader drops the last incomplete batch.")
    sequence_parallel_size: Int = key(
        1,
        "Ranks that share one sequence; it divides the number of ranks. Batch sizes count groups of so many ranks, and "
        "ZeRO divides over all of them.",
        ge=1,
    )
    data_parallel_size: Int | None = key(None, "Must be the number of data-parallel ranks.", ge=1)
    use_data_before_expert_parallelism: bool = key(
        False, "Expert-data-parallel groups are adjacent ranks, in place of expert-parallel groups."
    )
    vocabulary_size: Int | None = key(None, "Size of the vocabulary; warns if 8 does not divide it.", gt=0)
    disable_python_gc: bool = key(False, "The engine collects cyclic garbage by itself.")

    optimizer: Optimizer = section(Optimizer, "The optimizer that the engine builds.")
    scheduler: Scheduler = section(Scheduler, "The learning-rate schedule that the engine builds.")
    gradient_clipping: float = key(
        0.0,
        "Largest global L2 norm of the gradient; 0: no clipping.",
        default_note="1.0 in DeepSpeed since 2026-06-23, 0 before",
        ge=0,
    )

    non_finite: Literal["warn", "skip", "stop", "rewind", "ignore"] = key(
        "warn",
        "An infinite or NaN gradient (without loss scaling, which always skips): warn, and update; skip the step; "
        "stop before the update; rewind to the copy in memory (`checkpoint.memory_copies`); do not look. "
        "bf16.check_grad_overflow true is skip.",
    )
    anomaly_watch: observe.AnomalyWatch = section(
        observe.AnomalyWatch, "Loss spikes, gradient norms, and where values become NaN."
    )

    communication_data_type: DType | None = key(None, "Type of gradients on the wire; null: the model's type.")
    prescale_gradients: bool = key(False, "Divide gradients before summing over ranks rather than after.")
    gradient_predivide_factor: float = key(1.0, "Divide by this before summing over ranks and by the rest after.", gt=0)
    gradient_allreduce_op: Literal["mean", "sum"] = key("mean", "Combine gradients of ranks by mean or sum.")
    deterministic_reduce: bool = key(
        False,
        "Sum gradients in rank order on NCCL too, which makes runs repeatable bit by bit. A sum over N ranks takes N "
        "kernels.",
    )
    strict_sync: bool = key(
        False,
        "Compare at each step which layers ranks have used, in which order, and with each collective of shardwise.comm "
        "what they have called; an error if they differ.",
    )
    stall_limit: float = key(
        30.0,
        "Seconds that a collective may wait before all ranks report their state: the log names the missing ranks, "
        "and ranks that wait for each other in different collectives end. 0: never.",
        ge=0,
    )
    allgather_size: Int | None = key(
        None, "Old top-level name.", deprecated_for="zero_optimization.allgather_bucket_size", gt=0
    )
    graph_harvesting: bool = key(False, "Record small kernels of the optimizer as CUDA graphs.")
    comms_logger: observe.CommsLoggerOptions = section(observe.CommsLoggerOptions, "Recording of collectives.")
    compression: Compression = section(Compression, "Lossy compression of gradients.")
    local_sgd: LocalSGD = section(LocalSGD, "Replicas that train on their own between exchanges (DiLoCo).")
    unequal_batches: UnequalBatches = section(UnequalBatches, "Parts of a batch by the speed of ranks.")

    fp16: FP16 = section(FP16, "Half precision.")
    bf16: BF16 = section(BF16, "bfloat16.", names=("bfloat16",))
    amp: Annotated[Any, NotBuilt("amp")] = not_built("amp")
    msamp: Annotated[Any, NotBuilt("msamp")] = not_built("msamp")
    torch_autocast: TorchAutocast = section(TorchAutocast, "torch.autocast.")
    float8: Float8 = section(Float8, "Linear layers in float8.")
    data_types: DataTypes = section(DataTypes, "Types of gradients and buffers.")

    zero_optimization: ZeroConfig = section(
        ZeroConfig, "Sharding. true is a deprecated form of stage 1, false of stage 0."
    )
    aio: AIO = section(AIO, "Disk access, where state lives on a disk.")
    memory_limits: MemoryLimits = section(MemoryLimits, "What may be taken on each tier.")
    memory_budget: Size | None = key(
        None,
        'Most bytes of a rank on its device: `memory_limits.device` under the name that stands next to "auto", which '
        "`zero_optimization.stage`, the devices of offloading and the micro-batch may have: they are chosen within it.",
    )
    cost_budget: CostBudget = section(CostBudget, "What a training may cost.")
    expandable_segments: bool = key(
        True,
        "Where parameters are released between uses: have torch's CUDA allocator use expandable segments in this whole "
        "process, unless `PYTORCH_ALLOC_CONF` or the script has set it.",
    )
    registered_buffers: bool = key(
        False,
        "Allocate buffers of all-gathers and reductions in memory that NCCL has registered, without "
        "`expandable_segments`.",
    )
    activation_checkpointing: ActivationCheckpointing = section(
        ActivationCheckpointing, "Recomputation of activations."
    )
    activation_offload: ActivationOffload = section(ActivationOffload, "Activations on the host.")
    sparse_attention: SparseAttention | None = key(
        None,
        "Block-sparse attention. Models of transformers get it; layers of a script read it "
        "(`shardwise.attention.layout_of`).",
    )
    pipeline: Pipeline = section(Pipeline, "Pipeline parallelism.")
    tensor_parallel: TensorParallel = section(TensorParallel, "Tensor parallelism.")
    expert_parallel: ExpertParallel = section(ExpertParallel, "Expert parallelism.")

    steps_per_print: StepCount | None = key(
        None,
        "Print progress every so many steps; null, 0 or infinity: never.",
        default_note="null in DeepSpeed since 2024-10, 10 before (and in its documentation)",
    )
    wall_clock_breakdown: bool = key(
        False,
        "Print what forward, backward and step take, in the mean of the steps since the last print; without "
        "`steps_per_print` after each step.",
    )
    memory_breakdown: bool = key(
        False,
        "Print what rank 0 holds at the phases of a step, by category, each `steps_per_print` steps or else each step.",
    )
    dump_state: bool = key(False, "Log the effective configuration, with all defaults (rank 0).")
    log_level: LogLevel | None = key(None, "Level of the library's logger; null: as it is.")
    timers: observe.Timers = section(observe.Timers, "Timers.")
    flops_profiler: observe.FlopsProfiler = section(observe.FlopsProfiler, "Floating-point operations.")
    timeline: observe.Timeline = section(observe.Timeline, "A trace of some steps.")
    tensorboard: observe.TensorBoard = section(observe.TensorBoard, "TensorBoard.")
    wandb: observe.WandB = section(observe.WandB, "Weights & Biases.")
    csv_monitor: observe.CSVMonitor = section(observe.CSVMonitor, "CSV files.")
    comet: observe.Comet = section(observe.Comet, "Comet.")
    mlflow: observe.MLflow = section(observe.MLflow, "MLflow.")
    jsonl_monitor: observe.JSONLMonitor = section(observe.JSONLMonitor, "JSON lines.")
    run_log: observe.RunLog = section(
        observe.RunLog, "What a run does, step by step, in files that `shardwise report` draws."
    )
    progress: observe.Progress = section(observe.Progress, "How far training is.")

    checkpoint: CheckpointOptions = section(CheckpointOptions, "Saved state.")
    nebula: Annotated[Any, NotBuilt("nebula")] = not_built("nebula")
    datastates_ckpt: Annotated[Any, NotBuilt("datastates_ckpt", optional=True)] = key(None, "Not built.")

    data_efficiency: DataEfficiency = section(DataEfficiency, "Samples by difficulty or tokens; dropped tokens.")
    curriculum_learning: CurriculumLearning = section(CurriculumLearning, "Sequences that begin short.")
    progressive_layer_drop: ProgressiveLayerDropping = section(ProgressiveLayerDropping, "Layers that are skipped.")
    compression_training: CompressionTraining = section(CompressionTraining, "Quantized and pruned models.")
    weight_quantization: Annotated[Any, NotBuilt("weight_quantization", optional=True)] = key(None, "Not built.")
    quantize_training: QuantizeTraining = section(QuantizeTraining, "Quantized weights (MoQ).")
    eigenvalue: Annotated[Any, NotBuilt("eigenvalue")] = not_built("eigenvalue")

    @property
    def scales_loss(self) -> bool:
        """True if the run computes in fp16, with or without autocast."""
        cast = self.torch_autocast
        return self.fp16.enabled or (cast.enabled and cast.dtype == "fp16")

    @property
    def reactions(self) -> dict[str, str]:
        """What is done about anomalies, by the key that says so."""
        found: dict[str, str] = {"non_finite": self.non_finite}
        watch = self.anomaly_watch
        if watch.enabled:
            found["anomaly_watch.loss_spike"] = watch.loss_spike
            found["anomaly_watch.grad_norm_spike"] = watch.grad_norm_spike
        return found

    @property
    def rewinds(self) -> bool:
        """True if a key requests to rewind after an anomaly."""
        return "rewind" in self.reactions.values()

    @property
    def prints(self) -> bool:
        """True if progress is printed at some step."""
        return bool(self.steps_per_print) and self.steps_per_print != math.inf

    @property
    def compression_methods(self) -> CompressionTraining:
        """`compression_training`, with the weights of `quantize_training`."""
        old = self.quantize_training
        methods = {"weight_quantization": old.method} if old.enabled else {}
        return self.compression_training.model_copy(update=methods)

    elasticity: Elasticity = section(Elasticity, "Batch sizes that stay equal when the number of ranks changes.")
    autotuning: Autotuning = section(Autotuning, "Measured search of stages and batch sizes.")
    hybrid_engine: HybridEngine = section(HybridEngine, "Generation between steps of training.")
    compile: Annotated[Any, NotBuilt("compile")] = not_built("compile")
