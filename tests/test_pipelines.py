"""What a user of the pipelines meets beside the right frames: noise, outputs, callbacks, reports, switches."""

import hashlib
import inspect
import warnings

import diffusers
import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline, WanPipeline
from test_parity import CALL, SIZES, generate, load

from fodit import FoCogVideoXPipeline, FoWanPipeline, ParallelConfig, Report
from fodit.models import ulysses
from fodit.pipelines.checkpoint import with_dtype


def digest(frames):
    return hashlib.sha256(np.ascontiguousarray(frames).tobytes()).hexdigest()


def without_generator(folder, kind, seed):
    pipe = load(folder, kind)
    torch.manual_seed(seed if torch.distributed.get_rank() == 0 else 12345)
    return [digest(pipe(**CALL | SIZES[kind]).frames) for _ in range(2)]


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_without_generator_all_ranks_use_rank_0s_noise(pool, tiny, kind):
    first, second = pool.run(2, without_generator, tiny(kind), kind, 1)
    assert first == second and first[0] != first[1]
    assert pool.run(2, without_generator, tiny(kind), kind, 1)[1] == first
    assert pool.run(2, without_generator, tiny(kind), kind, 2)[0] != first


def called_twice(folder, kind, cfg):
    """Model offloading is set up anew after every call."""
    options = {"expand_timesteps": True} if kind == "wan2.1" else {}
    pipe = load(folder, kind, parallel=ParallelConfig(cfg=cfg), offload="model", **options)
    found = []
    for _ in range(2):
        frames = pipe(generator=torch.Generator().manual_seed(0), **CALL | SIZES[kind]).frames
        found.append((digest(frames), pipe.report.ranks[0].median_step.communication_s > 0))
    return found


@pytest.mark.parametrize("cfg", [1, 2])
@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_offloaded_and_called_twice(pool, tiny, kind, cfg):
    for first, second in pool.run(2, called_twice, tiny(kind), kind, cfg):
        assert first == second and second[1]


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_offloaded_after_a_call(tiny, kind):
    """accelerate's hooks go around fodit's, and stay when these are taken away."""
    pipe = load(tiny(kind), kind, device="cpu")
    seen = lambda: digest(pipe(generator=torch.Generator().manual_seed(0), **CALL | SIZES[kind]).frames)  # noqa: E731
    first = seen()
    pipe.enable_model_cpu_offload(device="cpu")
    assert seen() == first and seen() == first
    pipe._session.detach()
    assert pipe.transformer._hf_hook is not None
    assert seen() == first, "attached again"


def output_on_rank_0(folder, kind, return_dict):
    pipe = load(folder, kind, output_rank=0)
    output = pipe(**CALL | SIZES[kind], return_dict=return_dict)
    frames = output.frames if return_dict else output[0]
    return None if frames is None else frames.shape, pipe.report.ranks


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_output_rank(pool, tiny, kind, return_dict):
    (first, ranks), (second, _) = pool.run(2, output_on_rank_0, tiny(kind), kind, return_dict)
    assert first == (1, 9, 48, 80, 3) and second is None
    assert ranks[0].decoding_s > 0 and ranks[1].decoding_s == 0


def with_callback(folder, kind, cfg):
    pipe, seen = load(folder, kind, parallel=ParallelConfig(cfg=cfg)), []

    def callback(_pipe, index, timestep, tensors):
        seen.append((index, float(timestep), sorted(tensors), bool(torch.isfinite(tensors["latents"]).all())))
        return {"latents": tensors["latents"] * 0.5}

    generator = torch.Generator().manual_seed(0)
    return pipe(generator=generator, callback_on_step_end=callback, **CALL | SIZES[kind]).frames, seen


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_callback(pool, tiny, kind):
    plain = (WanPipeline if kind == "wan2.1" else CogVideoXPipeline).from_pretrained(tiny(kind))
    halve = lambda _pipe, _i, _t, tensors: {"latents": tensors["latents"] * 0.5}  # noqa: E731
    generator = torch.Generator().manual_seed(0)
    wanted = plain(generator=generator, callback_on_step_end=halve, **CALL | SIZES[kind]).frames
    for cfg in (1, 2):
        for frames, seen in pool.run(2, with_callback, tiny(kind), kind, cfg):
            assert [index for index, *_ in seen] == [0, 1, 2] and all(one[2:] == (["latents"], True) for one in seen)
            np.testing.assert_allclose(frames, wanted, atol=2e-5)


