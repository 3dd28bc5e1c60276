"""Tiny pipelines on two GPUs: as near to fp32 as diffusers' own bf16, offloaded or not, on one rank or two."""

import functools

import pytest
import torch
from diffusers import CogVideoXPipeline, WanPipeline
from test_numerics import error, latents

from fodit import FoCogVideoXPipeline, FoWanPipeline, ParallelConfig

KINDS = ["cogvideox-rope", "cogvideox-sincos", "cogvideox-1.5", "wan2.1", "wan2.2"]


@pytest.fixture(scope="module")
def plain(tiny):
    """Latents of plain diffusers on one GPU: exact (the bf16 weights in fp32), and its bf16 error."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    def make(kind):
        cls = WanPipeline if kind.startswith("wan") else CogVideoXPipeline
        pipe = cls.from_pretrained(tiny(kind), torch_dtype=torch.bfloat16).to("cuda")
        half = latents(pipe, kind)
        for model in (pipe.transformer, getattr(pipe, "transformer_2", None), pipe.text_encoder):
            if model is not None:
                model.float()
        exact = latents(pipe, kind)
        return exact, error(half, exact)

    return functools.cache(make)


def run(folder, kind, parallel, options):
    cls = FoWanPipeline if kind.startswith("wan") else FoCogVideoXPipeline
    parallel = ParallelConfig(**parallel)
    pipe = cls.from_pretrained(folder, torch_dtype=torch.bfloat16, parallel=parallel, **options)
    found = latents(pipe, kind)
    return found, pipe.report.notes, pipe.report.ranks[0].median_step


@pytest.mark.gpu
@pytest.mark.parametrize("parallel", [{"cfg": 1}, {"cfg": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus(pool, tiny, plain, kind, parallel):
    exact, theirs = plain(kind)
    (first, notes, step), (second, *_) = pool.run(2, run, tiny(kind), kind, parallel, {})
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), "the ranks differ"
    assert error(first, exact) <= 1.1 * theirs
    assert notes == []
    assert step.communication_s > 0


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["model", "sequential"])
@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.2"])
def test_offload(pool, tiny, plain, kind, offload):
    exact, theirs = plain(kind)
    for found, _, _ in pool.run(2, run, tiny(kind), kind, {"cfg": 1}, {"offload": offload}):
        assert error(found, exact) <= 1.1 * theirs


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_one_gpu(pool, tiny, plain, kind):
    exact, theirs = plain(kind)
    ((found, notes, _),) = pool.run(1, run, tiny(kind), kind, {}, {})
    assert error(found, exact) <= 1.1 * theirs and notes == []


def run_again(folder, kind):
    """Of one pipeline with degrees chosen anew: the groups of the time before are given up."""
    pipe = FoWanPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16, parallel=ParallelConfig(cfg=1))
    found = [latents(pipe, kind)]
    for cfg in (2, 1):
        pipe.parallelize(ParallelConfig(cfg=cfg))
        found.append(latents(pipe, kind))
    return found


@pytest.mark.gpu
def test_degrees_chosen_anew(pool, tiny, plain):
    exact, theirs = plain("wan2.1")
    for first, second, third in pool.run(2, run_again, tiny("wan2.1"), "wan2.1"):
        assert all(torch.equal(x, y) for x, y in zip(first, third, strict=True))
        assert error(second, exact) <= 1.1 * theirs
