"""`transformers.Trainer` with the loss of a distillation, stopped where the loss is NaN or infinite.

Importing this module imports `transformers.Trainer`, and with it accelerate.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback

from slimstate.data.corpus import Schedule
from slimstate.kernels.distillation import distilled_loss
from slimstate.models.load import states_before_head
from slimstate.models.memory import DeviceMemory, Pieces
from slimstate.records.schema import from_json
from slimstate.records.training import LogEntry
from slimstate.system import distributed
from slimstate.system.atomic import write_text
from slimstate.system.errors import OutputError, TrainingError
from slimstate.system.json_files import plain
from slimstate.system.shortages import is_disk_full
from slimstate.training.adaptation import trainable
from slimstate.training.options import TrainOptions
from slimstate.training.progress import TrainingProgress
from slimstate.training.run_checkpoints import COMPLETE, last_checkpoint
from slimstate.training.teacher import Teacher

Batch = dict[str, Tensor]  # the windows of a step, and their places in the corpus
MIN_FREE_BYTES = 2**20  # with less, a disk counts as full


class Student(nn.Module):
    """A model and its teacher as one module whose output is the loss, so that every engine of accelerate can wrap it.

    The teacher is not a submodule: it is neither trained nor sharded nor saved. The state dict contains only the
    parameters that are trained.
    """

    def __init__(self, model: Any, teacher: Teacher | None, temperature: float, weight: float) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.weight = temperature, weight
        self.__dict__["teacher"] = teacher
        self._no_split_modules = getattr(model, "_no_split_modules", None)
        self._keys_to_ignore_on_save = None  # the Trainer reads it when it resumes
        self.register_state_dict_post_hook(_drop_frozen)

    def forward(self, input_ids: Tensor, place: Tensor) -> dict[str, Tensor]:
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        teacher: Teacher | None = self.__dict__["teacher"]
        distribution = None if teacher is None else teacher.distribution(input_ids, place)
        hidden = states_before_head(model, input_ids)
        loss, cross_entropy, distillation = distilled_loss(
            hidden[:, :-1].flatten(0, 1), model.get_output_embeddings().weight, input_ids[:, 1:].flatten(),
            distribution, temperature=self.temperature, weight=self.weight,
        )  # fmt: skip
        return {"loss": loss, "parts": torch.stack([cross_entropy, distillation])}


def _drop_frozen(student: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    for name in state.keys() - {prefix + name for name in trainable(student)}:
        del state[name]


class StudentTrainer(Trainer):  # type: ignore[misc]
    """The Trainer, with batches in pieces that fit into memory, and the parts of the loss in the log."""

    def __init__(self, pieces: Pieces, is_measured: bool, **options: Any) -> None:
        super().__init__(**options)
        self.pieces, self.is_measured = pieces, is_measured
        self.unchecked: list[Tensor] = []  # losses
        self.parts: list[Tensor] = []

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Run a batch forward and backward, piece by piece; the result does not depend on the pieces."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        windows = torch.arange(len(inputs["place"]), device=inputs["place"].device)
        if self.is_measured:
            self.is_measured = False
            self._measure(model, inputs, windows[:1])

        def run() -> Tensor:
            model.zero_grad()
            *first, last = self.pieces.split(windows)
            with self.accelerator.no_sync(model):
                results = [self._run(model, inputs, piece, len(piece) / len(windows)) for piece in first]
            results.append(self._run(model, inputs, last, len(last) / len(windows)))
            return torch.stack(results).sum(0)

        loss, *parts = self.pieces.run(run)
        self.unchecked.append(loss)
        self.parts.append(torch.stack(parts))
        return loss

    def _run(self, model: nn.Module, inputs: Batch, piece: Tensor, share: float, length: int | None = None) -> Tensor:
        """Add the gradient of some windows, up to a length; return their share of the loss and of its parts."""
        with self.compute_loss_context_manager():
            outputs = model(inputs["input_ids"][piece, :length], inputs["place"][piece])
        self.accelerator.backward(outputs["loss"] * share)
        return torch.cat([outputs["loss"].detach()[None], outputs["parts"]]) * share

    def _measure(self, model: nn.Module, inputs: Batch, window: Tensor) -> None:
        """Let as many windows run at once as fit beside gradients and the two moments of Adam."""

        def reserved() -> int:
            moments = (weight for weight in trainable(model).values() if weight not in self.optimizer.state)
            return sum(2 * weight.nbytes for weight in moments)

        work = partial(self._run, model, inputs, window, 1.0)
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.accelerator.no_sync(model):
            self.pieces.measure(work, inputs["input_ids"].shape[1], reserved)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.parts:
            mean = distributed.sum_over_all(torch.stack(self.parts).mean(0)) / distributed.count()
            logs |= dict(zip(("cross_entropy", "distillation"), mean.tolist(), strict=True))
            self.parts.clear()
        super().log(logs, start_time)


class TrainingCallback(TrainerCallback):  # type: ignore[misc]
    """Check the losses whenever they are logged or saved, mark checkpoints as complete, and report progress."""

    def __init__(self, trainer: StudentTrainer, progress: TrainingProgress) -> None:
        self.trainer, self.progress = trainer, progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.end_step(state.global_step)
        if not (control.should_log or control.should_save):
            return
        losses, self.trainer.unchecked = torch.stack(self.trainer.unchecked), []
        bad = (~losses.isfinite()).float()
        if control.should_save:  # a step of finite loss may still have broken the weights
            weights = trainable(self.trainer.model).values()
            local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
            finite = all(bool(weight.isfinite().all()) for weight in local)
            bad[-1] = bad[-1].clamp(min=float(not finite))
        if float(distributed.sum_over_all(bad).sum()):
            step = state.global_step - len(bad) + 1 + int(bad.nonzero()[0])
            last = last_checkpoint(Path(args.output_dir))
            saved = "there is no checkpoint before it" if last is None else f"the last good checkpoint is {last}"
            problem = f"the loss is NaN or infinite at step {step}: {saved}"
            raise TrainingError(f"{problem}; try a lower `lr`, and `force` to start over")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        distributed.wait_for_all()
        if distributed.is_main():
            write_text(Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE, f"{state.global_step}\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.progress.log(state.global_step, logs["loss"])


@contextmanager
def _translate_full_disk(folder: Path) -> Iterator[None]:
    """Raise an `OutputError` in place of whatever the writers of a checkpoint raise on a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not is_disk_full(error) and shutil.disk_usage(folder).free > MIN_FREE_BYTES:
            raise
        raise OutputError(f"no space left for {folder}: free some disk space") from error