def unguided(folder, kind):
    return generate(folder, kind, {"cfg": 2}, guidance_scale=1.0)


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_one_pass_with_cfg_2_is_right_and_said(pool, tiny, kind):
    plain = (WanPipeline if kind == "wan2.1" else CogVideoXPipeline).from_pretrained(tiny(kind))
    wanted = plain(generator=torch.Generator().manual_seed(5), guidance_scale=1.0, **CALL | SIZES[kind]).frames
    for frames, _, notes in pool.run(2, unguided, tiny(kind), kind):
        np.testing.assert_allclose(frames, wanted, atol=2e-5)
        assert len(notes) == 1 and "one pass in 3 calls" in notes[0] and "use cfg=1" in notes[0]


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_two_prompts(pool, tiny, kind):
    call = CALL | SIZES[kind] | {"prompt": ["a boat", "a hill"]}
    if kind == "wan2.1":
        call["negative_prompt"] = None
    plain = (WanPipeline if kind == "wan2.1" else CogVideoXPipeline).from_pretrained(tiny(kind))
    wanted = plain(generator=torch.Generator().manual_seed(5), **call).frames
    for cfg in (1, 2):
        for frames, *_ in pool.run(2, two_prompts, tiny(kind), kind, cfg, call["prompt"]):
            np.testing.assert_allclose(frames, wanted, atol=2e-5)


def two_prompts(folder, kind, cfg, prompt):
    negative = {"negative_prompt": None} if kind == "wan2.1" else {}
    return generate(folder, kind, {"cfg": cfg}, prompt=prompt, **negative)


def a_timestep_per_token(folder, cfg):
    pipe = load(folder, "wan2.1", parallel=ParallelConfig(cfg=cfg), expand_timesteps=True)
    return pipe(generator=torch.Generator().manual_seed(5), **CALL | SIZES["wan2.1"]).frames


def test_a_timestep_per_token(pool, tiny):
    plain = WanPipeline.from_pretrained(tiny("wan2.1"), expand_timesteps=True)
    wanted = plain(generator=torch.Generator().manual_seed(5), **CALL | SIZES["wan2.1"]).frames
    for ranks, cfg in [(1, 1), (3, 1), (4, 2)]:
        for frames in pool.run(ranks, a_timestep_per_token, tiny("wan2.1"), cfg):
            np.testing.assert_allclose(frames, wanted, atol=2e-5)


def two_pipelines(folders):
    cog = load(folders[0], "cogvideox-rope", parallel=ParallelConfig(cfg=2))
    wan = load(folders[1], "wan2.1", parallel=ParallelConfig(cfg=1), overlap=False)
    found = []
    for _ in range(2):
        for pipe, kind in ((cog, "cogvideox-rope"), (wan, "wan2.1")):
            found.append(digest(pipe(generator=torch.Generator().manual_seed(5), **CALL | SIZES[kind]).frames))
    assert (cog.report.parallel.ulysses, wan.report.parallel.ulysses) == (1, 2)
    return found


def test_two_pipelines_in_one_process(pool, tiny):
    first, second = pool.run(2, two_pipelines, [tiny("cogvideox-rope"), tiny("wan2.1")])
    assert first == second and first[:2] == first[2:]


def bars_and_report(folder, path):
    pipe = load(folder, "cogvideox-rope")
    disabled = [pipe.progress_bar(total=1).disable]
    pipe.set_progress_bar_config(desc="mine")
    disabled.append(pipe.progress_bar(total=1).disable)
    assert pipe.report is None
    pipe(**CALL | SIZES["cogvideox-rope"])
    if torch.distributed.get_rank() == 0:
        pipe.report.save(path)
    return disabled


def test_one_bar_and_the_report(pool, tiny, tmp_path):
    assert pool.run(2, bars_and_report, tiny("cogvideox-rope"), tmp_path / "r.json") == [[False] * 2, [True] * 2]
    report = Report.load(tmp_path / "r.json")
    assert (report.call.height, report.call.width, report.call.num_frames, report.call.steps) == (48, 80, 9, 3)
    assert report.model.pipeline == "FoCogVideoXPipeline" and report.call.guidance_passes == 2
    assert report.parallel.world_size == len(report.ranks) == 2 and report.parallel.cfg == 2
    for rank in report.ranks:
        assert rank.text_encoding_s > 0 and rank.decoding_s > 0 and rank.peak_memory_bytes > 2**20
        for step in rank.steps:
            assert 0 < step.exposed_s < step.wall_s and step.communication_s > 0
    assert "hidden" in str(report)


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_attention_backend_is_honoured(tiny, kind, monkeypatch):
    pipe = load(tiny(kind), kind)
    seen, dispatch = [], ulysses.dispatch_attention_fn

    def record(*args, backend=None, **kwargs):
        seen.append(getattr(backend, "value", backend))
        return dispatch(*args, backend=backend, **kwargs)

    monkeypatch.setattr(ulysses, "dispatch_attention_fn", record)
    call = CALL | SIZES[kind]
    first = pipe(generator=torch.Generator().manual_seed(1), **call).frames
    assert set(seen) == {None}
    seen.clear()
    pipe.transformer.set_attention_backend("_native_math")
    try:
        second = pipe(generator=torch.Generator().manual_seed(1), **call).frames
    finally:
        pipe.transformer.set_attention_backend("native")  # it is global in diffusers
    assert set(seen) == {"_native_math"}
    np.testing.assert_allclose(first, second, atol=2e-5)


