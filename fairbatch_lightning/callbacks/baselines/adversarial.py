"""Adversarial debiasing: a second network tries to tell the group from the model's output."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fairbatch_lightning._support.checks import check_number
from fairbatch_lightning._support.processes import world_size, world_sum
from fairbatch_lightning._support.rng import preserved_rng
from fairbatch_lightning._support.saved import Saved
from fairbatch_lightning.callbacks.base import LoadedData
from fairbatch_lightning.callbacks.baselines.base import ForCriterion
from fairbatch_lightning.callbacks.baselines.loss_changing import LossChanging
from fairbatch_lightning.rules.criteria import Criterion, DemographicParity

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AdversarialDebiasing(ForCriterion, LossChanging):
    r"""Trains the model against an adversary that guesses the group from its logits (Zhang et al., 2018).

        Trainer(callbacks=[AdversarialDebiasing("equalized_odds", groups="race", weight=1.0)])

    After every batch the adversary takes a step towards telling the groups apart. From the loss of the model, the
    adversary's cross-entropy is subtracted `weight` times. The adversary sees, by criterion:

    - "demographic_parity": the logits
    - "equalized_odds": the logits and the label
    - "equal_opportunity": the logits of samples with the positive label

    It is a network with one hidden layer. As in the FairBatch paper, the model's gradient is not projected onto what
    does not help the adversary, which Zhang et al. add for stability.

    Args:
        criterion: Which of these.
        weight: How much the adversary counts.
        lr: The adversary's learning rate, of Adam.
        hidden: The size of its hidden layer.
        arguments: As for [`FairBatch`][fairbatch_lightning.FairBatch]: groups, labels, loss, logits, loader, seed.
    """

    def __init__(
        self,
        criterion: str | Criterion = "equalized_odds",
        *,
        weight: float = 1.0,
        lr: float = 1e-3,
        hidden: int = 16,
        **arguments: Any,
    ) -> None:
        check_number("weight", weight, 0)
        check_number("lr", lr, 0, above=True)
        super().__init__(criterion, **arguments)
        self._weight, self._lr, self._hidden = weight, lr, hidden
        self.adversary: nn.Module | None = None
        """The network that guesses the group; None before the first batch."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None
        self._earlier: tuple[nn.Sequential, torch.optim.Optimizer] | None = None

    def start(self, data: LoadedData) -> None:
        """Begin with a new adversary, once the number of logits is known."""
        super().start(data)
        self.adversary = self._optimizer = self._seen = self._earlier = None
        self._shape, self._only = data.index.shape, self.only_row(data.index)

    def loss_term(self, logits: Tensor, losses: Tensor, cells: Tensor) -> Tensor:
        """Return the adversary's loss, negated; the adversary itself learns after the batch."""
        seen, groups = self._what_it_sees(logits, cells)
        if self.adversary is None:
            self._new_adversary(seen)
        adversary: Any = self.adversary
        number = world_sum(torch.tensor(float(len(groups)), device=seen.device))
        self._seen = seen.detach(), groups, number
        fixed = {name: value.detach() for name, value in adversary.named_parameters()}
        guesses = functional_call(adversary, fixed, (seen,))
        loss = functional.cross_entropy(guesses, groups, reduction="sum") / number.clamp(min=1)
        return -self._weight * world_size() * loss

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let the adversary learn from the batch."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._seen is None or self.adversary is None or self._optimizer is None:
            return
        (seen, groups, number), self._seen = self._seen, None
        if self._only is not None and not number:  # nobody's group is to be guessed
            return
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self.adversary(seen), groups, reduction="sum") / number
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.adversary.parameters():
            parameter.grad = world_sum(parameter.grad)  # type: ignore[arg-type]
        self._optimizer.step()

    def _what_it_sees(self, logits: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return the adversary's input `(B, features)`, and the groups to guess `(B,)`."""
        num_labels, num_groups = self._shape
        rows, groups = cells // num_groups, cells % num_groups
        output = logits.float().reshape(len(logits), -1)
        if self._only is not None:
            return output[rows == self._only], groups[rows == self._only]
        if not isinstance(self.criterion, DemographicParity):
            output = torch.cat([output, functional.one_hot(rows, num_labels).to(output)], 1)
        return output, groups

    def _new_adversary(self, seen: Tensor) -> None:
        if self._earlier is not None and self._earlier[0][0].in_features != seen.shape[1]:
            raise ValueError(
                "Expected the adversary in the checkpoint to be for a model with as many outputs: it sees"
                f" {self._earlier[0][0].in_features} numbers of a sample, and now {seen.shape[1]}. Start without it."
            )
        self.adversary, self._optimizer = self._earlier or self._network(seen.shape[1])
        self._earlier = None
        self.adversary.to(seen)
        for remembered in self._optimizer.state.values():
            remembered.update({name: value.to(seen) for name, value in remembered.items() if name != "step"})

    def _network(self, features: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        with preserved_rng(self._seed):
            layers = nn.Linear(features, self._hidden), nn.ReLU(), nn.Linear(self._hidden, self._shape[1])
        adversary = nn.Sequential(*layers)
        return adversary, torch.optim.Adam(adversary.parameters(), self._lr)

    def learnt(self, *, alone: bool) -> dict[str, Any]:
        """Return the adversary."""
        adversary, optimizer = self._earlier or (self.adversary, self._optimizer)
        if adversary is None or optimizer is None:
            return {}
        return {"weights": adversary.state_dict(), "optimizer": optimizer.state_dict()}

    def go_on_from(self, learnt: dict[str, Any]) -> None:
        """Go on with the adversary of a checkpoint."""
        if not learnt:  # there was no batch yet
            return
        saved = Saved(learnt, "learnt")
        features = saved["weights"]["0.weight"].tensor(self._hidden, None).shape[1]
        adversary, optimizer = self._earlier = self._network(features)
        for name, weights in adversary.state_dict().items():
            weights.copy_(saved["weights"][name].tensor(*weights.shape, finite=True))
        remembered = saved["optimizer"]["state"]
        for number, parameter in enumerate(adversary.parameters()):
            shapes = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
            one = remembered[number]
            optimizer.state[parameter] = {
                name: one[name].tensor(*shape, finite=True, least=-math.inf if name == "exp_avg" else 0)
                for name, shape in shapes.items()
            }
