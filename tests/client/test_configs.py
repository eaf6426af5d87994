"""Models by their configuration: presets have their number of parameters, and peak as real steps do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from client.commands import command as command  # a fixture
from remat.target.build import load
from remat.target.configs import by_config, config_of, presets
from remat.target.devices import target_of
from remat.target.price import price
from remat.target.step import target_step
from remat_ir import InvalidData
from tiers import first

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    "vocab_size": 300,
    "pad_token_id": 1,
    "image_size": 32,
    "num_labels": 10,
    "time_step_rank": 4,
    "moe_intermediate_size": 32,
    "max_source_positions": 40,
    "sample_size": 16,
    "cross_attention_dim": 64,
    "projection_class_embeddings_input_dim": 6 * 256 + 64,
}


def small(name: str) -> dict[str, Any]:
    """A preset of little width and depth, in float32."""
    config = dict(presets()[name].config)
    found = {key: SMALL.get(key, value) for key, value in config.items()}
    if "model_type" in found:
        found |= {"dtype": "float32", "pad_token_id": 1, "decoder_start_token_id": 0}
    if "block_out_channels" in found:
        found["block_out_channels"] = [32 * 2 ** min(i, 1) for i in range(len(found["block_out_channels"]))]
    if found.get("model_type") == "mamba":
        found["intermediate_size"] = 2 * found["hidden_size"]
    return found


ALIKE = {json.dumps(small(name), sort_keys=True): name for name in presets()}
"""Presets that are the same when they are small: one of each."""


@pytest.mark.parametrize("name", first(4, presets()))
def test_a_preset_has_its_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model, _, _ = by_config(presets()[name].config)()
    assert sum(p.numel() for p in model.parameters()) == presets()[name].parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALIKE.values()))
def test_a_small_preset_peaks_as_predicted(name: str) -> None:
    """By the allocator's own events, while a real step runs."""
    torch.manual_seed(0)
    model, args, kwargs = by_config(small(name), 64)(batch=4)
    model = remat.optimize(model.train(), args, kwargs, budget="100%", planner="greedy")
    output = model(*args, **kwargs)
    (output[0] if isinstance(output, tuple) else output.loss).sum().backward()
    (peak,) = remat.plans_of(model).peaks.values()
    assert peak.as_predicted, peak


def test_a_model_is_found_by_its_file_its_folder_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = presets()["openai-community/gpt2"].config
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    assert config_of(str(tmp_path)) == config_of(str(tmp_path / "config.json")) == config_of("GPT2") == gpt2
    assert load("gpt2").__name__ == "GPT2LMHeadModel"
    assert config_of("no/such") is None
    for text, why in ((" {", "cannot be read"), ('{"a": 1}', "is no configuration")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidData, match=why):
            config_of(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "length", "why"),
    [
        ({"model_type": "nothing"}, None, "transformers does not read"),
        ({"model_type": "gpt2", "architectures": ["NoModel"]}, None, "has no NoModel"),
        ({"_class_name": "AutoencoderKL"}, None, "write a function"),
        ({"model_type": "gpt2"}, 0, "at least one token"),
    ],
)
def test_what_cannot_be_made_is_refused(config: dict[str, Any], length: int | None, why: str) -> None:
    with pytest.raises(InvalidData, match=why):
        by_config(config, length)


def test_the_length_is_of_configurations_alone(command: Any, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("def make_model():\n    pass\n")
    ran = command("fit", f"{script}:make_model", "--device", "h100", "--length", 8)
    assert ran.code == 2
    assert "a function makes its own call" in ran.err


@pytest.mark.thorough
def test_a_model_fits_by_its_configuration(command: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small("openai-community/gpt2")))
    ran = command("fit", tmp_path, "-d", "h100", "--batch", 4, "--length", 32, "-t", 1, "--local", "--json", "-q")
    found = json.loads(ran.out)
    assert found["model"] == "GPT2LMHeadModel"
    assert found["fixed_bytes"]["inputs"] == 4 * 32 * 8


def test_the_page_lists_the_presets() -> None:
    rows = [f"| `{name}` | {preset.parameters / 1e6:,.0f} |" for name, preset in presets().items()]
    text = PAGE.read_text().split("<!-- presets: begin -->\n\n")[1].split("\n\n<!-- presets: end -->")[0]
    assert text.split("\n")[2:] == rows, "\n".join(rows)


def test_a_rank_has_its_share_of_a_sequence_and_of_the_experts() -> None:
    """Tokens and experts are shared; an attention runs once with the keys and values of each rank."""
    mixtral = by_config(small("mistralai/Mixtral-8x7B-v0.1"), 256)
    whole, part = (target_step(mixtral, "h100", batch=2, parallel=parallel) for parallel in (None, "cp=4,ep=2"))
    assert (whole.step.fixed["inputs"], part.step.fixed["inputs"]) == (2 * 256 * 8, 2 * 64 * 8)
    experts = 2 * 2 * 3 * 64 * 128 * 4  # layers, experts fewer, products, their sizes
    assert whole.step.fixed["parameters"] - part.step.fixed["parameters"] == pytest.approx(experts, rel=0.05)
    llama = by_config({**small("meta-llama/Llama-3.2-1B"), "dtype": "bfloat16"}, 128)
    flow = target_step(llama, "h100", batch=2, parallel="cp=2").step.operations.flow
    prices = {cp: price(flow.kernels, target_of("h100"), cp=cp) for cp in (1, 2)}
    attention = [node for node, kind in prices[1].classes.items() if kind == "attention"]
    assert len(attention) == 2 * 2
    for node, once in prices[1].profiled.kernels.items():
        shared = prices[2].profiled.kernels[node]
        assert shared.cost_ns == once.cost_ns * (2 if node in attention else 1)
        assert (shared.workspace_bytes > once.workspace_bytes) == (node in attention)


@pytest.mark.parametrize(
    ("name", "parallel", "why"),
    [
        ("openai-community/gpt2", "ep=2", "a gpt2 has no experts"),
        ("mistralai/Mixtral-8x7B-v0.1", "ep=4", "ep=4 does not share 4 experts of which a token takes 2: .* at most 2"),
        ("mistralai/Mixtral-8x7B-v0.1", "ep=3", "write a divisor of 4"),
        ("meta-llama/Llama-3.2-1B", "cp=3", "cp=3 does not divide sequences of 64 tokens"),
        ("openai/whisper-small", "cp=2", "is not called with tokens"),
    ],
)
def test_what_ranks_cannot_share_is_refused(name: str, parallel: str, why: str) -> None:
    with pytest.raises(InvalidData, match=why):
        target_step(by_config(small(name), 64), "h100", batch=2, parallel=parallel)


@pytest.mark.parametrize(("name", "most"), [("openai-community/gpt2", 1024), ("FacebookAI/roberta-base", 512)])
def test_a_sequence_has_no_more_tokens_than_the_model_has_positions(name: str, most: int) -> None:
    with torch.device("meta"):
        by_config(small(name), most)()
        with pytest.raises(InvalidData, match=f"write --length {most} or less"):
            by_config(small(name), most + 1)()
        by_config(small("google-t5/t5-base"), 2048)()  # its positions are relative