def test_exchanged_transformer_is_attached(tiny):
    pipe = load(tiny("wan2.1"), "wan2.1")
    before = pipe(generator=torch.Generator().manual_seed(1), **CALL | SIZES["wan2.1"]).frames
    old, pipe.transformer = pipe.transformer, load(tiny("wan2.1"), "wan2.1").transformer
    after = pipe(generator=torch.Generator().manual_seed(1), **CALL | SIZES["wan2.1"]).frames
    assert np.array_equal(before, after)
    assert not any(type(block.attn1.processor).__module__.startswith("fodit") for block in old.blocks)
    assert all(type(block.attn1.processor).__module__.startswith("fodit") for block in pipe.transformer.blocks)


def test_made_from_components(tiny):
    plain = CogVideoXPipeline.from_pretrained(tiny("cogvideox-rope"))
    call = CALL | SIZES["cogvideox-rope"]
    wanted = plain(generator=torch.Generator().manual_seed(1), **call).frames
    pipe = load(tiny("cogvideox-rope"), "cogvideox-rope")
    pipe = type(pipe)(**plain.components)
    assert np.array_equal(pipe(generator=torch.Generator().manual_seed(1), **call).frames, wanted)
    assert pipe.report.parallel.world_size == 1


def save(folder, kind, target):
    load(folder, kind).save_pretrained(target)


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.2"])
def test_saved_for_diffusers_and_back(pool, tiny, kind, tmp_path):
    pool.run(2, save, tiny(kind), kind, tmp_path / "saved")
    call = CALL | SIZES[kind]
    wanted = load(tiny(kind), kind)(generator=torch.Generator().manual_seed(5), **call).frames
    plain = (WanPipeline if kind == "wan2.2" else CogVideoXPipeline).from_pretrained(tmp_path / "saved")
    np.testing.assert_allclose(plain(generator=torch.Generator().manual_seed(5), **call).frames, wanted, atol=2e-5)
    again = load(tmp_path / "saved", kind)
    assert np.array_equal(again(generator=torch.Generator().manual_seed(5), **call).frames, wanted)


def compiled(folder, kind):
    pipe = load(folder, kind, parallel=ParallelConfig(cfg=1))
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    return pipe(generator=torch.Generator().manual_seed(5), **CALL | SIZES[kind]).frames


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_a_compiled_transformer(pool, tiny, kind, ranks):
    wanted = load(tiny(kind), kind)(generator=torch.Generator().manual_seed(5), **CALL | SIZES[kind]).frames
    for frames in pool.run(ranks, compiled, tiny(kind), kind):
        np.testing.assert_allclose(frames, wanted, atol=2e-5)


@pytest.mark.parametrize("fo, plain", [(FoCogVideoXPipeline, CogVideoXPipeline), (FoWanPipeline, WanPipeline)])
def test_the_call_is_diffusers_own(fo, plain):
    assert inspect.signature(fo.__call__) == inspect.signature(plain.__call__)
    assert fo.__call__.__doc__ == plain.__call__.__doc__


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_either_name_of_the_dtype(tiny, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # diffusers' deprecations
        pipe = FoWanPipeline.from_pretrained(tiny("wan2.1"), device="cpu", **{name: torch.bfloat16})
    assert pipe.transformer.dtype == torch.bfloat16


def test_the_name_that_the_installed_diffusers_knows(monkeypatch):
    for version, name in (("0.39.0", "torch_dtype"), ("0.40.0.dev0", "dtype"), ("1.0.0", "dtype")):
        monkeypatch.setattr(diffusers, "__version__", version)
        for given in ("dtype", "torch_dtype"):
            assert with_dtype({given: torch.float16, "revision": "x"}) == {name: torch.float16, "revision": "x"}
    assert with_dtype({"torch_dtype": None}) == {}
    with pytest.raises(ValueError, match=r"dtype=torch\.float16 and torch_dtype=torch\.float32 are one argument"):
        with_dtype({"dtype": torch.float16, "torch_dtype": torch.float32})
