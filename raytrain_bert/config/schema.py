"""Every setting of a run: a frozen tree; each field says what it means, with its unit."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

BUNDLED_DATA = "bundled:bbc_news"
BUNDLED_MODEL = "bundled:all-minilm-l6-v2"


def _as_list(value: Any) -> Any:
    """Let one path stand for a list of one."""
    return [value] if isinstance(value, str) else value


def _without_credentials(paths: list[str]) -> list[str]:
    """A path is stored with the run and shown: no place for a secret."""
    for path in paths:
        if re.search(r"://[^/@]*:[^/@]*@|[?&][^=]*(secret|token|password)[^=]*=", path, re.IGNORECASE):
            raise ValueError("holds credentials, which would be stored; give them by the environment")
    return paths


Paths = Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1), AfterValidator(_without_credentials)]


def _as_class_weights(value: Any) -> Any:
    """balanced, a mapping, or label=weight,label=weight as on the command line."""
    if value is None or value == "balanced":
        return value
    if isinstance(value, str):
        pieces = [piece.rpartition("=") for piece in value.split(",")]
        if not all(equals for _, equals, _ in pieces):
            raise ValueError(f"balanced, or LABEL=WEIGHT,LABEL=WEIGHT is expected, not {value!r}")
        value = {label.strip(): weight for label, _, weight in pieces}
    if not isinstance(value, dict):
        raise ValueError(f"balanced, or a weight for each label is expected, not {value!r}")
    weights = {}
    for label, given in value.items():
        try:
            weight = float(given)
        except (TypeError, ValueError):
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of {label} must be a positive number, not {given!r}")
        weights[str(label)] = weight
    return weights


def _as_num_workers(value: Any) -> Any:
    """A number, or MIN..MAX for elastic training."""
    if isinstance(value, str) and ".." in value:
        low, _, high = value.partition("..")
        if not (low.strip().isdigit() and high.strip().isdigit() and 1 <= int(low) < int(high)):
            raise ValueError(f"MIN..MAX needs two numbers with 1 <= MIN < MAX, not {value!r}")
        return f"{int(low)}..{int(high)}"
    if value is None:
        return value
    try:
        number = int(str(value))
    except ValueError:
        raise ValueError(f"a number or MIN..MAX is expected, not {value!r}") from None
    if number < 0:
        raise ValueError(f"must be at least 0, not {number}")
    return number


ClassWeights = Annotated[Literal["balanced"] | dict[str, float] | None, BeforeValidator(_as_class_weights)]
NumWorkers = Annotated[int | str | None, BeforeValidator(_as_num_workers)]


class Settings(BaseModel):
    """Base of all settings: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class DataConfig(Settings):
    """Where the labelled text is and how it is read."""

    train: Paths = Field(
        [BUNDLED_DATA],
        description="Training data: a file, a folder, a folder per class, a glob, a URI, a saved Hugging Face "
        "dataset, hf:HUB_NAME, or bundled:bbc_news. Give it more than once for many.",
    )
    validation: Paths | None = Field(
        None, description="Validation data; None takes validation_fraction of the training data."
    )
    test: Paths | None = Field(None, description="Test data; None takes test_fraction of the training data.")
    format: Literal["auto", "csv", "tsv", "jsonl", "json", "parquet", "folder", "hf"] = Field(
        "auto", description="Format of the files; auto goes by name and content."
    )
    text_column: str | None = Field(None, description="Column with the text; a number counts from 0. None: found out.")
    text_pair_column: str | None = Field(None, description="Column with the second text of a pair. None: found out.")
    label_column: str | None = Field(
        None, description="Column with the label; a number counts from 0. None: found out."
    )
    delimiter: str | None = Field(
        None, description="Character between columns of a text table (\\t for a tabulator). None: found out."
    )
    encoding: str | None = Field(None, description="Encoding of text files, for example utf-8. None: found out.")
    header: bool | None = Field(
        None, description="Whether the first line of a text table names the columns. None: found out."
    )
    quoting: bool | None = Field(
        None, description='Whether " quotes a field (false: an ordinary character). None: found out.'
    )
    subset: str | None = Field(None, description="Configuration name of a Hugging Face hub dataset.")
    labels: list[str] | None = Field(
        None,
        description="Label names in the order of their ids. None: all labels of the training data, sorted.",
    )
    validation_fraction: float = Field(
        0.1, gt=0, lt=1, description="Share of the training rows held out for validation."
    )
    test_fraction: float = Field(
        0.1, ge=0, lt=1, description="Share of the training rows held out for the test; 0 for none."
    )
    split_seed: int = Field(0, ge=0, description="Seed of the stratified split.")
    max_length: int | None = Field(
        None,
        ge=8,
        description="Longest input in tokens, longer ones are cut. None: the model's limit, at most 512.",
    )
    bad_rows: Literal["error", "skip"] = Field(
        "error", description="What to do with rows that have no text, no label or an unknown label."
    )
    cache: bool = Field(True, description="Keep the tokenised text for the next run.")
    cache_dir: str | None = Field(None, description="Folder of the token cache. None: ~/.cache/raytrain_bert.")

    @model_validator(mode="after")
    def _fractions_leave_training_rows(self) -> DataConfig:
        taken = (0 if self.validation else self.validation_fraction) + (0 if self.test else self.test_fraction)
        if taken >= 1:
            raise ValueError("validation_fraction and test_fraction together leave no training rows")
        return self


