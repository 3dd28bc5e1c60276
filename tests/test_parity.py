"""Every way of running gives what plain diffusers gives in one process."""

import diffusers
import numpy as np
import pytest
import torch

from fodit import FoCogVideoXPipeline, FoWanPipeline, ParallelConfig

CALL = {"prompt": "a boat on a lake", "num_inference_steps": 3, "output_type": "np"}
SIZES = {
    "cogvideox-rope": {"height": 48, "width": 80, "num_frames": 9},
    "cogvideox-sincos": {"height": 64, "width": 48, "num_frames": 5},
    "cogvideox-1.5": {"height": 48, "width": 64, "num_frames": 9},
    "wan2.1": {"height": 48, "width": 80, "num_frames": 9, "negative_prompt": "rain"},
    "wan2.2": {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 4},
}


def load(folder, kind, **kwargs):
    cls = FoWanPipeline if kind.startswith("wan") else FoCogVideoXPipeline
    return cls.from_pretrained(folder, torch_dtype=torch.float32, **kwargs)


def generate(folder, kind, parallel=None, overlap=True, head_groups=None, **call):
    """What one rank does; returns its frames and the number of steps its report has."""
    pipe = load(folder, kind, parallel=ParallelConfig(**(parallel or {})), overlap=overlap, head_groups=head_groups)
    generator = torch.Generator().manual_seed(5)
    frames = pipe(generator=generator, **CALL | SIZES[kind] | call).frames
    assert pipe.report is not None
    return frames, [len(rank.steps) for rank in pipe.report.ranks], pipe.report.notes


@pytest.fixture(scope="module")
def plain(tiny):
    """Frames of plain diffusers."""
    made = {}

    def frames(kind, **call):
        key = (kind, *call.items())
        if key not in made:
            cls = diffusers.WanPipeline if kind.startswith("wan") else diffusers.CogVideoXPipeline
            pipe = cls.from_pretrained(tiny(kind), torch_dtype=torch.float32)
            pipe.set_progress_bar_config(disable=True)
            made[key] = pipe(generator=torch.Generator().manual_seed(5), **CALL | SIZES[kind] | call).frames
        return made[key]

    return frames


def check(results, wanted, ranks):
    for frames, _, _ in results:
        error = np.linalg.norm(frames - wanted) / np.linalg.norm(wanted)
        assert error < 1e-5
        assert np.array_equal(frames, results[0][0]), "all ranks return the same"
    steps = results[0][1]
    assert len(steps) == ranks and len(set(steps)) == 1


@pytest.mark.parametrize("kind", SIZES)
def test_one_process(tiny, plain, kind):
    check([generate(tiny(kind), kind)], plain(kind), 1)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ranks, cfg", [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("kind", SIZES)
def test_ranks(pool, tiny, plain, kind, ranks, cfg, overlap):
    results = pool.run(ranks, generate, tiny(kind), kind, {"cfg": cfg}, overlap)
    check(results, plain(kind), ranks)
    assert results[0][2] == []


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1", "wan2.2"])
def test_cards_of_different_speed(pool, tiny, plain, kind):
    check(pool.run(2, generate, tiny(kind), kind, {"cfg": 1, "speeds": (3, 1)}), plain(kind), 2)


@pytest.mark.parametrize("head_groups", [1, 2, (1, 2)])
@pytest.mark.parametrize("kind", ["cogvideox-sincos", "wan2.1"])
def test_head_groups(pool, tiny, plain, kind, head_groups):
    check(pool.run(2, generate, tiny(kind), kind, {"cfg": 1}, True, head_groups), plain(kind), 2)
