"""The operations of a layer, their floor, and what the predictor makes of them."""

import argparse
import itertools
import time
from functools import partial

import pytest
import torch
from benches import CPU, META, CpuSetting
from diffusers import CogVideoXPipeline, WanPipeline

from fodit.bench import floor, predicted, step
from fodit.bench.floor import Attention, Product, layer_floor, layer_work
from fodit.bench.model import make_model
from fodit.testing import dummy
from fodit.tune.predict import product_ms
from fodit.tune.profile import shipped


@pytest.mark.parametrize("ulysses", [1, 2])
def test_work_of_wan(ulysses):
    transformer = dummy.pipeline("Wan2.1-T2V-14B", WanPipeline, device="meta", num_layers=1).transformer
    rows, width = 32760 // ulysses, 5120
    work = layer_work(transformer, 1, 32760, 512, ulysses)
    assert work == [
        Product(rows, 3 * width, width),
        Attention(1, 40 // ulysses, 32760, 32760, 128),
        Product(rows, width, width),
        Product(rows, width, width),
        Product(512, 2 * width, width),
        Attention(1, 40, rows, 512, 128),
        Product(rows, width, width),
        Product(rows, 13824, width),
        Product(rows, width, 13824),
    ]
    block = transformer.blocks[0]
    text = {block.attn2.to_k, block.attn2.to_v}
    linears = [module for module in block.modules() if isinstance(module, torch.nn.Linear)]
    wanted = sum(2 * one.weight.numel() * (512 if one in text else rows) for one in linears)
    assert sum(one.flops for one in work if isinstance(one, Product)) == wanted
    assert work[1].flops == 4 * 32760**2 * width // ulysses and work[5].flops == 4 * rows * 512 * width


@pytest.mark.parametrize("ulysses", [1, 2])
def test_work_of_cogvideox(ulysses):
    transformer = dummy.pipeline("CogVideoX-5b", CogVideoXPipeline, device="meta", num_layers=1).transformer
    tokens, width = 17550 + 226, 3072
    rows = 2 * tokens // ulysses
    work = layer_work(transformer, 2, 17550, 226, ulysses)
    assert work == [
        Product(rows, 3 * width, width),
        Attention(2, 48 // ulysses, tokens, tokens, 64),
        Product(rows, width, width),
        Product(rows, 4 * width, width),
        Product(rows, width, 4 * width),
    ]
    block = transformer.transformer_blocks[0]
    linears = [m for part in (block.attn1, block.ff) for m in part.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(one.flops for one in work if isinstance(one, Product)) == sum(
        2 * one.weight.numel() * rows for one in linears
    )
    assert work[1].flops == 2 * 4 * tokens**2 * width // ulysses


def test_uneven_work_is_that_of_the_busiest_rank():
    transformer = dummy.pipeline("CogVideoX-2b", CogVideoXPipeline, device="meta", num_layers=1).transformer
    work = layer_work(transformer, 1, 100, 1, 4)  # 101 tokens, 30 heads
    assert work[0].m == 26 and work[1].heads == 8 and work[1].query == 101


def test_both_floors_run_the_same_operations(cpu):
    order = []

    class Counted:
        def __init__(self, name, ms):
            self.name, self.ms = name, ms

        def calls(self, device, dtype):
            return [partial(self.fail), partial(self.work, 5), partial(self.work, 1)]

        def fail(self):
            raise RuntimeError("no such kernel")

        def work(self, slower):
            order.append((self.name, slower))
            time.sleep(self.ms * slower / 1e3)

    cpu.setattr(floor, "SUSTAINED_MS", 60.0)
    found = layer_floor(CpuSetting(), [Counted("qkv", 4), Counted("attention", 8)], torch.float32)
    layers = order[4:]
    assert len(layers) // 2 in (4, 5)
    assert layers == [("qkv", 1), ("attention", 1)] * (len(layers) // 2), "the fastest calls, in order"
    assert 12 <= found.alone < 20 and 12 <= found.sustained < 20
    assert (found * 2).alone == 2 * found.alone and (found * 2).sustained == 2 * found.sustained


def test_operations_compute_what_they_say():
    (product,) = Product(3, 5, 7).calls(CPU, torch.float32)
    assert product().shape == (3, 5)
    flash, _ = Attention(2, 3, 16, 8, 32).calls(CPU, torch.bfloat16)
    assert flash().shape == (2, 3, 16, 32)
    broken = Attention(1, 1, 4, 4, 8)
    with pytest.raises(RuntimeError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(floor, "BACKENDS", floor.BACKENDS[1:])  # cuDNN
        floor._fastest(CpuSetting(), broken, torch.bfloat16)


@pytest.mark.parametrize("profile", ["nvlink", "no-p2p", "consumer"])
@pytest.mark.parametrize("name", ["Wan2.1-T2V-14B", "CogVideoX-5b"])
def test_predicted_layers(name, profile):
    """More ranks never take longer, nor less than their share by more than a better fill of the last waves."""
    known = shipped()[f"h200-x2-{profile}"]
    model = make_model(
        argparse.Namespace(model=name, layers=1, height=None, width=None, num_frames=None, steps=2), META
    )
    found = [predicted.layer_ms(known, step._layer(model, ranks, 1)[0], model.heads, ranks) for ranks in (1, 2, 4, 8)]
    for ranks, (before, after) in zip((2, 4, 8), itertools.pairwise(found), strict=True):
        assert before / 2.1 < after < before, ranks
    work, _ = step._layer(model, 1, 1)
    products = [product_ms(known, one.m, one.n, one.k) for one in work if isinstance(one, Product)]
    assert sum(products) < found[0]
