"""Recorders for training frameworks, none of which is imported before it is asked for.

Hugging Face Trainer::

    trainer.add_callback(recipes.hugging_face("traces/run1", seq_len=4096))

Lightning::

    Trainer(callbacks=[recipes.lightning("traces/run1", tokens_per_step=4_194_304)])

torchtitan (``torchtitan.train``)::

    trainer = Trainer(config)
    trainer.train_step = recipes.each_call(
        trainer.train_step, "traces/run1", model=trainer.model_parts, tokens_per_step=...
    )

Megatron-LM, before ``pretrain(...)``; the model is the third argument of its ``train_step``::

    from megatron.training import training

    training.train_step = recipes.each_call(
        training.train_step, "traces/run1", model=lambda args, kwargs: args[2], params=70e9, parallel={"tp": 8, "pp": 4}
    )

Accelerate: the plain loop (`traceaudit.capture`), with ``recorder.step()`` where ``accelerator.sync_gradients``.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from traceaudit.capture.recorder import Recorder, capture, harmless

P = ParamSpec("P")
T = TypeVar("T")


def each_call(train_step: Callable[P, T], directory: str, *, model: Any = None, **settings: Any) -> Callable[P, T]:  # noqa: ANN401
    """Return a function that runs one optimizer step, so that each call is a step of the recorder.

    Args:
        train_step: runs one optimizer step.
        directory: see `capture`.
        model: the model, or a function that finds it in the arguments (tuple and dict) of the first call.
        settings: further arguments of `capture`.
    """
    recorder: Recorder | None = None

    @wraps(train_step)
    def stepped(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal recorder
        if recorder is None:
            found = None
            with harmless("finding the model"):
                found = model(args, kwargs) if callable(model) and not hasattr(model, "parameters") else model
            recorder = capture(directory, model=found, **settings).__enter__()
        result = train_step(*args, **kwargs)
        recorder.step()
        return result

    return stepped


def _base(*places: str) -> type:
    """Return the first class that can be imported, ``object`` without any."""
    for place in places:
        module, _, name = place.rpartition(".")
        try:
            found: type = getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
        return found
    return object


def hugging_face(directory: str, *, seq_len: int | None = None, **settings: Any) -> Any:  # noqa: ANN401
    """Return a callback for ``transformers.Trainer``.

    With `seq_len`, the tokens of a step follow from the trainer's batch size: full sequences, no padding.
    """
    base = _base("transformers.TrainerCallback")

    class Capture(base):  # type: ignore[misc, valid-type]
        """Records some steps of a trainer."""

        recorder: Recorder | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ANN401
            """Begin to count steps."""
            known = dict(settings)
            with harmless("the size of the batch"):
                if seq_len is not None and "tokens_per_step" not in known:
                    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
                    known["tokens_per_step"] = batch * seq_len
            self.recorder = capture(directory, model=model, seq_len=seq_len, **known).__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
            """Count an optimizer step."""
            if self.recorder is not None:
                self.recorder.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
            """Write what there is."""
            if self.recorder is not None:
                self.recorder.__exit__(None, None, None)

    return Capture()


def lightning(directory: str, **settings: Any) -> Any:  # noqa: ANN401
    """Return a callback for Lightning's ``Trainer``; optimizer steps are told by ``trainer.global_step``."""
    base = _base("lightning.pytorch.Callback", "pytorch_lightning.Callback")

    class Capture(base):  # type: ignore[misc, valid-type]
        """Records some steps of a trainer."""

        recorder: Recorder | None = None
        done = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
            """Begin to count steps."""
            self.done = trainer.global_step
            self.recorder = capture(directory, model=pl_module, **settings).__enter__()

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
            """Count the optimizer step of a batch, if it had one."""
            if self.recorder is not None and trainer.global_step != self.done:
                self.done = trainer.global_step
                self.recorder.step()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
            """Write what there is."""
            if self.recorder is not None:
                self.recorder.__exit__(None, None, None)

    return Capture()
