"""Bad input gives one clear error on every rank, and a failure on one rank ends the others."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from ranks import enter_rank, free_port
from test_parity import CALL, SIZES, load
from torch.distributed import distributed_c10d

from fodit import FoCogVideoXPipeline, FoWanPipeline, ParallelConfig
from fodit.agreement import RankError, digest, in_turns
from fodit.parallel import initialise
from fodit.pipelines import base
from fodit.pipelines.checkpoint import loading_turns


def refused(folder, kind, arguments, call):
    """Loading or the call must fail; weights must not have been loaded if loading did."""
    loaded = []
    original = base._place
    base._place = lambda *args: loaded.append(original(*args))
    try:
        pipe = load(folder, kind, **arguments)
        assert not call or loaded
        pipe(**CALL | SIZES[kind] | call)
    finally:
        base._place = original
        if not call:
            assert not loaded, "the weights were loaded first"


@pytest.mark.parametrize(
    "kind, arguments, words",
    [
        ("wan2.1", {"parallel": ParallelConfig(cfg=2, ulysses=2)}, "What fits: cfg=1, ulysses=2 or cfg=2, ulysses=1"),
        ("wan2.1", {"device": "cuda"}, "sees no CUDA device"),
        ("wan2.1", {"device_map": "balanced"}, "device_map does not go with fodit"),
        ("wan2.1", {"output_rank": 1}, "output_rank must be 0"),
        ("wan2.1", {"offload": "disk"}, "offload must be 'model', 'sequential' or None"),
        ("wan2.1", {"parallel": 2}, "parallel must be a fodit.ParallelConfig, such as ParallelConfig(cfg=2), got 2"),
        ("wan2.1", {"overlap": "no"}, "overlap must be True or False, got 'no'"),
        ("wan2.1", {"head_groups": 9}, "5 heads on 1 ranks allow head_groups 1 to 5, got 9"),
        ("wan2.1", {"head_groups": (1, 0)}, "head_groups must be a number >= 1 or relative sizes"),
        ("wan2.1", {"head_groups": 2.5}, "head_groups must be a number >= 1 or relative sizes"),
        ("wan2.1", {"head_groups": "abc"}, "head_groups must be a number >= 1 or relative sizes"),
    ],
)
def test_bad_arguments_on_every_rank(pool, tiny, kind, arguments, words):
    for error in pool.errors(2, refused, tiny(kind), kind, arguments, {}):
        assert words in error


@pytest.mark.parametrize(
    "kind, call, words",
    [
        ("cogvideox-rope", {"height": 52}, "have to be divisible by 8"),
        ("cogvideox-rope", {"height": 56, "width": 80}, "divisible by 16 for this model, got 56 x 80; 48 x 80 would"),
        ("wan2.1", {"width": 72}, "divisible by 16"),
        ("wan2.1", {"height": -16}, "height and width must be at least 1, got -16 x 80"),
        ("wan2.1", {"num_frames": 0}, "num_frames must be a whole number >= 1, got 0"),
        ("cogvideox-rope", {"num_frames": -3}, "num_frames must be a whole number >= 1, got -3"),
        ("wan2.1", {"prompt": None}, "Provide either `prompt` or `prompt_embeds`"),
        ("wan2.1", {"no_such": 1}, "unexpected keyword argument 'no_such'"),
    ],
)
def test_bad_call_on_every_rank(pool, tiny, kind, call, words):
    for error in pool.errors(2, refused, tiny(kind), kind, {}, call):
        assert words in error


def failed_then_mended(folder):
    """A call fails, on one rank or on both; the next one runs. Exchanges are given up and started anew."""
    said = []
    fake = SimpleNamespace(broken=False, check=lambda: None)
    fake.give_up = lambda: said.append("give up") or setattr(fake, "broken", True)
    fake.reset = lambda: said.append("reset") or setattr(fake, "broken", False)
    pipe = load(folder, "wan2.1", parallel=ParallelConfig(cfg=2, ulysses=1))  # does not exchange, so nothing waits
    pipe._session.groups.ulysses.copies = fake
    call = CALL | SIZES["wan2.1"]
    with pytest.raises(ValueError, match="divisible by 16"):
        pipe(**call | {"width": 72})
    pipe(**call)
    fake.check = lambda: (_ for _ in ()).throw(ConnectionError("the connection to another rank was lost"))
    with pytest.raises(RankError, match="stopped without giving a reason"):
        pipe(**call)
    fake.check = lambda: None
    pipe(**call)
    return said


def test_exchanges_are_mended_after_a_failure(pool, tiny):
    assert pool.run(2, failed_then_mended, tiny("wan2.1")) == [["give up", "reset"] * 2] * 2


def test_wrong_class(tiny):
    with pytest.raises(ValueError, match="is a WanPipeline checkpoint, FoCogVideoXPipeline loads CogVideoXPipeline"):
        FoCogVideoXPipeline.from_pretrained(tiny("wan2.1"))


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no model_index\.json"):
        FoWanPipeline.from_pretrained(tmp_path)


def test_other_transformer(tiny, tmp_path):
    folder = shutil.copytree(tiny("wan2.1"), tmp_path / "other")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("WanTransformer3DModel", "WanVACETransformer3DModel"))
    with pytest.raises(TypeError, match="is a WanVACETransformer3DModel; fodit runs CogVideoXTransformer3DModel, Wan"):
        FoWanPipeline.from_pretrained(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_truncated_weights(pool, tiny, tmp_path, ranks):
    folder = shutil.copytree(tiny("wan2.1"), tmp_path / "short")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    whole = weights.read_bytes()
    for keep in (len(whole) - 1, 100, 3):
        weights.write_bytes(whole[:keep])
        for error in pool.errors(ranks, refused, str(folder), "wan2.1", {}, {}):
            assert f"{weights} is truncated: it has {keep} bytes and should have" in error
    weights.write_bytes(bytes(8) + whole[8:])
    for error in pool.errors(ranks, refused, str(folder), "wan2.1", {}, {}):
        assert f"{weights} is no safetensors file" in error


@pytest.mark.parametrize("ranks", [1, 2])
def test_missing_weights(pool, tiny, tmp_path, ranks):
    folder = shutil.copytree(tiny("wan2.1"), tmp_path / "missing")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    for error in pool.errors(ranks, refused, str(folder), "wan2.1", {}, {}):
        assert "diffusion_pytorch_model" in error and "transformer" in error


def test_a_file_missing_on_one_rank(pool, tiny, tmp_path):
    root = tmp_path / "rank1"
    folder = shutil.copytree(tiny("wan2.1"), root)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    shutil.copytree(tiny("wan2.1"), tmp_path / "rank0")

    first, second = pool.errors(2, one_folder_per_rank, str(tmp_path))
    assert "RankError: loading failed on other ranks; rank 1: OSError" in first
    assert "OSError" in second and "vae" in second


def one_folder_per_rank(root):
    os.chdir(f"{root}/rank{os.environ['RANK']}")
    load(".", "wan2.1")


def disagree(folder, what):
    rank = int(os.environ["RANK"])
    if what == "overlap":
        load(folder, "wan2.1", overlap=rank == 0)
    if what == "parallel":  # chosen on one rank, given on the other: not the same, whatever the choice would be
        load(folder, "wan2.1", parallel=ParallelConfig(cfg=1 if rank else None, timeout_s=20))
    pipe = load(folder, "wan2.1")
    different = {
        "prompt": {"prompt": f"a boat {rank}"},
        "generator": {"generator": torch.Generator().manual_seed(rank)},
        "num_frames": {"num_frames": 5 + 4 * rank},
        "prompt_embeds": {"prompt": None, "prompt_embeds": torch.full((1, 512, 32), float(rank))},
        "guidance_scale": {"guidance_scale": np.float32(1 + rank)},
    }
    if what == "scheduler":
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=3.0 + rank)
    if what == "transformer with its adapters" and rank:
        pipe.transformer.blocks[0].ffn.net[2] = torch.nn.Sequential(pipe.transformer.blocks[0].ffn.net[2])
    pipe(**CALL | SIZES["wan2.1"] | {"negative_prompt": None} | different.get(what, {}))


ARGUMENTS = ["prompt", "generator", "num_frames", "prompt_embeds", "guidance_scale"]
COMPONENTS = ["scheduler", "transformer with its adapters"]


@pytest.mark.parametrize("what", ["overlap", "parallel", *ARGUMENTS, *COMPONENTS])
def test_ranks_that_disagree(pool, tiny, what):
    for error in pool.errors(2, disagree, tiny("wan2.1"), what):
        where = "from_pretrained" if what in ("overlap", "parallel") else "this call"
        assert f"the ranks disagree on the arguments of {where}" in error
        assert f"{what} is " in error and " on rank 0, " in error and " on rank 1" in error


def unknown_on_rank_1(folder):
    pipe = load(folder, "wan2.1")
    pipe(**CALL | SIZES["wan2.1"] | ({"no_such": 1} if os.environ["RANK"] == "1" else {}))


def test_a_call_that_only_one_rank_cannot_make(pool, tiny):
    first, second = pool.errors(2, unknown_on_rank_1, tiny("wan2.1"))
    assert "preparing this call failed on other ranks; rank 1: TypeError" in first
    assert "TypeError" in second and "no_such" in second


def used_again(folder):
    """Degrees chosen anew and a second pipeline of the same components; how many groups there are each time."""
    counts = []

    def frames(pipe):
        return pipe(**CALL | SIZES["wan2.1"] | {"generator": torch.Generator().manual_seed(0)}).frames

    pipe = load(folder, "wan2.1")
    for _ in range(3):
        first = frames(pipe)
        pipe.parallelize(ParallelConfig(cfg=1, ulysses=2))
        counts.append(len(distributed_c10d._world.pg_map))
    frames(pipe)
    with pytest.raises(ValueError, match="attached already: call detach"):
        frames(FoWanPipeline(**pipe.components))
    pipe.detach()
    return counts, float(abs(frames(FoWanPipeline(**pipe.components)) - first).max())


def test_pipelines_give_back_what_they_took(pool, tiny):
    for counts, difference in pool.run(2, used_again, tiny("wan2.1")):
        assert len(set(counts)) == 1, "process groups stay behind"
        assert difference < 1e-5


def take_turns(turns, fail):
    rank, control = int(os.environ["RANK"]), initialise(torch.device("cpu"), 60)

    def body():
        if rank == fail:
            raise ValueError("no disk")
        began = time.monotonic()
        time.sleep(0.05)
        return began, time.monotonic()

    return in_turns(control, turns, rank % turns, "loading", body)


def test_turns(pool):
    spans = pool.run(3, take_turns, 3, None)
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    together, other = pool.run(2, take_turns, 1, None)
    assert together[0] < other[1] and other[0] < together[1]
    for rank, error in enumerate(pool.errors(3, take_turns, 3, 1)):
        assert ("ValueError: no disk" if rank == 1 else "loading failed on other ranks; rank 1: ValueError") in error


def test_number_of_turns(tiny, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    size = sum(path.stat().st_size for path in Path(tiny("wan2.1")).glob("*/*.safetensors"))
    for available, wanted in [(4 * size, (1, 0)), (4 * size - 1, (4, 3))]:
        monkeypatch.setattr("psutil.virtual_memory", lambda a=available: SimpleNamespace(available=a))
        assert loading_turns(None, tiny("wan2.1")) == wanted
    assert loading_turns(None, "zai-org/CogVideoX-5b") == (1, 0)


def test_weights_that_do_not_fit():
    gib, device = 2**30, torch.device("cuda", 0)
    weights = {"text_encoder": 10 * gib, "transformer": 12 * gib, "vae": gib}
    base.check_fits(weights, 23 * gib, device)
    with pytest.raises(MemoryError, match=r"take 23\.0 GiB and cuda:0 has 22\.0 .*offload=.model. would"):
        base.check_fits(weights, 22 * gib, device)
    with pytest.raises(MemoryError, match="offload='sequential' would"):
        base.check_fits(weights, 11 * gib, device)
    base.check_fits(weights, 12 * gib, device, "model")
    with pytest.raises(MemoryError, match="offload='sequential' would"):
        base.check_fits(weights, 11 * gib, device, "model")
    base.check_fits(weights, gib, device, "sequential")
    base.check_fits({}, 0, device)


def test_digest_tells_values_apart():
    values = [
        None,
        0,
        0.0,
        "0",
        [0],
        {0},
        {0, 1},
        [0, 0],
        {"a": 0},
        {"b": 0},
        "x" * 300,
        "x" * 300 + "y",
        torch.zeros(2),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.ones(2),
        torch.zeros(3),
        torch.Generator().manual_seed(0),
        torch.Generator().manual_seed(1),
        np.float32(1),
        np.float32(3),
        np.int64(5),
        np.zeros(2),
        np.ones(2),
        len,
        print,
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(np.int64(5)) == digest(5) and digest({"a": 0, "b": 1}) == digest({"b": 1, "a": 0})
    used = torch.Generator().manual_seed(0)
    torch.randn(1, generator=used)
    assert digest(used) != digest(torch.Generator().manual_seed(0))


def fail_in_step_2(rank, port, folder, how, queue):
    enter_rank(rank, 2, port)
    torch.set_num_threads(1)
    pipe = load(folder, "wan2.1", parallel=ParallelConfig(timeout_s=30))
    began = time.monotonic()

    def callback(_pipe, index, _timestep, tensors):
        if rank == 1 and index == 1:
            if how == "raise":
                raise ValueError("no more paint")
            os._exit(9)
        return tensors

    try:
        pipe(callback_on_step_end=callback, **CALL | SIZES["wan2.1"])
    except Exception as error:  # noqa: BLE001 - the parent judges it
        queue.put((rank, type(error).__name__, str(error), time.monotonic() - began))


@pytest.mark.parametrize(
    "how, words", [("raise", "rank 1 failed: ValueError: no more paint"), ("die", "probably killed")]
)
def test_a_rank_that_fails_ends_the_others(tiny, how, words):
    context = mp.get_context("spawn")
    queue = context.Queue()
    port = free_port()
    arguments = (port, tiny("wan2.1"), how, queue)
    processes = [context.Process(target=fail_in_step_2, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert not process.is_alive(), "a rank hangs"
    found = {}
    while not queue.empty():
        rank, *rest = queue.get()
        found[rank] = rest
    kind, text, seconds = found[0]
    assert kind == RankError.__name__ and words in text and seconds < 30
    assert (1 in found) == (how == "raise")
