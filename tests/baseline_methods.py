"""Baselines by name, and what is needed to see by hand what they do."""

import torch
from helpers import Toy, ToyModule

from fairbatch_lightning.callbacks.baselines import (
    AdversarialDebiasing,
    FairnessConstraints,
    GroupDRO,
    Reweighing,
)

CHANGE_LOSS = {
    "reweighing": lambda **settings: Reweighing(groups="group", **settings),
    "group dro": lambda **settings: GroupDRO(groups="group", step_size=0.5, **settings),
    "constraints": lambda **settings: FairnessConstraints(groups="group", **settings),
    "adversary": lambda **settings: AdversarialDebiasing(groups="group", lr=0.05, **settings),
}
"""Baselines that add to the loss, by name: functions of their other arguments."""


class Replayed(ToyModule):
    """Keeps its weights before every step, to compute by hand what the step should have been."""

    def __init__(self):
        super().__init__()
        self.trace = []

    def on_train_batch_start(self, batch, batch_idx):
        self.trace.append(({name: value.clone() for name, value in self.net.state_dict().items()}, batch))

    def replay(self, loss_of):
        """Assert that each step was one of SGD on the loss that a function gives for logits, labels and groups."""
        ends = [weights for weights, _ in self.trace[1:]] + [self.net.state_dict()]
        for (weights, (x, y, index)), after in zip(self.trace, ends, strict=True):
            net = torch.nn.Linear(4, 2)
            net.load_state_dict(weights)
            loss_of(net(x), y, Toy().group_ids[index]).backward()
            for name, value in net.named_parameters():
                torch.testing.assert_close(after[name], value - self.lr * value.grad)
