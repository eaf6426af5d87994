"""A model by its configuration: a `config.json` of transformers or diffusers, a name in the hub's cache, or a preset.

Nothing is downloaded and no weights are read: the configuration is all that memory and time depend on.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remat_ir import InvalidData

LENGTH = 1024
"""Tokens of a sequence where none are asked for, at most as many as the model has positions."""


class Preset(NamedTuple):
    """A well-known model: its configuration, and how many parameters it has, by which a slip in that is seen."""

    parameters: int
    config: Mapping[str, Any]


@functools.cache
def presets() -> Mapping[str, Preset]:
    """The models that need no file, by the names that they have on the hub."""
    data = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    return {name: Preset(**each) for name, each in data.items()}


def config_of(text: str) -> Mapping[str, Any] | None:
    """The configuration that a text names; None: it names none.

    Args:
        text: the path of a `config.json` or of its folder, a preset's name, or one in the hub's cache.

    Raises:
        InvalidData: the file cannot be read, or is no configuration.
    """
    path = Path(text)
    if (path / "config.json").is_file():
        path = path / "config.json"
    by_name = {name.lower(): preset.config for name, preset in presets().items()}
    by_name |= {name.rpartition("/")[2]: config for name, config in by_name.items() if "unet" not in name}
    if text.lower() in by_name and not path.is_file():
        return by_name[text.lower()]
    if path.suffix != ".json":
        cached = _cached(text) if text.count("/") == 1 else None
        if cached is None:
            return None
        path = cached
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidData(f"the configuration {path} cannot be read: {error}") from None
    if not isinstance(data, dict) or not ("model_type" in data or "_class_name" in data):
        raise InvalidData(f"{path} is no configuration: it has neither model_type (transformers) nor _class_name")
    return data


def _cached(name: str) -> Path | None:
    """A configuration in the hub's cache on this machine."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    found = importlib.import_module("huggingface_hub").try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def by_config(config: Mapping[str, Any], length: int | None = None) -> Callable[..., Any]:
    """The function that makes a model and one training call of it at a batch, from a configuration.

    Args:
        length: tokens of a sequence; None: `LENGTH`, or as many as the model has positions.

    Raises:
        InvalidData: the library is not installed, or does not know the model.

    Example:
        >>> made = by_config(presets()["openai-community/gpt2"].config, 128)
        >>> made.__name__
        'GPT2LMHeadModel'
    """
    diffusion = "_class_name" in config
    library = "diffusers" if diffusion else "transformers"
    if importlib.util.find_spec(library) is None:
        raise InvalidData(f"a model by its configuration needs {library}: pip install {library}")
    if length is not None and length < 1:
        raise InvalidData(f"a sequence has at least one token, not {length}")
    found = importlib.import_module(library)
    return _diffusion(found, config) if diffusion else _transformer(found, config, length)


def _transformer(library: Any, config: Mapping[str, Any], length: int | None) -> Callable[..., Any]:
    kind, options = str(config["model_type"]), {k: v for k, v in config.items() if k != "model_type"}
    try:
        read = library.AutoConfig.for_model(kind, **options)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidData(f"transformers does not read this configuration: {error}") from None
    name = next(iter(config.get("architectures") or ()), None)
    architecture = getattr(library, name, None) if name else library.AutoModelForCausalLM
    if architecture is None:
        raise InvalidData(f"transformers {library.__version__} has no {name}")
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."))

    def make_model(batch: int = 1, cp: int = 1, ep: int = 1) -> Any:
        with_config = getattr(architecture, "_from_config", None) or architecture.from_config
        model = with_config(read if ep == 1 else _with_experts(read, ep)).to(dtype)
        return model, (), _call(type(model).__name__, read, batch, length, dtype, cp)

    make_model.__name__ = name or kind
    return make_model


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _with_experts(config: Any, ep: int) -> Any:
    """The configuration with one rank's experts, where `ep` ranks share them.

    Raises:
        InvalidData: the model has no experts, or they cannot be shared so.
    """
    field = next((name for name in _EXPERTS if getattr(config, name, None)), None)
    if field is None:
        raise InvalidData(f"ep={ep}: a {config.model_type} has no experts")
    experts, taken = int(getattr(config, field)), int(getattr(config, "num_experts_per_tok", None) or 1)
    if experts % ep or experts // ep < taken:
        most = max(d for d in range(1, experts + 1) if experts % d == 0 and experts // d >= taken)
        raise InvalidData(
            f"ep={ep} does not share {experts} experts of which a token takes {taken}: write a divisor of {experts}, "
            f"at most {most}"
        )
    part = copy.deepcopy(config)
    setattr(part, field, experts // ep)
    return part


def _call(name: str, config: Any, batch: int, length: int | None, dtype: torch.dtype, cp: int) -> dict[str, Any]:
    """The arguments of a training call, by what the class is for; of one rank, where `cp` share each sequence."""
    if cp > 1 and (name.endswith("ForImageClassification") or hasattr(config, "num_mel_bins")):
        raise InvalidData(f"cp={cp}: a {name} is not called with tokens")
    if name.endswith("ForImageClassification"):
        side = config.image_size
        pixels = torch.zeros(batch, getattr(config, "num_channels", 3), side, side, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or LENGTH
    if hasattr(config, "num_mel_bins"):
        tokens = torch.zeros(batch, min(length or config.max_target_positions, config.max_target_positions)).long()
        sound = torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
        return {"input_features": sound, "labels": tokens}
    most = positions - 2 if "roberta" in config.model_type else positions
    # relative positions have no end
    if length is not None and length > most and not hasattr(config, "relative_attention_num_buckets"):
        raise InvalidData(f"this model has {positions} positions: write --length {most} or less")
    whole = length or min(LENGTH, most)
    if whole % cp:
        raise InvalidData(f"cp={cp} does not divide sequences of {whole} tokens: write another --length")
    tokens = torch.zeros(batch, whole // cp, dtype=torch.long)
    if name.endswith("SequenceClassification"):
        return {"input_ids": tokens, "labels": torch.zeros(batch, dtype=torch.long)}
    with_loss = name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"))
    return {"input_ids": tokens, **({"labels": tokens} if with_loss else {})}


def _diffusion(library: Any, config: Mapping[str, Any]) -> Callable[..., Any]:
    name = str(config["_class_name"])
    architecture = getattr(library, name, None)
    if name != "UNet2DConditionModel" or architecture is None:
        raise InvalidData(f"of diffusers UNet2DConditionModel is called by its configuration, not {name}: {FUNCTION}")

    def make_model(batch: int = 1) -> Any:
        model = architecture.from_config(dict(config))
        side, width = config["sample_size"], config["cross_attention_dim"]
        sample = torch.zeros(batch, config["in_channels"], side, side)
        call: dict[str, Any] = {"timestep": torch.zeros(batch, dtype=torch.long)}
        call["encoder_hidden_states"] = torch.zeros(batch, 77, width)
        if config.get("addition_embed_type") == "text_time":
            given = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
            call["added_cond_kwargs"] = {"text_embeds": torch.zeros(batch, given), "time_ids": torch.zeros(batch, 6)}
        return model, (sample,), {**call, "return_dict": False}

    make_model.__name__ = name
    return make_model


FUNCTION = "write a function that makes the model and its call, SCRIPT:make_model"
