"""The step benchmark's own logic on CPU."""

import argparse
import time
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from benches import CPU, MODELS, CpuSetting, arguments, on_cpu, run, weights
from diffusers import CogVideoXPipeline, WanPipeline

from fodit import FoWanPipeline
from fodit.bench import numerics, step, ways
from fodit.bench.model import make_model, twin
from fodit.bench.numerics import BAR, Comparison, call_in_fp32, in_fp32
from fodit.bench.ways import Diffusers, Fodit, Way, all_ways, chosen_ways
from fodit.testing import dummy


@pytest.mark.parametrize("name", MODELS)
def test_all_ways_of_one_process(cpu, name):
    rows, said = run("--model", name)
    first, compiled, ours = rows.values()
    assert list(rows) == ["diffusers, one GPU", "diffusers, one GPU, compiled", "fodit, one GPU"]
    assert first["error"] == 0 and compiled["error"] < 0.02 and 0 < ours["error"] < 0.05
    for row in rows.values():
        assert row["step_s"] > 0 and row["floor_s"] > 0 and row["sustained_floor_s"] > 0
        assert row["of_floor"] == row["step_s"] / row["floor_s"]
        assert row["of_sustained_floor"] == row["step_s"] / row["sustained_floor_s"]
        blocks_s = row["layer_ms"] * 2 / 1e3  # two layers
        assert 0 < blocks_s < row["step_s"]
        assert row["layer_of_floor"] == pytest.approx(blocks_s / row["floor_s"])
        assert row["layer_of_sustained_floor"] == pytest.approx(blocks_s / row["sustained_floor_s"])
        assert "ratio" not in row
    assert ours["notes"] == [] and "exposed_s" in ours
    assert len(said) == 2 + len(rows) and all("not run" not in line for line in said)


def test_predictions_are_beside_what_is_measured(cpu):
    rows, said = run("--model", MODELS[1], "--predict-from", "h200-x2-nvlink")
    assert rows["fodit, one GPU"]["predicted_layer_ms"] > 0 and "predicted" in said[1]
    assert "predicted_layer_ms" not in rows["diffusers, one GPU"]


def test_blocks_are_timed_and_nothing_else(cpu):
    """Each call of the transformers, of both where there are two, and only in steps after the first."""
    model = make_model(arguments("--model", "Wan2.2-T2V-A14B", "--steps", "4"), CPU)
    pauses = {"patch_embedding": 0.05, "proj_out": 0.05, "blocks": 0.01}
    for transformer in (model.plain.transformer, model.plain.transformer_2):
        for name, pause in pauses.items():
            module = transformer.blocks[1] if name == "blocks" else getattr(transformer, name)
            module.register_forward_pre_hook(lambda *_, pause=pause: time.sleep(pause))
    _, taken, blocks = step._generate(CpuSetting(), model.plain, model.call)
    assert 0.02 <= blocks < 0.1 and taken > 0.2 + blocks  # two calls a step
    assert not model.plain.transformer.norm_out._forward_pre_hooks
    assert not model.plain.transformer.condition_embedder._forward_hooks


def test_several_models(cpu):
    setting, saved = CpuSetting(), {}
    cpu.setattr(setting, "save", lambda path, results: saved.update({path: results["model"]}))
    given = ["--model", ",".join(MODELS), "--ways", "fodit, one"]
    step.run(setting, arguments(*given, "--save", "step-{model}.json"))
    assert saved == {f"step-{name}.json": name for name in MODELS}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--model", ",".join(MODELS), "--save", "step.json"], r"one file for 2 models: put \{model\} into its name"),
        (["--model", "CogVideoX-3b"], "no model CogVideoX-3b; there are CogVideoX-2b"),
        (["--model", MODELS[0], "--steps", "1"], "--steps 1: at least 2"),
        (["--model", MODELS[0], "--layers", "99"], "num_layers is 99; Wan2.1-T2V-1.3B can have 1 to 30"),
        (["--model", MODELS[0], "--head-groups", "1,x"], "--head-groups 1,x: give a number, or relative sizes"),
        (["--model", MODELS[0], "--head-groups", "0"], "--head-groups 0: give a number"),
        (
            ["--model", MODELS[0], "--predict-from", "h100"],
            "no profile 'h100': neither a file, nor one of h200-x2-cons",
        ),
        (["--model", MODELS[0], "--ways", "xdit|ulysses"], r"--ways xdit\|ulysses: in no name of diffusers, one GPU, "),
    ],
)
def test_arguments_are_checked_first(given, says):
    with pytest.raises(ValueError, match=says):
        step.check(arguments(*given))