class ModelConfig(Settings):
    """Which pretrained encoder, and the head on top of it."""

    name: str = Field(BUNDLED_MODEL, description="Hugging Face hub name, model folder, or bundled:all-minilm-l6-v2.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    pooling: Literal["native", "cls", "mean", "last", "max"] = Field(
        "native",
        description="native: the model's own classification head; others: pool the encoder's output (first token, "
        "mean, last real token, maximum over real tokens), then one linear layer.",
    )
    dropout: float | None = Field(None, ge=0, lt=1, description="Dropout of encoder and head. None: the model's own.")
    freeze_encoder: bool = Field(False, description="Train only the head.")
    freeze_layers: int = Field(0, ge=0, description="Freeze the embeddings and the first k encoder layers; 0 for none.")
    gradient_checkpointing: bool = Field(False, description="Trade compute for memory: recompute activations.")
    compile: bool = Field(False, description="Compile the model with torch.compile.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Only for models you trust."
    )


class OptimConfig(Settings):
    """AdamW and its schedule."""

    learning_rate: float = Field(5e-5, ge=0, description="Peak learning rate, reached after warmup.")
    head_learning_rate: float | None = Field(
        None, ge=0, description="Peak learning rate of the classification head. None: the same."
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Learning rate of each layer relative to the one above it; 1 for the same everywhere.",
    )
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay; never on biases and norms.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay rate of AdamW's first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay rate of AdamW's second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to AdamW's denominator.")
    schedule: Literal["linear", "cosine", "constant"] = Field("linear", description="Learning rate after warmup.")
    warmup_fraction: float = Field(0.1, ge=0, le=1, description="Share of all optimizer steps spent warming up.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient to this L2 norm. None: no clipping.")


class TrainConfig(Settings):
    """The loop."""

    num_epochs: int = Field(3, ge=1, description="Passes over the training rows.")
    max_steps: int | None = Field(
        None, ge=1, description="Most optimizer steps of the run; the schedule ends there. None: num_epochs decides."
    )
    global_batch_size: int = Field(
        32, ge=1, description="Rows per optimizer step over all workers, whatever their number."
    )
    tokens_per_micro_batch: int | None = Field(
        None,
        ge=8,
        description="Most tokens, padding included, in one forward pass of a worker. None: 4096 on CPU, 16384 on GPU.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Autocast type; auto is bf16 where the hardware has it, else fp32."
    )
    seed: int = Field(0, ge=0, description="Seed of head, order of rows and dropout.")
    class_weights: ClassWeights = Field(
        None,
        description="Weight of each class in the training loss: balanced (rows / (classes x rows of the class)), or "
        "LABEL=WEIGHT,... (a mapping in YAML; 1 for labels not named). None: all alike.",
        json_schema_extra={"metavar": "balanced|LABEL=WEIGHT,..."},
    )
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="When loss or gradients are not finite: stop the run, or skip that step and count it."
    )
    deterministic: bool = Field(
        False, description="Use deterministic GPU kernels only: runs repeat bit for bit, and more slowly."
    )
    best_metric: Literal["accuracy", "macro_f1", "weighted_f1", "mcc", "loss"] = Field(
        "accuracy", description="Validation metric that chooses the best checkpoint."
    )
    early_stopping_patience: int | None = Field(
        None, ge=1, description="Stop after this many validations without a better best_metric. None: never."
    )
    early_stopping_min_delta: float = Field(
        0.0, ge=0, description="Smallest change of best_metric that counts as better."
    )
    validate_every_steps: int | None = Field(
        None, ge=1, description="Validate every so many optimizer steps as well as after each epoch."
    )
    log_every_steps: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps between two exchanges of loss between workers. None: 1 on CPU, 10 on GPU.",
    )


