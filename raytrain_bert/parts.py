"""Everything that the loop of one worker works with, and how it is put together."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from raytrain_bert import parallel, runtime
from raytrain_bert.batching import plan
from raytrain_bert.batching.collate import TokenRows
from raytrain_bert.checkpoint import CheckpointStore
from raytrain_bert.config.schema import Config
from raytrain_bert.data.split import SPLITS
from raytrain_bert.job import DATASET, Job
from raytrain_bert.model.build import accepts_token_types, build_model, load_tokenizer
from raytrain_bert.model.layers import parameter_depth
from raytrain_bert.optim import build_optimizer, build_schedule, settings_in
from raytrain_bert.pulse import Pulse
from raytrain_bert.receipt import Receipt
from raytrain_bert.run_folder import RunFolder

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS_PER_MICRO_BATCH = {"cpu": 4096, "cuda": 16384}
ROWS_NAMED = 8


@dataclass(frozen=True)
class Origins:
    """Where each row came from, to name it in a message."""

    files: tuple[str, ...]
    file: NDArray[np.integer]
    """Number of the file of each row, (rows,)."""
    row: NDArray[np.integer]
    """Number of each row in its file, (rows,)."""

    def told(self, positions: NDArray[np.integer]) -> str:
        """Files and rows, the first few of many."""
        names = []
        for position in positions[:ROWS_NAMED].tolist():
            names.append(f"{Path(self.files[int(self.file[position])]).name} row {int(self.row[position])}")
        more = len(positions) - len(names)
        return ", ".join(names) + (f" and {more} more" if more > 0 else "")


@dataclass
class Parts:
    """Everything that the loop works with."""

    job: Job
    config: Config
    rank: int
    world_size: int
    device: torch.device
    precision: str
    rows: TokenRows
    origins: Origins | None
    splits: dict[str, NDArray[np.int64]]
    """Positions in `rows` of each split's rows."""
    module: PreTrainedModel
    """The model as it is."""
    model: nn.Module
    """The model as it is called in training: wrapped for data parallel training."""
    tokenizer: Any
    pad_token_id: int
    token_type_ids: bool
    class_weights: Tensor | None
    """Weight of each class in the training loss, (classes,) float32; None for all alike."""
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    store: CheckpointStore
    receipt: Receipt
    pulse: Pulse
    tokens_per_micro_batch: int
    steps_per_epoch: int
    total_steps: int
    """Length of the learning-rate schedule."""
    last_step: int
    """The step that training ends with, unless it stops earlier."""
    largest_micro_batch: int = 0
    """Tokens, padding included, of the largest micro batch so far."""

    def post(self, kind: str, **fields: Any) -> None:
        """Tell the driver, from rank 0."""
        if self.rank == 0:
            self.job.board.post([{"event": kind, **fields}])

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast in the run's precision."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, AUTOCAST[self.precision])


def device_of(job: Job) -> torch.device:
    """The one device of this worker; Ray lets all workers of a node see all its GPUs."""
    if not job.use_gpu:
        return torch.device("cpu")
    from ray.train.torch import get_device

    device: torch.device = get_device()
    torch.cuda.set_device(device)
    return device


def load_rows(files: tuple[str, ...]) -> tuple[TokenRows, dict[str, NDArray[np.int64]], Origins]:
    """Token rows out of the node's object store, the positions of each split's rows, and where the rows came from."""
    import pyarrow as pa
    import ray
    import ray.train

    # Blocks as they lie in shared memory: no copy, whatever the number of workers on the node.
    blocks = ray.get(ray.train.get_dataset_shard(DATASET).materialize().to_arrow_refs())
    table = pa.concat_tables(blocks)
    split = table["split"].to_numpy()
    origins = Origins(files, table["file"].to_numpy(), table["row"].to_numpy())
    return TokenRows(table), {name: np.flatnonzero(split == number) for name, number in SPLITS.items()}, origins