def resume_from(folder: Path) -> Path | None:
    """Return the last complete checkpoint, after removing incomplete ones of a run that was killed."""
    if distributed.is_main():
        for path in folder.glob("checkpoint-*"):
            if not (path / COMPLETE).exists():
                shutil.rmtree(path)
    distributed.wait_for_all()
    return last_checkpoint(folder)


def trainer_arguments(options: TrainOptions, folder: Path) -> TrainingArguments:
    trainer, run = options.trainer, options.run
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.total_steps,
        per_device_train_batch_size=options.batch_size // distributed.count(),
        learning_rate=options.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": options.min_lr},
        warmup_steps=int(options.warm_up * options.total_steps),
        optim="adamw_torch",
        adam_beta2=options.second_beta,
        adam_epsilon=options.adam_eps,
        weight_decay=options.weight_decay,
        max_grad_norm=1.0,
        bf16=run.precision == torch.bfloat16,
        use_cpu=run.place.type == "cpu",
        logging_steps=options.steps_between_logs,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=options.steps_between_saves,
        save_total_limit=2,  # the one before is removed only when the next is complete
        report_to=trainer.loggers or ["none"],
        seed=options.text.seed,
        train_sampling_strategy="sequential",  # the schedule is in a random order already
        remove_unused_columns=False,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        fsdp=True if trainer.fsdp else None,
        log_level="error",
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # several GPUs are used by several processes, never by DataParallel
    return arguments


def fit(
    student: Student, schedule: Schedule, options: TrainOptions, folder: Path, checkpoint: Path | None,
    progress: TrainingProgress,
) -> tuple[dict[str, Tensor], tuple[LogEntry, ...]]:  # fmt: skip
    """Train, from a checkpoint if there is one; return the parameters by the names of the model, and the log."""
    pieces = Pieces(DeviceMemory(options.run.place), options.windows_at_once, progress.reporter)
    trainer = StudentTrainer(
        pieces, pieces.memory.is_measured and options.trainer.grad_accum is None and not options.trainer.fsdp,
        model=student, args=trainer_arguments(options, folder), train_dataset=schedule,
        data_collator=default_data_collator,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TrainingCallback(trainer, progress))
    with _translate_full_disk(folder):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    log = tuple(from_json(LogEntry, plain(entry, 6)) for entry in trainer.state.log_history if "loss" in entry)
    return {name: state[f"model.{name}"].cpu() for name in trainable(student.model) if f"model.{name}" in state}, log
