"""transformers.Trainer with remat in the place of gradient_checkpointing=True."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import remat
from remat.trainers.transformers import RematCallback


class Text(torch.utils.data.Dataset):
    """Random tokens of one length."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 100, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(budget: "remat.Fraction | None") -> list[float]:
    """Losses of three steps, without a plan or by one."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=32, bos_token_id=1, eos_token_id=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, seed=1
        )
        callbacks = [] if budget is None else [RematCallback(budget)]
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Text(), callbacks=callbacks)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    plain, planned = train(None), train(remat.Fraction(0.7))
    print("plain  ", plain)
    print("planned", planned)
    assert plain == planned, "the losses must be equal"


if __name__ == "__main__":
    main()