@pytest.mark.parametrize("name", MODELS)
def test_numerics(cpu, name):
    made = []
    cpu.setattr(step, "make_model", lambda *given: made.append(make_model(*given)) or made[0])
    given = arguments("--model", name, "--ways", "fodit", "--numerics")
    before = weights(make_model(arguments("--model", name, "--steps", "10"), CPU).plain)
    setting = CpuSetting()
    step.run(setting, given)
    rows = {row["way"]: row for row in setting.saved["rows"]}
    assert list(rows) == ["diffusers, one GPU", "fodit, one GPU"], "the yardstick runs though it was not named"
    assert setting.saved["call"]["num_inference_steps"] == 10 and setting.saved["numerics_bar"] == BAR
    theirs, ours = rows.values()
    assert 0 < theirs["error_fp32"] < 0.1 and theirs["ratio"] == 1
    assert ours["ratio"] == pytest.approx(ours["error_fp32"] / theirs["error_fp32"])
    assert 0 < ours["ratio"] < 2
    after = weights(made[0].plain)
    assert all(after[key].dtype == before[key].dtype and torch.equal(after[key], before[key]) for key in before)


def test_fp32_is_undone_after_an_error(cpu):
    model = make_model(arguments("--model", MODELS[0], "--steps", "2"), CPU)
    before, allowed = weights(model.plain), torch.backends.cudnn.allow_tf32
    with pytest.raises(MemoryError), in_fp32([model.plain.transformer]):
        assert {weight.dtype for weight in model.plain.transformer.parameters()} == {torch.float32}
        assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
        raise MemoryError
    after = weights(model.plain)
    assert all(after[key].dtype == before[key].dtype and torch.equal(after[key], before[key]) for key in before)
    assert torch.backends.cudnn.allow_tf32 == allowed


def test_fp32_run_starts_from_the_same_noise(cpu):
    for name in MODELS:
        call = make_model(arguments("--model", name, "--steps", "2"), CPU).call
        assert call["latents"].dtype == (torch.float32 if name.startswith("Wan") else torch.bfloat16)
        widened = call_in_fp32(call)
        assert widened["latents"].dtype == widened["prompt_embeds"].dtype == torch.float32
        assert torch.equal(widened["latents"], call["latents"].float())
        assert widened["num_inference_steps"] == 2


@pytest.mark.parametrize("name", dummy.MODELS)
def test_noise_has_the_shape_that_the_pipeline_would_draw(name):
    cls = WanPipeline if name.startswith("Wan") else CogVideoXPipeline
    pipe = dummy.pipeline(name, cls, device="meta", num_layers=1)
    given = argparse.Namespace(model=name, layers=1, height=None, width=None, num_frames=None, steps=2)
    model = make_model(given, torch.device("meta"))
    call, config = model.call, pipe.transformer.config
    frames = call["num_frames"]
    if name == "CogVideoX1.5-5b":  # 21 latent frames, and one more to fill patches of two
        frames += 4
    size = (1, config.in_channels, frames, call["height"], call["width"])
    if name.startswith("Wan"):
        wanted = pipe.prepare_latents(1, config.in_channels, call["height"], call["width"], frames, device="cpu")
    else:
        wanted = pipe.prepare_latents(1, config.in_channels, *size[2:], torch.bfloat16, CPU, None)
    assert call["latents"].shape == wanted.shape


