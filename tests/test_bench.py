"""The step benchmark's own logic on CPU: small models, all else is real but the GPU's clock."""

import argparse
import copy
import itertools
import json
import time
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from diffusers import CogVideoXPipeline, WanPipeline

from fodit import FoWanPipeline
from fodit.agreement import everyone
from fodit.bench import floor, numerics, predicted, step, ways
from fodit.bench.floor import Attention, Product, layer_floor, layer_work
from fodit.bench.model import make_model, twin
from fodit.bench.numerics import BAR, Comparison, call_in_fp32, in_fp32
from fodit.bench.ways import Diffusers, Fodit, Way, all_ways, chosen_ways
from fodit.parallel import initialise
from fodit.testing import dummy
from fodit.tune.predict import product_ms

MODELS = ("Wan2.1-T2V-1.3B", "CogVideoX-2b")
FULL_CONFIG = dummy.config
SIZE = ["--height", "32", "--width", "64", "--num-frames", "9"]
CPU, META = torch.device("cpu"), torch.device("meta")


class CpuSetting:
    """What a benchmark asks of `Setting`."""

    def __init__(self, ranks=1):
        self.device, self.ranks, self.profile = CPU, ranks, "cpu"
        self.control = initialise(CPU, 60) if ranks > 1 else None
        self.said, self.saved, self.sms, self.max_ctas = [], {}, 0, None

    @contextmanager
    def compute(self):
        yield

    def barrier(self):
        if self.control is not None:
            dist.barrier(self.control)

    def say(self, text):
        self.said.append(text)

    def time(self, work, repeats, warm_up):
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e3

    def slowest(self, times):
        return [max(one) for one in zip(*everyone(self.control, times), strict=True)]

    def save(self, path, results):
        self.saved = json.loads(json.dumps(results))


class CpuEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def small_config(name):
    """Few channels; all else stays as it is."""
    spec = copy.deepcopy(FULL_CONFIG(name))
    wan = name.startswith("Wan")
    spec["text_embedding"] = [16 if wan else 226, 32]
    changed = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    changed |= {"text_dim": 32, "ffn_dim": 64, "freq_dim": 32} if wan else {"text_embed_dim": 32, "time_embed_dim": 16}
    for role, settings in spec["components"].items():
        if role.startswith("transformer"):
            settings |= changed
    vae = spec["components"]["vae"]
    vae |= {"base_dim": 8, "num_res_blocks": 1} if wan else {"block_out_channels": [4] * 4, "norm_num_groups": 2}
    return spec


def on_cpu(patch):
    """Small models, and no GPU to wait for."""
    patch.setattr(dummy, "config", small_config)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "Event", CpuEvent)
    patch.setattr(floor, "SUSTAINED_MS", 1.0)
    patch.setitem(ways.COMPILE, "backend", "eager")  # traced by dynamo, not built by a C++ compiler


@pytest.fixture
def cpu(monkeypatch):
    on_cpu(monkeypatch)
    return monkeypatch


def arguments(*given):
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    parser.add_argument("--save")
    return parser.parse_args([*SIZE, *given])


def run(*given, ranks=1):
    """The rows by name of way, and the lines of the table."""
    setting = CpuSetting(ranks)
    step.run(setting, arguments(*given))
    return {row["way"]: row for row in setting.saved["rows"]}, setting.said


def weights(pipe):
    return {name: weight.detach().clone() for name, weight in pipe.transformer.named_parameters()}


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


@pytest.mark.parametrize("profile", ["nvlink", "no-p2p", "consumer"])
@pytest.mark.parametrize("name", ["Wan2.1-T2V-14B", "CogVideoX-5b"])
def test_predicted_layers(name, profile):
    """More ranks never take longer, nor less than their share by more than a better fill of the last waves."""
    known = predicted.known_profile(f"h200-x2-{profile}")
    model = make_model(
        argparse.Namespace(model=name, layers=1, height=None, width=None, num_frames=None, steps=2), META
    )
    found = [predicted.layer_ms(known, step._layer(model, ranks, 1)[0], model.heads, ranks) for ranks in (1, 2, 4, 8)]
    for ranks, (before, after) in zip((2, 4, 8), itertools.pairwise(found), strict=True):
        assert before / 2.1 < after < before, ranks
    work, _ = step._layer(model, 1, 1)
    products = [product_ms(known, one.m, one.n, one.k) for one in work if isinstance(one, Product)]
    assert sum(products) < found[0]


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
        (["--model", MODELS[0], "--predict-from", "h100"], r"no profile h100: neither a file nor one of h200-x2-cons"),
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
