"""sentence-transformers: its Trainer with the multiple negatives ranking loss on a small BERT."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, TrainerCallback

from .training import VOCABULARY, Training, token_rows, tokenizer, words


class Notes(TrainerCallback):  # type: ignore[misc]
    def __init__(self, training: Training) -> None:
        self.training = training

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if logs and "loss" in logs:
            self.training.step(logs["loss"])


def train(training: Training) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes))
    bert.save_pretrained(training.folder + "-bert")
    tokenizer().save_pretrained(training.folder + "-bert")
    words_of = Transformer(training.folder + "-bert", max_seq_length=32)
    model = SentenceTransformer(modules=[words_of, Pooling(16)], device="cpu")
    training.budget = "85%"
    training.enable(words_of.auto_model)
    texts = [words(row["input_ids"]) for row in token_rows(160)]
    data = Dataset.from_dict({"anchor": texts, "positive": texts[::-1]})
    arguments = SentenceTransformerTrainingArguments(
        training.folder, max_steps=40, per_device_train_batch_size=4, logging_steps=1, save_strategy="no", use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    run = SentenceTransformerTrainer(
        model, arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model), callbacks=[Notes(training)]
    )
    run.train()
    training.end("model", model)
