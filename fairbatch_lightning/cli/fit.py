"""`fairbatch fit`, `validate` and `test`: fine-tune a torchvision model fairly on UTKFace, with LightningCLI."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from fairbatch_lightning._support.lightning import say_less
from fairbatch_lightning.callbacks.baselines import Cutting
from fairbatch_lightning.callbacks.fairbatch import FairBatch
from fairbatch_lightning.callbacks.monitor import FairnessMonitor
from fairbatch_lightning.rules.worst_case import WorstCase  # noqa: F401 - to be known to the parser by its name
from fairbatch_lightning.vision import UTKFaceDataModule, VisionClassifier
from fairbatch_lightning.vision.utkface import find_faces

LOGS = "fairbatch_logs"
METHODS = {"fairbatch": FairBatch, "cutting": Cutting}


class FairCLI(LightningCLI):
    """LightningCLI with a choice of methods, that tests the best checkpoint after `fit`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the methods and the monitor, with their settings."""
        methods = Literal["fairbatch", "cutting", "plain"]
        parser.add_argument("--method", type=methods, default="fairbatch", help="what makes the training fair")
        for name, method in METHODS.items():
            parser.add_class_arguments(method, name, fail_untyped=False, sub_configs=True)
        parser.add_lightning_class_args(FairnessMonitor, "monitor")
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands, each with what is not an argument of it."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse what `run` has made of the command line.

        The checkpoint is hidden until that is done: newer versions of Lightning let its settings overrule all others.
        """
        self.config = parser.parse_args(args)
        settings = self.config[self.config["subcommand"]]
        self._checkpoint, settings["ckpt_path"] = settings["ckpt_path"], None

    def before_instantiate_classes(self) -> None:
        """Show the checkpoint again; look for faces, before weights are downloaded for them."""
        settings = self.config[self.subcommand]
        settings["ckpt_path"] = self._checkpoint
        find_faces(settings["data"]["root"])

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the chosen method; log to files in the Trainer's folder, unless there are settings for loggers."""
        settings = self.config_init[self.subcommand]
        given, method = settings["trainer"]["callbacks"] or [], settings.get(settings["method"])
        given = [*given] if isinstance(given, list) else [given]
        kwargs["callbacks"] = given if method is None else [*given, method]
        if settings["trainer"]["logger"] is None:
            kwargs["logger"] = _loggers(settings["trainer"]["default_root_dir"])
        return super().instantiate_trainer(**kwargs)

    def after_fit(self) -> None:
        """Test the checkpoint that was best in validation."""
        best = None if self.trainer.fast_dev_run else "best"  # type: ignore[attr-defined]
        self.trainer.test(self.model, self.datamodule, ckpt_path=best)


class _SaveConfig(SaveConfigCallback):
    """Saves the configuration next to the log; without one it would overwrite what is in the working directory."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save it."""
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


def run(arguments: Sequence[str]) -> None:
    """Run one of the commands with its options."""
    say_less()
    command, *options = arguments
    options = [*_settings_of_checkpoint(command, options), *options]
    FairCLI(
        VisionClassifier,
        UTKFaceDataModule,
        args=[command, *options],
        seed_everything_default=0,
        save_config_callback=_SaveConfig,
        trainer_defaults={
            "max_epochs": 10,
            "default_root_dir": LOGS,
            "callbacks": [ModelCheckpoint(monitor="val_accuracy", mode="max", save_last=True)],
        },
    )


def _loggers(folder: str) -> list[Logger]:
    """Return the loggers: for `fairbatch report`, and for TensorBoard if it is there."""
    if "://" not in folder:  # checkpoints remember it, and may be resumed elsewhere
        folder = str(Path(folder).absolute())
    csv = CSVLogger(folder, "csv")
    return [csv, TensorBoardLogger(folder, "tensorboard")] if find_spec("tensorboard") else [csv]


def _settings_of_checkpoint(command: str, options: list[str]) -> list[str]:
    """Return the settings of model and data that a checkpoint was made with, as options; others may overrule them."""
    given = [option.partition("=")[2] for option in options if option.startswith("--ckpt_path=")]
    given += [value for option, value in pairwise(options) if option == "--ckpt_path"]
    if any(option.split("=")[0] in ("-h", "--help", "--print_config") for option in options):
        return []
    if not given and command == "fit":
        return []
    if not given:
        raise ValueError("Expected --ckpt_path with a checkpoint that `fairbatch fit` has made, but there is none.")
    if not Path(given[-1]).is_file():
        raise FileNotFoundError(f"There is no checkpoint {given[-1]}.")
    saved = _saved_settings(given[-1])
    return [
        f"--{part}.{name}={value if isinstance(value, str) else json.dumps(value)}"
        for part, settings in saved.items()
        for name, value in settings.items()
        if not name.startswith("_") and name != "num_classes"
    ]


def _saved_settings(path: str) -> dict[str, Mapping[str, Any]]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {"model": {**checkpoint["hyper_parameters"]}, "data": {**checkpoint["datamodule_hyper_parameters"]}}
    except (RuntimeError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise ValueError(f"Expected a checkpoint that `fairbatch fit` has made but got {path}.") from error
