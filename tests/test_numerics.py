"""In bf16 fodit is as near to the fp32 result as diffusers' own bf16 is."""

import pytest
import torch
from diffusers import CogVideoXPipeline, WanPipeline
from test_parity import CALL, SIZES, load

SEEDS = range(6)  # single runs scatter; the errors of several are compared


def latents(pipe, kind):
    pipe.set_progress_bar_config(disable=True)
    call = CALL | SIZES[kind] | {"output_type": "latent"}
    return [pipe(generator=torch.Generator().manual_seed(seed), **call).frames.double().cpu() for seed in SEEDS]


def error(found, wanted):
    squares = sum(float((f - w).square().sum() / w.square().sum()) for f, w in zip(found, wanted, strict=True))
    return (squares / len(wanted)) ** 0.5


@pytest.mark.parametrize("kind", ["cogvideox-rope", "cogvideox-sincos", "wan2.1"])
def test_bf16_is_as_good_as_diffusers(tiny, kind):
    plain = WanPipeline if kind == "wan2.1" else CogVideoXPipeline
    exact = plain.from_pretrained(tiny(kind), torch_dtype=torch.bfloat16)
    for model in (exact.transformer, exact.text_encoder):
        model.float()  # the same weights, as bf16 rounded them
    wanted = latents(exact, kind)
    theirs = error(latents(plain.from_pretrained(tiny(kind), torch_dtype=torch.bfloat16), kind), wanted)
    ours = load(tiny(kind), kind)
    ours = error(latents(type(ours).from_pretrained(tiny(kind), torch_dtype=torch.bfloat16), kind), wanted)
    assert 0 < ours <= 1.1 * theirs, (ours, theirs)
    print(kind, ours, theirs)