class ScalingSettings(Settings):
    """How many workers, and what each one gets."""

    num_workers: NumWorkers = Field(
        None,
        description="Training processes. None: one per GPU of the cluster, else two on CPU. 0: in this process. "
        "MIN..MAX: elastic, as many as the cluster has room for.",
        json_schema_extra={"metavar": "N|MIN..MAX"},
    )
    use_gpu: bool | None = Field(None, description="One GPU for each worker. None: if the cluster has GPUs.")
    cpus_per_worker: int | None = Field(
        None,
        ge=1,
        description="CPUs, and so threads, for each worker. None: an equal share on CPU, up to 4 with GPUs.",
    )
    address: str | None = Field(
        None, description="Ray cluster to join, for example auto. None: RAY_ADDRESS if set, else a local Ray."
    )
    dashboard: bool = Field(False, description="Start Ray's dashboard with a local Ray, on loopback.")
    timeout_minutes: float = Field(
        10.0, gt=0, description="Longest wait of one worker for another before the run fails."
    )
    max_failures: int = Field(
        3,
        ge=0,
        description="How often lost workers are replaced before the run fails; errors of the program never are.",
    )
    resize_check_seconds: float = Field(
        60.0, gt=0, description="Seconds between two looks for room for more workers, in elastic training."
    )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return isinstance(self.num_workers, str)

    @property
    def worker_range(self) -> tuple[int, int] | None:
        """Fewest and most workers; None where it is left open."""
        if isinstance(self.num_workers, str):
            low, _, high = self.num_workers.partition("..")
            return int(low), int(high)
        return None if self.num_workers is None else (self.num_workers, self.num_workers)


class CheckpointConfig(Settings):
    """Resumable checkpoints."""

    every_steps: int | None = Field(
        None, ge=1, description="Save every so many optimizer steps as well as after each validation."
    )
    every_minutes: float | None = Field(
        10.0, gt=0, description="Save when so many minutes have gone since the last checkpoint. None: not by time."
    )
    num_to_keep: int = Field(1, ge=0, description="Checkpoints kept besides the best and the last.")
    background: bool = Field(
        True, description="Write checkpoints while training goes on; the steps wait for a copy only."
    )


class OutputConfig(Settings):
    """Where the run goes."""

    storage_path: str = Field("runs", description="Folder that holds the run folders.")
    name: str | None = Field(None, description="Name of the run folder. None: data set and time.")
    trackers: Annotated[list[Literal["tensorboard", "mlflow", "wandb"]] | None, BeforeValidator(_as_list)] = Field(
        None,
        description="Experiment trackers that get the figures too: tensorboard, mlflow, wandb (extras). None: none.",
    )


class Config(Settings):
    """The whole configuration of a training run."""

    data: DataConfig = Field(DataConfig(), description="Where the labelled text is and how it is read.")
    model: ModelConfig = Field(ModelConfig(), description="Pretrained encoder and head.")
    optim: OptimConfig = Field(OptimConfig(), description="AdamW and its schedule.")
    train: TrainConfig = Field(TrainConfig(), description="The loop.")
    scaling: ScalingSettings = Field(ScalingSettings(), description="Workers and devices.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Resumable checkpoints.")
    output: OutputConfig = Field(OutputConfig(), description="The run folder.")
