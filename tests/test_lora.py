"""LoRA adapters, as diffusers loads and fuses them with peft."""

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig
from test_parity import CALL, SIZES, load

from fodit import ParallelConfig

KINDS = ["cogvideox-rope", "wan2.1"]
TARGETS = {
    "cogvideox-rope": ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj"],
    "wan2.1": ["to_q", "to_v", "ffn.net.2"],
}


def add_adapter(pipe, kind):
    torch.manual_seed(3)
    config = LoraConfig(r=2, lora_alpha=16, init_lora_weights=False, target_modules=TARGETS[kind])
    pipe.transformer.add_adapter(config, "style")


def frames(pipe, kind):
    return pipe(generator=torch.Generator().manual_seed(5), **CALL | SIZES[kind]).frames


@pytest.fixture(scope="module")
def plain(tiny):
    """Frames of plain diffusers without and with the adapter."""

    def make(kind):
        cls = diffusers.WanPipeline if kind == "wan2.1" else diffusers.CogVideoXPipeline
        pipe = cls.from_pretrained(tiny(kind))
        without = frames(pipe, kind)
        add_adapter(pipe, kind)
        return without, frames(pipe, kind)

    return {kind: make(kind) for kind in KINDS}


def adapted(folder, kind):
    """Frames with the adapter added after a call, then fused, then gone; the notes of each call."""
    pipe = load(folder, kind, parallel=ParallelConfig(cfg=1))
    found = []
    for change in (
        lambda: None,
        lambda: add_adapter(pipe, kind),
        lambda: pipe.fuse_lora(components=["transformer"], adapter_names=["style"]),
        lambda: pipe.unfuse_lora(components=["transformer"]),
        pipe.unload_lora_weights,
    ):
        change()
        found.append((frames(pipe, kind), pipe.report.notes))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters(pool, tiny, plain, kind, ranks):
    without, style = plain[kind]
    assert np.abs(without - style).max() > 0.01, "the adapter does something"
    for found in pool.run(ranks, adapted, tiny(kind), kind):
        for (got, _), wanted in zip(found, (without, style, style, style, without), strict=True):
            np.testing.assert_allclose(got, wanted, atol=5e-5)
        notes = [notes for _, notes in found]
        falls_back = [any("peft.tuners.lora" in note for note in one) for one in notes]
        assert falls_back == [False, ranks == 2 or kind == "cogvideox-rope"] + falls_back[2:4] + [False]
