"""`transformers.Trainer` with the loss of a distillation, stopped where the loss is NaN or infinite.

Importing this module imports `transformers.Trainer`, and with it accelerate.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from slimstate.records.schema import from_json
from slimstate.records.training import LogEntry
from slimstate.system import distributed
from slimstate.system.atomic import write_text
from slimstate.system.errors import OutputError, TrainingError
from slimstate.system.json_files import plain
from slimstate.system.progress import Update
from slimstate.system.shortages import is_disk_full
from slimstate.training.adaptation import trainable
from slimstate.training.options import TrainOptions
from slimstate.training.run_checkpoints import COMPLETE, last_checkpoint
from slimstate.training.teacher import Teacher

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
    """The Trainer, with the loss that a student returns and its parts in the log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unchecked: list[Tensor] = []  # losses
        self.parts: list[Tensor] = []

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]:
        outputs = model(**inputs)
        loss: Tensor = outputs["loss"]
        self.unchecked.append(loss.detach())
        self.parts.append(outputs["parts"].detach())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.parts:
            mean = distributed.sum_over_all(torch.stack(self.parts).mean(0)) / distributed.count()
            logs |= dict(zip(("cross_entropy", "distillation"), mean.tolist(), strict=True))
            self.parts.clear()
        super().log(logs, start_time)


class TrainingCallback(TrainerCallback):  # type: ignore[misc]
    """Check the losses whenever they are logged or saved, mark checkpoints as complete, and report progress."""

    def __init__(self, trainer: StudentTrainer, tokens_per_step: int, parts: int, update: Update) -> None:
        self.trainer, self.tokens_per_step, self.parts, self.update = trainer, tokens_per_step, parts, update
        self.started, self.first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.first_step = time.perf_counter(), state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not (control.should_log or control.should_save):
            return
        losses, self.trainer.unchecked = torch.stack(self.trainer.unchecked), []
        bad = (~losses.isfinite()).float().view(-1, self.parts).amax(1)
        if control.should_save:  # a step of finite loss may still have broken the weights
            weights = trainable(self.trainer.model).values()
            local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
            finite = all(bool(weight.isfinite().all()) for weight in local)
            bad[-1] = bad[-1].clamp(min=float(not finite))
        if float(distributed.sum_over_all(bad).sum()):
            step = state.global_step - len(bad) + 1 + int(bad.nonzero()[0])
            last = last_checkpoint(Path(args.output_dir))
            saved = "there is no checkpoint before it" if last is None else f"the last good checkpoint is {last}"
            raise TrainingError(
                f"the loss is NaN or infinite at step {step}: {saved}; try a lower `lr`, and `force` to start over"
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        distributed.wait_for_all()
        if distributed.is_main():
            write_text(Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE, f"{state.global_step}\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs and state.global_step > self.first_step:
            seconds = time.perf_counter() - self.started
            speed = (state.global_step - self.first_step) * self.tokens_per_step / seconds
            self.update(state.global_step, f"loss {logs['loss']:.4f}  {speed:,.0f} tokens/s")


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
    """Return the options as those of the Trainer."""
    trainer, run = options.trainer, options.run
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.total_steps,
        per_device_train_batch_size=options.batch_size // (options.parts * distributed.count()),
        gradient_accumulation_steps=options.parts,
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
    student: Student, schedule: Schedule, options: TrainOptions, folder: Path, checkpoint: Path | None, update: Update
) -> tuple[dict[str, Tensor], tuple[LogEntry, ...]]:
    """Train, from a checkpoint if there is one; return the parameters by the names of the model, and the log."""
    arguments, collate = trainer_arguments(options, folder), default_data_collator
    trainer = StudentTrainer(model=student, args=arguments, train_dataset=schedule, data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TrainingCallback(trainer, options.tokens_per_step, options.parts, update))
    with _translate_full_disk(folder):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    log = tuple(from_json(LogEntry, plain(entry, 6)) for entry in trainer.state.log_history if "loss" in entry)
    return {name: state[f"model.{name}"].cpu() for name in trainable(student.model) if f"model.{name}" in state}, log
