"""The largest batch of a GPT-2 that trains inside a budget, at most a quarter slower a sample than plain training."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import remat


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=200, n_positions=64, bos_token_id=1, eos_token_id=2)
    config.use_cache = False
    return GPT2LMHeadModel(config)


def make_batch(size: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 200, (size, 64))
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    found = remat.max_batch(
        make_model,
        make_batch,
        budget="32MiB",
        max_overhead=0.25,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        multiple_of=4,
        planner="greedy",
        on_try=lambda t: print(f"tried {t.batch}: {t.why or 'trains inside the budget'}", flush=True),
    )
    print(found)


if __name__ == "__main__":
    main()