def build_parts(
    job: Job,
    device: torch.device,
    rows: TokenRows,
    splits: dict[str, NDArray[np.int64]],
    origins: Origins | None = None,
) -> Parts:
    """Load model and optimizer on this rank."""
    config = job.config
    torch.set_num_threads(job.threads)
    if job.on_validation_too:
        splits = splits | {"train": np.sort(np.concatenate([splits["train"], splits["validation"]]))}
    use_deterministic_kernels(config.train.deterministic)
    rank, world_size = parallel.rank_and_world_size()
    tokenizer = load_tokenizer(config.model)
    module = build_model(config.model, job.label_names, seed=config.train.seed)
    model = parallel.parallelize(module, device, compile_model=config.model.compile)
    optimizer = build_optimizer(module.named_parameters(), parameter_depth(module), config.optim)
    steps_per_epoch = plan.num_steps(len(splits["train"]), config.train.global_batch_size)
    total_steps = steps_per_epoch * config.train.num_epochs
    if config.train.max_steps is not None:
        total_steps = min(total_steps, config.train.max_steps)
    last_step = total_steps
    if job.stop_after_epochs is not None:
        last_step = min(total_steps, max(1, round(job.stop_after_epochs * steps_per_epoch)))
    precision = parallel.broadcast(runtime.choose_precision(config.train.precision, device.type))
    weights = None if job.class_weights is None else torch.tensor(job.class_weights, device=device)
    parts = Parts(
        job=job,
        config=config,
        rank=rank,
        world_size=world_size,
        device=device,
        precision=precision,
        rows=rows,
        origins=origins,
        splits=splits,
        module=module,
        model=model,
        tokenizer=tokenizer,
        pad_token_id=tokenizer.pad_token_id,
        token_type_ids=accepts_token_types(module, tokenizer),
        class_weights=weights,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.optim, total_steps),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        store=CheckpointStore(
            Path(job.run_folder) / "checkpoints",
            config.checkpoint.num_to_keep,
            background=config.checkpoint.background,
            timeout=timedelta(minutes=config.scaling.timeout_minutes),
            noted=RunFolder(Path(job.run_folder)).last_checkpoint,
        ),
        receipt=Receipt(len(splits["train"]), rank, world_size, device),
        pulse=Pulse(job.board.for_signs(), rank),
        tokens_per_micro_batch=config.train.tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH[device.type],
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        last_step=last_step,
    )
    post_ready(parts)
    return parts


def use_deterministic_kernels(wanted: bool) -> None:
    """Let PyTorch choose kernels that give the same bits every time, or raise where it has none."""
    if wanted:
        # cuBLAS reads it when it is first used (NVIDIA, "Results reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(wanted)


def post_ready(parts: Parts) -> None:
    """Say what the workers are and what lies before them."""
    mine = {"rank": parts.rank, "host": socket.gethostname(), "pid": os.getpid(), "node": node_id()}
    workers = [mine]
    if dist.is_initialized():
        workers = [mine] * parts.world_size
        dist.all_gather_object(workers, mine)
    trainable = sum(p.numel() for p in parts.module.parameters() if p.requires_grad)
    parts.post(
        "ready",
        device=torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else "CPU",
        world_size=parts.world_size,
        workers=workers,
        effective=effective_settings(parts),
        threads=torch.get_num_threads(),
        precision=parts.precision,
        parameters=sum(p.numel() for p in parts.module.parameters()),
        trainable_parameters=trainable,
        tokens_per_micro_batch=parts.tokens_per_micro_batch,
        steps_per_epoch=parts.steps_per_epoch,
        total_steps=parts.last_step,
        global_batch_size=parts.config.train.global_batch_size,
    )


def effective_settings(parts: Parts) -> dict[str, Any]:
    """Settings by dotted key: of the live optimizer and model where they can be read there, else as this worker has it.

    A head_learning_rate that was left open is that of the rest.
    """
    found: dict[str, Any] = {
        key: value
        for section, settings in parts.config.model_dump(mode="json").items()
        if section in ("data", "model", "optim", "train")
        for key, value in ((f"{section}.{name}", value) for name, value in settings.items())
    }
    live: dict[str, Any] = dict(settings_in(parts.optimizer))
    dropouts = {module.p for module in parts.module.modules() if isinstance(module, nn.Dropout)}
    if parts.config.model.dropout is not None and len(dropouts) == 1:
        live["model.dropout"] = dropouts.pop()
    return found | live


def node_id() -> str | None:
    """Ray's name of this machine; None outside of Ray."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None
