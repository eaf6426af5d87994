"""A model and one call of it as fake tensors of a device, from the function that makes them.

The function runs with new tensors on the meta device, so that initialisation costs nothing and works where it does not
under fake tensors; then all of them become fake tensors of the device, in the dtype that was asked for.

On a CUDA device `scaled_dot_product_attention` chooses its kernels by asking the device
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). The same rules stand here: flash where it can, which is on
compute capability 8.0 and later, else memory-efficient, else the composite. cuDNN's kernels, last in that order, are
not chosen. What the process has switched off by `torch.nn.attention.sdpa_kernel` stays off.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from remat_ir import InvalidData

from .. import _compat
from .._compat import fake_cuda
from ..capture.call import CacheSwitch, check_module, example_call
from ..capture.dataflow import changed
from ..device import KINDS, NAMED, here
from ..device_flags import of_generation
from .configs import by_config, config_of

HALVES = (torch.float16, torch.bfloat16)


def choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    gqa: bool,
    *,
    capability: tuple[int, int] = (9, 0),
) -> str:
    """The kernels on a device of a generation: "flash", "efficient" or "math"."""
    early = capability < (8, 0)
    backend: Any = getattr(torch.backends, NAMED.type)
    four = all(t.dim() == 4 for t in (query, key, value))
    if not four or any(t.stride(-1) != 1 or 0 in t.shape for t in (query, key, value)):
        return "math"
    widths, heads = {t.shape[-1] for t in (query, key, value)}, {t.shape[1] for t in (query, key, value)}
    same_heads = len(heads) == 1
    if (
        backend.flash_sdp_enabled()
        and not early
        and mask is None
        and query.dtype in HALVES
        and len(widths) == 1
        and max(widths) <= 256
        and (same_heads or gqa)
        and not (causal and query.shape[2] != key.shape[2])
    ):
        return "flash"
    aligned = 8 if query.dtype in HALVES else 1 if early else 4
    if (
        backend.mem_efficient_sdp_enabled()
        and query.dtype in (*(HALVES[:1] if early else HALVES), torch.float32)
        and same_heads
        and not gqa
        and query.shape[-1] == key.shape[-1]
        and all(width % aligned == 0 for width in widths)
        and not (causal and mask is not None)
    ):
        return "efficient"
    return "math"


def _attention(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    found = choice(query, key, value, attn_mask, is_causal, enable_gqa, capability=capability)
    if found == "flash":
        width = int(query.shape[-1])
        scale = width**-0.5 if scale is None else scale
        pad = -width % 8
        if pad:
            query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
        made: tuple[Tensor, ...] = fake_cuda.FLASH_ATTENTION(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return made[0][..., :width] if pad else made[0]
    if found == "efficient":
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        made = fake_cuda.EFFICIENT_ATTENTION(query, key, value, bias, trains, dropout_p, is_causal, scale=scale)
        return made[0]
    made = fake_cuda.COMPOSITE_ATTENTION(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return made[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as what is added to the scores: its rows padded to a multiple of 16 bytes, then expanded."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device))
    pad = -int(mask.shape[-1]) % 16
    if pad and mask.shape[-1] == key.shape[2]:
        mask = torch.nn.functional.pad(mask, (0, pad))[..., : key.shape[2]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def dtype_of(text: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        InvalidData: there is none of that name to train in.
    """
    if text not in DTYPES:
        raise InvalidData(f"a step computes in one of {', '.join(DTYPES)}, not in {text!r}")
    return DTYPES[text]


def in_dtype(make_model: Callable[..., Any], dtype: str | None) -> Callable[..., Any]:
    """A function that makes the same model and call in a dtype; None: as they are.

    Raises:
        InvalidData: there is no such dtype.
    """
    if dtype is None:
        return make_model
    kind = dtype_of(dtype)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(kind) if tensor.is_floating_point() else tensor

    @functools.wraps(make_model)
    def made(*args: Any, **kwargs: Any) -> Any:
        found = make_model(*args, **kwargs)
        if not isinstance(found, (tuple, list)) or not isinstance(found[0], torch.nn.Module):
            return found  # `build` says what is wrong with it
        return found[0].to(kind), *(changed(value, cast) for value in found[1:])

    made.__signature__ = inspect.signature(make_model)  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def autocast(dtype: str | None) -> Iterator[None]:
    """Inside, a step is captured as under `torch.autocast` on a named device, which need not be here; None: as it is.

    Raises:
        InvalidData: there is no such dtype.
    """
    if dtype is None:
        yield
        return
    kind, place = dtype_of(dtype), NAMED.type
    before = torch.is_autocast_enabled(place), torch.get_autocast_dtype(place)
    # torch.autocast would do nothing, with a warning, where this machine has no such device
    torch.set_autocast_enabled(place, True)
    torch.set_autocast_dtype(place, kind)
    try:
        yield
    finally:
        torch.set_autocast_enabled(place, before[0])
        torch.set_autocast_dtype(place, before[1])
        torch.clear_autocast_cache()


CPU = torch.device("cpu")

FORM = (
    "SCRIPT:make_model, a file or a module and the function in it that returns (model, args); or a config.json of "
    "transformers or diffusers, a name in the hub's cache on this machine, or a preset such as gpt2"
)


class Built(NamedTuple):
    """A model with fake tensors, and one call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What to call it."""
        return type(self.model).__name__