@pytest.mark.parametrize("name", MODELS)
def test_compilation_leaves_the_model_alone(cpu, name):
    model = make_model(arguments("--model", name, "--steps", "2"), CPU)
    compiled = Diffusers("compiled", compiled=True)
    frames = torch._dynamo.utils.counters["frames"]

    def traced(pipe):
        frames.clear()
        pipe(**model.call, generator=torch.Generator().manual_seed(0))
        return frames["total"]

    def compiled_modules(pipe):
        return sum(module._compiled_call_impl is not None for module in pipe.transformer.modules())

    with compiled.pipeline(CpuSetting(), model, None) as pipe:
        assert compiled_modules(pipe) == 2 and compiled_modules(model.plain) == 0
        assert traced(pipe) > 0
        assert traced(model.plain) == 0
    assert compiled_modules(model.fodit) == 0 and model.fodit.transformer is model.plain.transformer
    assert traced(model.plain) == 0


def test_twin_shares_weights_and_nothing_else(cpu):
    model = make_model(arguments("--model", "Wan2.2-T2V-A14B", "--steps", "2"), CPU)
    other = twin(model.plain)
    assert type(other) is WanPipeline and other.config.boundary_ratio == model.plain.config.boundary_ratio
    for role in ("transformer", "transformer_2"):
        mine, theirs = getattr(other, role), getattr(model.plain, role)
        assert mine is not theirs and not mine.training
        for (name, one), (_, two) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
            assert one.data_ptr() == two.data_ptr() and one.dtype == two.dtype, name
        for (name, one), (_, two) in zip(mine.named_buffers(), theirs.named_buffers(), strict=True):
            assert torch.equal(one, two) and one.dtype == two.dtype, name
    before = weights(model.plain)
    with in_fp32([other.transformer]):
        assert weights(model.plain).keys() == before.keys()
        assert model.plain.transformer.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


def test_a_peer_that_raises_is_shown_and_the_rest_goes_on(cpu):
    def fail(transformer):
        raise ValueError("no compiler\nhere")

    cpu.setattr(ways, "compile_blocks", fail)
    rows, said = run("--model", MODELS[0])
    assert rows["diffusers, one GPU, compiled"] == {
        "way": "diffusers, one GPU, compiled",
        "not_run": "ValueError: no compiler here",
    }
    assert rows["fodit, one GPU"]["step_s"] > 0
    assert any("compiled" in line and "not run: ValueError: no compiler here" in line for line in said)


def test_a_peer_with_wrong_results_has_no_time(cpu):
    whole = Diffusers.pipeline

    @contextmanager
    def spoiled(self, *given):
        with whole(self, *given) as pipe:
            if self.compiled:
                pipe.transformer.proj_out.weight = torch.nn.Parameter(-pipe.transformer.proj_out.weight)
            yield pipe

    cpu.setattr(Diffusers, "pipeline", spoiled)
    rows, _ = run("--model", MODELS[0], "--ways", "diffusers")
    assert rows["diffusers, one GPU"]["error"] == 0
    assert "differs from the first way" in rows["diffusers, one GPU, compiled"]["not_run"]
    assert "step_s" not in rows["diffusers, one GPU, compiled"]


@pytest.mark.parametrize("broken", [Fodit, Diffusers])
def test_a_required_way_that_raises_ends_the_run(cpu, broken):
    @contextmanager
    def fail(self, *given):
        raise ValueError("broken")
        yield

    cpu.setattr(broken, "pipeline", fail)
    with pytest.raises(ValueError, match="broken"):
        run("--model", MODELS[0], "--ways", "one GPU")


def test_fodit_is_detached_after_an_error(cpu):
    model = make_model(arguments("--model", MODELS[0], "--steps", "2"), CPU)
    with pytest.raises(KeyError), Fodit("fodit").pipeline(CpuSetting(), model, None) as pipe:
        pipe(**model.call)
        assert pipe._session.attachments
        raise KeyError
    assert not model.fodit._session.attachments
    assert isinstance(model.fodit, FoWanPipeline)


