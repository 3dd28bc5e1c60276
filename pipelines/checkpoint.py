"""What a checkpoint says of itself, read and checked before any weights load."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import psutil
import torch
import torch.distributed as dist
from diffusers import ConfigMixin, DiffusionPipeline

from fodit.agreement import everyone
from fodit.models.attachment import FAMILIES

_HUB_ARGUMENTS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision")
TRANSFORMERS = ("transformer", "transformer_2")
DTYPE, OLD_DTYPE, RENAMED = "dtype", "torch_dtype", (0, 40)  # the weights' type, before diffusers 0.40 and since


def with_dtype(arguments: dict[str, Any]) -> dict[str, Any]:
    """`from_pretrained`'s arguments, with the weights' type under the name that the installed diffusers has for it.

    Older ones ignore `dtype`, newer ones warn of `torch_dtype` on every rank; scripts may use either name with any.

    Raises:
        ValueError: both are given.
        TypeError: what is given is no type, for which diffusers would take float32.
    """
    given = {name: arguments[name] for name in (DTYPE, OLD_DTYPE) if arguments.get(name) is not None}
    if len(given) > 1:
        raise ValueError(f"dtype={given[DTYPE]} and torch_dtype={given[OLD_DTYPE]} are one argument: give one of them")
    for name, value in given.items():
        if not isinstance(value, torch.dtype | dict):
            raise TypeError(f"{name} must be a torch.dtype such as torch.bfloat16, got {value!r}")
    rest = {name: value for name, value in arguments.items() if name not in (DTYPE, OLD_DTYPE)}
    renamed = tuple(map(int, diffusers.__version__.split(".")[:2])) >= RENAMED
    return rest | {DTYPE if renamed else OLD_DTYPE: value for value in given.values()}


def fewest_heads(pipeline: type[DiffusionPipeline], source: str | Path, arguments: dict[str, Any]) -> int:
    """Attention heads of the checkpoint's transformers, the fewest where there are two.

    Args:
        pipeline: the class that is to load the checkpoint.
        source: local folder or hub id.
        arguments: of `from_pretrained`; components given there are not looked up.

    Raises:
        FileNotFoundError: the folder has no model_index.json.
        ValueError: the checkpoint is of another pipeline, or a weights file is truncated.
        TypeError: a transformer fodit cannot run.
    """
    source = str(source)
    if Path(source).is_dir():
        if not (Path(source) / "model_index.json").is_file():
            raise FileNotFoundError(f"{source} has no model_index.json: give a folder that save_pretrained() wrote")
        check_weights(Path(source))
    hub = {name: arguments[name] for name in _HUB_ARGUMENTS if name in arguments}
    index = pipeline.load_config(source, **hub)
    named, wanted = index.get("_class_name", "").removeprefix("Fo"), pipeline.__name__.removeprefix("Fo")
    if named != wanted:
        raise ValueError(f"{source} is a {named} checkpoint, {pipeline.__name__} loads {wanted} checkpoints")
    heads = []
    for name in TRANSFORMERS:
        given = arguments.get(name)
        kind = type(given).__name__ if given is not None else (index.get(name) or [None, None])[1]
        if name in arguments and given is None or kind is None:
            continue
        family = next((one for cls, one in FAMILIES.items() if cls.__name__ == kind), None)
        if family is None:
            known = ", ".join(cls.__name__ for cls in FAMILIES)
            raise TypeError(f"the {name} of {source} is a {kind}; fodit runs {known}")
        config: Any = given.config if given is not None else _config(family.transformer, source, name, hub)
        heads.append(config["num_attention_heads"])
    if not heads:
        raise ValueError(f"{source} has no transformer")
    return min(heads)


def _config(transformer: Any, source: str, name: str, hub: dict[str, Any]) -> dict[str, Any]:
    assert issubclass(transformer, ConfigMixin)
    return dict(transformer.load_config(source, subfolder=name, **hub))


def loading_turns(control: dist.ProcessGroup | None, source: str | Path) -> tuple[int, int]:
    """How many turns the ranks of a machine take to load, and which is this rank's; the same number on all ranks.

    All at once if the host has room for the checkpoint once per rank; otherwise one after the other, each placing its
    weights on its GPU before the next one starts. Only a local folder's size is known beforehand.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    weights = [path for kind in ("safetensors", "bin") for path in Path(source).glob(f"*/*.{kind}")]
    needed = ranks * sum(path.stat().st_size for path in weights)
    turns = ranks if needed > psutil.virtual_memory().available else 1
    turns = max(everyone(control, turns))
    return turns, int(os.environ.get("LOCAL_RANK", "0")) % turns


def check_weights(folder: Path) -> None:
    """Raise ValueError if a .safetensors file below `folder` is shorter than its own header says."""
    for path in sorted(folder.glob("*/*.safetensors")):
        size = path.stat().st_size
        wanted = max(_extents(path, size), default=0)
        if size < wanted:
            raise ValueError(f"{path} is truncated: it has {size} bytes and should have {wanted}; fetch it again")


def _extents(path: Path, size: int) -> Iterator[int]:
    """Least sizes the file must have, as far as its beginning tells."""
    yield 8
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        yield 8 + header
        if 8 + header <= size:
            try:
                entries = json.loads(file.read(header))
            except ValueError as error:
                raise ValueError(f"{path} is no safetensors file: its header is not JSON; fetch it again") from error
            yield from (8 + header + e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__")