def load(text: str, length: int | None = None) -> Callable[..., Any]:
    """The function that `SCRIPT:make_model` names, or that makes the model of a configuration: see `config_of`.

    SCRIPT is a Python file or a module's dotted name. Without `:name` it is `make_model`. A file's folder, or the
    current one, is where its imports are looked up.

    Args:
        length: tokens of a sequence of a model by its configuration; None: as for `by_config`.

    Raises:
        InvalidData: there is no such file, module or function, or importing it fails; the message says where.
    """
    config = None if ":" in text or text.endswith(".py") else config_of(text)
    if config is not None:
        return by_config(config, length)
    if length is not None:
        raise InvalidData("--length is for a model by its configuration; a function makes its own call")
    script, colon, name = text.rpartition(":")
    if not colon or "/" in name or name.endswith(".py"):
        script, name = text, "make_model"
    path = Path(script)
    is_file = path.suffix == ".py" or "/" in script
    if is_file and not path.is_file():
        raise InvalidData(f"there is no file {script}: write {FORM}")
    folder = str(path.resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = _import_file(path) if is_file else importlib.import_module(script)
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and f"{script}.".startswith(f"{error.name}."):
            raise InvalidData(f"there is no module {script}: write {FORM}") from None
        raise InvalidData(f"{script} cannot be imported: {said(error)}") from error
    except Exception as error:
        raise InvalidData(f"{script} cannot be imported: {said(error)}") from error
    found: object = getattr(module, name, None)
    if not callable(found):
        raise InvalidData(f"{script} has no function {name}: write {FORM}")
    return found


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for what looks itself up, such as dataclasses
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def tracing_for(device: torch.device, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Inside, steps of models with fake tensors of a device can be captured, with the kernels that it would choose.

    Args:
        capability: the device's generation, by which attention is chosen, and which models are given that ask CUDA.

    Raises:
        InvalidData: this build of torch cannot.
    """
    if device == here() or here() != CPU:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(fake_cuda.fake_cuda(device))
        except NotImplementedError as error:
            raise InvalidData(str(error)) from error
        # attention becomes the kernels of the device's choice, which differentiate as there
        kinds = "CUDA", "AutogradCUDA"
        chosen = functools.partial(_attention, capability)
        stack.enter_context(fake_cuda.replaced("scaled_dot_product_attention", kinds, chosen))
        stack.enter_context(of_generation(capability))
        stack.enter_context(fake_cuda.autocast_on(device.type))
        yield


def build(
    make_model: Callable[..., Any],
    device: torch.device,
    batch: int | None = None,
    part: Mapping[str, int] | None = None,
) -> Built:
    """What a function returns, on a device, as fake tensors; the model is in train mode.

    Args:
        make_model: returns `(model, args)` or `(model, args, kwargs)`: a module and one call of it, `args` as for
            `remat.optimize`. What it makes of tensors has no values.
        batch: given to the function as the argument `batch`.
        part: further arguments by name, which say what part of the model and of the call one rank has: `tp`, `cp`,
            `ep`, `stage`, `stages`.

    Raises:
        InvalidData: it raises, or returns something else.
    """
    name = getattr(make_model, "__name__", "make_model")
    given = {} if batch is None else {"batch": batch}
    given |= part or {}
    try:
        inspect.signature(make_model).bind(**given)
    except TypeError as error:
        want = f" and take the argument {' and '.join(given)}" if given else ""
        raise InvalidData(f"{name} must be callable without further arguments{want}: {error}") from None
    try:
        with fake_cuda.OnMeta(KINDS), torch.random.fork_rng(devices=[]):
            made = make_model(**given)
    except InvalidData:
        raise
    except Exception as error:
        hint = ""
        if "meta" in str(error):
            hint = "; its tensors have no values here: make those whose values it reads with device='cpu'"
        raise InvalidData(f"{name} fails: {said(error)}{hint}") from error
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3):
        raise InvalidData(f"{name} must return (model, args) or (model, args, kwargs), not {type(made).__name__}")
    model, args, kwargs = (*made, None)[:3]
    check_module(model)
    args, kwargs = example_call(args, kwargs)
    mode = _compat.FakeTensorMode(allow_non_fake_inputs=True)
    faked = _Faked(mode, device)
    faked.module(model)
    args, kwargs = changed(tuple(args), faked.tensor), changed(dict(kwargs), faked.tensor)
    return Built(model.train(), args, CacheSwitch(model).planned(args, kwargs))


class _Faked:
    """Fake tensors in place of others, the same one each time."""

    def __init__(self, mode: Any, device: torch.device) -> None:
        self._mode, self._device = mode, device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def module(self, model: nn.Module) -> None:
        """Exchange parameters, buffers and tensors that are attributes, of a module and all in it."""
        for part in model.modules():
            holders: tuple[Any, ...] = (_compat.parameters_of(part), _compat.buffers_of(part), part.__dict__)
            for own in holders:
                for name, value in list(own.items()):
                    if isinstance(value, torch.Tensor):
                        own[name] = self.tensor(value)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake one for a tensor."""
        known = self._made.get(id(tensor))
        if known is not None:
            return known[1]
        with torch.no_grad():
            found: torch.Tensor = _compat.FakeTensor(self._mode, tensor.detach().to("meta"), self._device)
        if isinstance(tensor, nn.Parameter):
            found = nn.Parameter(found, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            found.requires_grad_()
        self._made[id(tensor)] = tensor, found
        return found


def said(error: Exception) -> str:
    """An exception as one line, with the place in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{Path(torch.__file__).parent}" not in f.filename and "importlib" not in f.filename]
    own = [f for f in own if str(Path(__file__).parents[1]) not in f.filename]
    place = f" (at {Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line[:300]}{place}" if line else f"{type(error).__name__}{place}"
