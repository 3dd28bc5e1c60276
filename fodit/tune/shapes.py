"""The products of a model whose results are communicated."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fodit.testing import dummy
from fodit.tune.search import Shape
from fodit.tune.store import Attention


@dataclass(frozen=True)
class Model:
    """What of a transformer and a call decides the shapes.

    Args:
        name: for the user.
        heads, head_dim, ffn: of the transformer; its width is heads * head_dim.
        tokens: that attend to each other.
        batch: items of a forward.
        parts: in which the batch goes through attention, the exchange of one beside the computation of another.
    """

    name: str
    heads: int
    head_dim: int
    ffn: int
    tokens: int
    batch: int
    parts: int = 1

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def attention(self, ulysses: int, dtype: str = "bfloat16") -> Attention:
        batch = self.batch // self.parts
        return Attention(self.tokens, batch, self.parts, self.heads, self.head_dim, ulysses, dtype)

    def tensor_parallel(self, ranks: int, dtype: str = "bfloat16") -> list[Shape]:
        """The out projection and the second product of the MLP, each with either reducing collective."""
        rows = self.batch * self.tokens
        return [
            Shape(op, rows, self.width, -(-inner // ranks), ranks, dtype)
            for op in ("reduce_scatter", "all_reduce")
            for inner in (self.width, self.ffn)
        ]


def model(
    name: str,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    cfg: int = 1,
) -> Model:
    """A model and a call of it.

    Args:
        name: a name on Hugging Face, the folder of a saved pipeline, or one of `fodit.testing.dummy.MODELS`.
        height, width, num_frames: of the video, in pixels; None takes the model's usual ones.
        cfg: 2 where each pass of guidance has ranks of its own.

    Raises:
        ValueError: the model is not known, or not one of the two families.
    """
    transformer, vae, call = _settings(name)
    given = {"height": height, "width": width, "num_frames": num_frames}
    wanted = call | {key: value for key, value in given.items() if value is not None}
    if missing := [key for key in given if key not in wanted]:
        raise ValueError(f"{name}: give {', '.join('--' + key.replace('_', '-') for key in missing)}")
    heads, dim = transformer["num_attention_heads"], transformer["attention_head_dim"]
    kind = str(transformer.get("_class_name", ""))
    if kind.startswith("Wan"):
        patch = tuple(transformer["patch_size"])
        scale = (vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8))
        return Model(name, heads, dim, transformer["ffn_dim"], _video_tokens(wanted, scale, patch), 1)
    if not kind.startswith("CogVideoX"):
        raise ValueError(f"{name} is a {kind or 'model without _class_name'}; fodit runs CogVideoX and Wan")
    space = transformer["patch_size"]
    scale = (vae.get("temporal_compression_ratio", 4), 2 ** (len(vae.get("block_out_channels", (0,) * 4)) - 1))
    video = _video_tokens(wanted, scale, (transformer.get("patch_size_t") or 1, space, space))
    tokens = video + transformer.get("max_text_seq_length", 226)
    batch = 2 // cfg  # both passes of guidance in one forward, item after item
    return Model(name, heads, dim, 4 * heads * dim, tokens, batch, batch)


def _video_tokens(call: Mapping[str, int], scale: tuple[int, int], patch: tuple[int, ...]) -> int:
    """Patches of the latents; frames are filled up to whole patches."""
    frames = -(-((call["num_frames"] - 1) // scale[0] + 1) // patch[0])
    return frames * (call["height"] // scale[1] // patch[1]) * (call["width"] // scale[1] // patch[2])


def _settings(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Settings of transformer and VAE, and the usual call."""
    if Path(name).is_dir():
        return _json(Path(name) / "transformer"), _json(Path(name) / "vae"), {}
    try:
        known = dummy.config(name)
    except ValueError:
        return *_from_hub(name), {}
    return known["components"]["transformer"], known["components"]["vae"], known["call"]


def _json(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder.parent} is not a saved pipeline: {error}") from error


def _from_hub(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two small configuration files alone."""
    from huggingface_hub import hf_hub_download

    try:
        files = [hf_hub_download(name, f"{part}/config.json") for part in ("transformer", "vae")]
    except (OSError, ValueError) as error:
        known = ", ".join(dummy.MODELS)
        raise ValueError(f"no model {name!r}: neither a folder, nor on Hugging Face ({error}), nor {known}") from error
    transformer, vae = (json.loads(Path(file).read_text(encoding="utf-8")) for file in files)
    return transformer, vae
