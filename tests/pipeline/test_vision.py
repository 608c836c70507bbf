"""Faces, a torchvision model and one line for fairness."""

import pytest
from faces import write_faces
from helpers import trainer

from fairbatch_lightning import FairBatch, FairnessMonitor
from fairbatch_lightning.vision import UTKFaceDataModule, VisionClassifier


def test_the_one_line(tmp_path):
    """Nothing but the callback: labels, groups and logits are found."""
    write_faces(tmp_path, number=400)
    data = UTKFaceDataModule(tmp_path, image_size=16, batch_size=40)
    fairbatch, monitor = FairBatch("equalized_odds", groups="race"), FairnessMonitor(groups="race")
    run = trainer(fairbatch, monitor, max_epochs=2)
    model = VisionClassifier(data.num_classes, weights=None)
    run.fit(model, data)
    run.test(model, data, verbose=False)
    assert fairbatch.index.label_names == ("male", "female")
    assert fairbatch.index.group_names == ("Asian", "Black", "Indian", "Others", "White")
    assert int(fairbatch.counts.sum()) == 280
    assert len(fairbatch.history) == 14  # one after every batch: there are few of them
    assert monitor.audits["test"].num_samples == 80
    assert run.callback_metrics["test_accuracy"] == pytest.approx(monitor.audits["test"].values()["accuracy"])
