"""Tiny but complete CogVideoX and Wan checkpoints, written in a second and loaded like any other.

    python -m fodit.testing.tiny wan2.1 /tmp/wan
    WanPipeline.from_pretrained("/tmp/wan")

Each folder has the layout of a published one, with tokenizer, text encoder, transformer, VAE and scheduler,
and the real compression ratios (4 in time, 8 in space). There are 4 to 6 heads, so that every kind runs on
1 to 4 ranks and some split unevenly. Weights are random and none is neutral: scales of norms differ from one
and biases from zero, so a missing one changes the output.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLWan,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from .dummy import random_weight

KINDS = ("cogvideox-rope", "cogvideox-sincos", "cogvideox-1.5", "wan2.1", "wan2.2")

TEXT_CHANNELS = 32
LATENT_CHANNELS = 16
WORDS = (
    "a an and are at by cat child city close day dog drone falling field fire flying forest glass grass in "
    "is it light man moon mountain night of on over panda playing rain red river road running sea sitting "
    "sky slow small snow street sun the through tree under walking water wave white wind with woman wood"
)


def make(kind: str, folder: str | Path, *, seed: int = 0, overwrite: bool = False) -> Path:
    """Write the checkpoint `kind` (one of `KINDS`) into `folder` and return the folder as a `Path`.

    The same kind and seed give the same files, byte for byte. Needs no network. CogVideoX then generates 9
    frames of 96 x 64 pixels by default (1.5: 128 x 96, its largest). Wan's defaults are not in its folder but
    in diffusers, and large: pass height, width and num_frames.

    Raises:
        ValueError: `kind` is not one of `KINDS`.
        FileExistsError: `folder` exists, is not empty, and `overwrite` is false. With `overwrite` the files
            of the checkpoint replace those of the same name; others stay.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and (overwrite or not any(folder.iterdir()))):
        raise FileExistsError(f"{folder} is not an empty folder; choose another or pass overwrite=True")

    # Constructors draw initial values that are replaced below; the caller's random state must not notice.
    with torch.random.fork_rng(devices=[]):
        pipe = _wan(kind) if kind.startswith("wan") else _cogvideox(kind)
    for index, role in enumerate(sorted(pipe.components)):
        component = pipe.components[role]
        if isinstance(component, torch.nn.Module):
            _randomize(component, seed + index)
    with torch.no_grad():
        for parameter in pipe.vae.decoder.conv_out.parameters():
            parameter.mul_(0.4)  # so that few pixels are clipped to black or white
    pipe.save_pretrained(folder, safe_serialization=True)
    _name_tokenizer(folder)
    return folder


def _cogvideox(kind: str) -> CogVideoXPipeline:
    # inner width: 5 x 16, 6 x 8, 4 x 16. RoPE splits a head's channels 2:3:3 and needs multiples of 16.
    settings: dict[str, dict[str, Any]] = {
        "cogvideox-rope": {
            "num_attention_heads": 5,
            "num_layers": 2,
            "use_rotary_positional_embeddings": True,
        },
        "cogvideox-sincos": {"num_attention_heads": 6, "num_layers": 3, "attention_head_dim": 8},
        "cogvideox-1.5": {
            "num_attention_heads": 4,
            "num_layers": 2,
            "use_rotary_positional_embeddings": True,
            "patch_size_t": 2,
            "patch_bias": False,
            # The RoPE of 1.5 refuses anything larger than the default size, so leave some room.
            "sample_height": 12,
            "sample_width": 16,
        },
    }
    defaults = {"attention_head_dim": 16, "sample_height": 8, "sample_width": 12, "sample_frames": 9}
    transformer = CogVideoXTransformer3DModel(
        **defaults | settings[kind],
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        time_embed_dim=16,
        text_embed_dim=TEXT_CHANNELS,
    )
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(4, 4, 4, 4),
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=2,
        sample_height=64,
        sample_width=96,
        scaling_factor=1.15258426 if kind == "cogvideox-sincos" else 0.7,
    )
    scheduler_class = CogVideoXDPMScheduler if kind == "cogvideox-1.5" else CogVideoXDDIMScheduler
    scheduler = scheduler_class(
        clip_sample=False,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=3.0 if kind == "cogvideox-sincos" else 1.0,
        timestep_spacing="trailing",
    )
    tokenizer = _tokenizer(max_length=226)
    text_encoder = T5EncoderModel(T5Config(**_text_settings(tokenizer)))
    return CogVideoXPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
    )


def _wan(kind: str) -> WanPipeline:
    def transformer(heads: int, head_channels: int) -> WanTransformer3DModel:
        return WanTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=head_channels,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_CHANNELS,
            freq_dim=32,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=64,
        )

    vae = AutoencoderKLWan(base_dim=6, dim_mult=[1, 1, 1, 1], z_dim=LATENT_CHANNELS, num_res_blocks=1)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    tokenizer = _tokenizer(max_length=512)
    text_encoder = UMT5EncoderModel(UMT5Config(**_text_settings(tokenizer)))
    shared = {"tokenizer": tokenizer, "text_encoder": text_encoder, "vae": vae, "scheduler": scheduler}
    if kind == "wan2.1":
        return WanPipeline(**shared, transformer=transformer(heads=5, head_channels=16))
    return WanPipeline(
        **shared,
        transformer=transformer(heads=4, head_channels=8),
        transformer_2=transformer(heads=4, head_channels=8),
        boundary_ratio=0.875,
    )


def _text_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": TEXT_CHANNELS,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }


def _tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A unigram tokenizer as T5 has: some words, the printable ASCII characters, and bytes for other text."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"▁{word}", -4.0) for word in WORDS.split()]
    characters = [(c, -8.0) for c in "▁" + string.digits + string.ascii_letters + string.punctuation]
    bytes_ = [(f"<0x{byte:02X}>", -12.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(special + words + characters + bytes_, unk_id=2, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=max_length,
    )


def _name_tokenizer(folder: Path) -> None:
    """Name the tokenizer's class as every version of transformers knows it.

    Version 5 writes `TokenizersBackend`, of which `PreTrainedTokenizerFast` is an alias; version 4 has only
    the latter.
    """
    name = PreTrainedTokenizerFast.__name__
    for file in (folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(f'"{name}"', '"PreTrainedTokenizerFast"'), encoding="utf-8")


@torch.no_grad()
def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(random_weight(name, parameter.shape, spread=0.2, generator=generator))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fodit.testing.tiny", description="Write a tiny checkpoint.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    arguments = parser.parse_args(argv)
    try:
        make(arguments.kind, arguments.folder, seed=arguments.seed, overwrite=arguments.overwrite)
    except FileExistsError as error:
        parser.error(str(error).replace("overwrite=True", "--overwrite"))


if __name__ == "__main__":
    main()
