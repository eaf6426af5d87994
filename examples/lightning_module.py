"""Lightning with a remat callback."""

import lightning.pytorch as pl
import torch
from torch import nn

import remat
from remat.trainers.lightning import RematCallback


class Classifier(pl.LightningModule):
    """A small network whose `model` is trained by a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(budget: "remat.Fraction | None") -> list[float]:
    """Losses of three steps, without a plan or by one."""
    pl.seed_everything(0, verbose=False)
    module = Classifier()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1536, 64)), batch_size=512)
    callbacks = [] if budget is None else [RematCallback(budget, part="model")]
    trainer = pl.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, data)
    return module.losses


def main() -> None:
    plain, planned = train(None), train(remat.Fraction(0.7))
    print("plain  ", plain)
    print("planned", planned)
    assert plain == planned, "the losses must be equal"


if __name__ == "__main__":
    main()