def two_ranks(name, texts):
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        whole = Diffusers.pipeline

        @contextmanager
        def fails_on_rank_1(self, *given):
            if self.compiled and self.ulysses == 1 and dist.get_rank() == 1:
                raise OSError("rank 1 has no disk")
            with whole(self, *given) as pipe:
                yield pipe

        patch.setattr(Diffusers, "pipeline", fails_on_rank_1)
        return run("--model", name, "--ways", texts, ranks=2)[0]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(pool, name):
    first, second = pool.run(2, two_ranks, name, "one GPU|fodit|context|xdit")
    assert list(first) == list(second)
    names = ["diffusers, one GPU", "diffusers, one GPU, compiled"]
    names += ["fodit, ulysses 2, no overlap", "fodit, ulysses 2", "fodit, ulysses 2, untimed"]
    names += ["fodit, cfg 2 x ulysses 1"]
    if name.startswith("Wan"):
        names += ["diffusers, context parallel 2", "diffusers, context parallel 2, compiled"]
    assert list(first) == [*names, "xDiT, ulysses 2"]
    for rows in (first, second):
        assert "rank 1 has no disk" in rows["diffusers, one GPU, compiled"]["not_run"], "on every rank"
        for way in names[2:6]:
            assert rows[way]["error"] < 0.05, way
        for way in names[6:]:  # diffusers asks for an accelerator
            assert "not_run" in rows[way]
        if find_spec("xfuser") is None:
            assert rows["xDiT, ulysses 2"]["not_run"] == "ModuleNotFoundError: No module named 'xfuser'"


def test_ways_that_do_not_fit_say_why(cpu):
    model = make_model(arguments("--model", MODELS[0], "--steps", "2"), CPU)  # 2 heads
    unfit = {way.name: way.unfit(4, model) for way in all_ways(4, True, True)}
    assert unfit["diffusers, one GPU"] is None and unfit["fodit, cfg 2 x ulysses 2"] is None
    assert "2 attention heads by 4 ranks" in unfit["fodit, ulysses 4"]
    for name in ("diffusers, context parallel 4", "diffusers, context parallel 4, compiled", "xDiT, ulysses 4"):
        assert unfit[name] == "2 heads do not divide by 4 ranks"
    model.call["guidance_scale"] = 1.0
    assert "one pass" in Fodit("", 2, 2).unfit(4, model)
    assert "there are 3 ranks" in Fodit("", 1, 2).unfit(3, make_model(arguments("--model", MODELS[0]), CPU))


def test_names():
    def names(*given):
        return [way.name for way in chosen_ways(*given)]

    assert names("context", 2, True) == ["diffusers, context parallel 2", "diffusers, context parallel 2, compiled"]
    assert names("context", 2, False) == []
    assert names("xDiT", 4, False) == ["xDiT, ulysses 4"]
    assert names("fodit, cfg", 4, True, True) == ["diffusers, one GPU", "fodit, cfg 2 x ulysses 2"]
    assert names("xDiT", 1, True) == [], "one rank has nothing to share"
    listed = any("xDiT" in name for name in names("", 2, True))
    assert listed == (find_spec("xfuser") is not None)
    assert {way.name: way.required for way in all_ways(2, True, True)} == {
        "diffusers, one GPU": True,
        "diffusers, one GPU, compiled": False,
        "fodit, ulysses 2, no overlap": True,
        "fodit, ulysses 2": True,
        "fodit, ulysses 2, untimed": True,
        "fodit, cfg 2 x ulysses 1": True,
        "diffusers, context parallel 2": False,
        "diffusers, context parallel 2, compiled": False,
        "xDiT, ulysses 2": False,
    }
    assert not Way("").required


def test_comparison():
    exact = torch.ones(100)
    compare = Comparison(exact)
    assert compare.errors(exact * 1.08) == pytest.approx({"error": 0, "error_fp32": 0.08, "ratio": 1})
    found = compare.errors(exact * 0.95)  # further than 0.1 from the first, within twice its own error
    assert found == pytest.approx({"error": 0.13 / 1.08, "error_fp32": 0.05, "ratio": 0.625}, rel=1e-5)
    with pytest.raises(RuntimeError, match=r"differs from the first way by 1\.000"):
        compare.errors(exact * 0)
    with pytest.raises(RuntimeError, match="nan"):
        Comparison().errors(exact * float("nan"))
    assert numerics.WORST_ERROR == 0.1 and Comparison().errors(exact) == {"error": 0}
