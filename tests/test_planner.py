"""Profiles, the store, and what a planner answers, without a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from profiles import tiny_profile
from test_executor import KERNELS

from fodit.parallel import initialise
from fodit.plan import UlyssesLayout
from fodit.tune import codec, store
from fodit.tune.choice import Choice
from fodit.tune.explain import explain
from fodit.tune.planner import Planner, agreed_files
from fodit.tune.probe import like, with_kernels
from fodit.tune.profile import CUBLAS, Machine, Profile, nearest, shipped
from fodit.tune.search import Shape, partitions
from fodit.tune.shapes import model
from fodit.tune.store import Attention, HeadGroups, Plans

CPU = torch.device("cpu")


def test_profile_round_trip(tmp_path):
    for name, profile in shipped().items():
        path = tmp_path / f"{name}.json"
        profile.save(path)
        assert Profile.load(path, profile.machine) == profile


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(version=0), "has version 0, this fodit reads 1"),
        (lambda c: c["profile"].pop("pace"), "pace is missing"),
        (lambda c: c["profile"].update(speed=1), "speed is not known"),
        (lambda c: c["profile"]["alone"].pop("all_reduce"), "alone.all_reduce is missing"),
        (lambda c: c["profile"]["alone"]["all_reduce"].update(points=[[2, 1], [1, 1]]), "in the order of sizes"),
        (
            lambda c: c["profile"]["kernels"]["cublas"].update(tile_ms="fast"),
            "kernels.cublas.tile_ms is 'fast', not float",
        ),
        (lambda c: c["profile"].update(pace={"none": 1.0}), "pace has the key 'none', not int"),
        (lambda c: c["profile"].update(copy_gbs=-1.0), "must be above 0"),
        (lambda c: c["profile"].update(copy_gbs=True), "copy_gbs is True"),
        (lambda c: c.update(profile=[]), "the content is \\[\\], not an object"),
    ],
)
def test_broken_profiles(tmp_path, change, says):
    path = tmp_path / "one.profile.json"
    tiny_profile().save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(codec.FileError, match=says) as error:
        Profile.load(path)
    assert str(path) in str(error.value)


def test_half_a_file(tmp_path):
    path = tmp_path / "one.profile.json"
    path.write_text('{"version": 1, "prof')
    with pytest.raises(codec.FileError, match="cannot be read"):
        Profile.load(path)


def test_other_machines_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("FODIT_CACHE", str(tmp_path))
    profile = tiny_profile()
    machine = profile.machine
    profile.save(store.profile_path(machine))
    assert store.stored_profile(machine) == profile
    others = [
        replace(machine, gpus=("Tiny", "Huge")), replace(machine, gpus=("Tiny",) * 4), replace(machine, ranks=4),
        replace(machine, link="peer access"), replace(machine, nccl="2.1"), replace(machine, driver="14000"),
        replace(machine, compute_sms=8),
    ]  # fmt: skip
    assert len({one.key for one in (machine, *others)}) == 8
    for other in others:
        assert store.stored_profile(other) is None
        profile.save(store.profile_path(other))  # whatever a file is called
        with pytest.raises(codec.FileError, match="is of another machine: "):
            store.stored_profile(other)


def test_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FODIT_CACHE", "/a")
    assert store.folder() == Path("/a")
    monkeypatch.delenv("FODIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert store.folder() == Path("/b/fodit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.folder() == tmp_path / ".cache" / "fodit"


def make_plans(profile):
    plans = Plans(profile.machine)
    choice = Choice("all_reduce", True, (1, 2, 1), "ampere_128x128x32", 2, 5.0, 9.0, 6.0, 9.0, "tuned")
    plans.add(Shape("all_reduce", 1000, 640, 64, 2), choice)
    attention = Attention(100, 1, 2, 6, 64, 2)
    plans.add(attention.projection, replace(choice, op="all_to_all", slabs=(1, 2)))
    plans.add_groups(HeadGroups(attention, (1, 2), 3.0, 3.5, 4.0, "tuned"))
    return plans


def test_plans(tmp_path):
    profile = tiny_profile()
    plans = make_plans(profile)
    plans.save(tmp_path / "plans.json")
    assert Plans.load(tmp_path / "plans.json", profile.machine) == plans
    with pytest.raises(codec.FileError, match="another machine"):
        Plans.load(tmp_path / "plans.json", replace(profile.machine, nccl="3"))
    profile.save(tmp_path / "plans.json")
    with pytest.raises(codec.FileError, match="holds no plans"):
        Plans.load(tmp_path / "plans.json", profile.machine)


def test_planner():
    profile = tiny_profile()
    planner = Planner(profile, plans=make_plans(profile))
    tuned = planner.choice("all_reduce", 1000, 640, 64)
    assert tuned.source == "tuned" and tuned.gain == 1.5
    assert planner.choice("all_reduce", 1001, 640, 64) == tuned, "rows of uneven parts differ by one"
    other = planner.choice("all_reduce", 2000, 640, 64)
    assert other.source == "predicted from the measured profile" and other.measured_ms is None
    assert planner.choice("all_reduce", 2000, 640, 64) is other
    assert planner.choice("all_reduce", 1000, 640, 64, torch.float16) == tuned, "as fast in either 16-bit type"
    assert planner.choice("all_reduce", 1000, 640, 64, torch.float32) != tuned
    for dtype in (torch.bfloat16, torch.float16):
        assert planner.head_groups(100, 1, 6, 64, 2, dtype) == (1, 2)
    assert planner.head_groups(101, 1, 6, 64) in partitions(3)
    layout = UlyssesLayout(0, 2, 100, 1, 6, 64, (1, 2))
    mine = planner.product(layout.projection_plan, 384)
    assert (mine.kernel, mine.free_sms, mine.slabs, mine.source) == ("ampere_128x128x32", 2, (1, 2), "tuned")
    whole = planner.product(UlyssesLayout(0, 2, 100, 1, 6, 64).projection_plan, 384)
    assert whole.overlap and whole.slabs == (1,), "the product of what stays here runs beside the one exchange"
    assert whole.source != "tuned"
    assert len(planner.asked) == 10 and all(" ms" in line for line in planner.asked)
    # A kernel that this machine's library lacks is not promised.
    elsewhere = Planner(profile, plans=make_plans(profile), kernels=())
    assert elsewhere.choice("all_reduce", 1000, 640, 64).kernel is None


def agree(folder):
    """Each rank has a folder of its own; only rank 0's counts."""
    import os

    control = initialise(CPU, 60)
    rank = torch.distributed.get_rank(control)
    os.environ["FODIT_CACHE"] = f"{folder}/{rank}"
    profile = replace(tiny_profile(), taken=f"by rank {rank}")
    try:
        profile.save(store.profile_path(profile.machine))
        make_plans(profile).save(store.plans_path(profile.machine))
        torch.distributed.barrier(control)
        found, plans, notes = agreed_files(profile.machine, control)
        if rank == 0:
            store.profile_path(profile.machine).write_text("{}")
        torch.distributed.barrier(control)
        return found.taken, len(plans.tuned), notes, agreed_files(profile.machine, control)
    finally:
        del os.environ["FODIT_CACHE"]


def test_ranks_agree(pool, tmp_path):
    for taken, tuned, notes, (nothing, plans, why) in pool.run(2, agree, str(tmp_path)):
        assert (taken, tuned, notes) == ("by rank 0", 2, ())
        assert nothing is None and len(plans.tuned) == 2
        assert len(why) == 1 and "has version None" in why[0]


# Untuned machines, shapes of models, words


def test_nearest():
    known = shipped()
    cards = Machine(("NVIDIA GeForce RTX 4090",) * 2, 2, "host memory", "2.28.9", "13000", 128, 128)
    assert nearest(cards, known) == "h200-x2-no-p2p-nccl"
    assert nearest(replace(cards, link="peer access"), known) == "h200-x2-nvlink-nccl"
    assert nearest(replace(cards, compute_sms=24), known) == "h200-x2-consumer-nccl"
    assert nearest(replace(cards, link="host memory, copy engines"), known) == "h200-x2-no-p2p"
    assert nearest(replace(cards, link="peer access, copy engines"), known) == "h200-x2-nvlink"
    assert nearest(replace(cards, link="host memory, copy engines", compute_sms=24), known) == "h200-x2-consumer"


def test_kernels_that_a_profile_lacks():
    profile = shipped()["h200-x2-no-p2p"]
    assert with_kernels(profile, dict.fromkeys(profile.kernels, KERNELS[0])) == profile
    found = with_kernels(profile, {"new": replace(KERNELS[0], tile_m=128, tile_n=64)}).kernels["new"]
    known = profile.kernels[CUBLAS]
    assert (found.tile_m, found.tile_n) == (128, 64)
    assert known.tile(4096) / 4 < found.tile(4096) < known.tile(4096) / 3, "smaller, and a little slower for its size"
    assert like(known, 128, 256).tile(4096) == pytest.approx(known.tile(4096))


def test_shapes_of_models(tmp_path):
    found = model("CogVideoX-5b")
    assert (found.tokens, found.width, found.ffn, found.batch, found.parts) == (17776, 3072, 12288, 2, 2)
    assert found.attention(2).projection == Shape("all_to_all", 8888, 9216, 3072, 2, "bfloat16", 3, 64, 1)
    assert [(one.m, one.n, one.k) for one in found.tensor_parallel(2)[:2]] == [(35552, 3072, 1536), (35552, 3072, 6144)]
    assert model("CogVideoX-5b", cfg=2).batch == 1
    assert model("zai-org/CogVideoX1.5-5b").tokens == 11 * 48 * 85 + 226
    wan = model("Wan-AI/Wan2.1-T2V-14B-Diffusers")
    assert (wan.tokens, wan.width, wan.ffn, wan.batch) == (32760, 5120, 13824, 1)
    assert model("Wan2.2-TI2V-5B").tokens == 31 * 22 * 40
    assert model("Wan2.1-T2V-1.3B", 240, 416, 17).tokens == 5 * 15 * 26
    with pytest.raises(ValueError, match="is not a saved pipeline"):
        model(str(tmp_path))


def test_model_in_a_folder(tiny):
    with pytest.raises(ValueError, match="give --height, --width, --num-frames"):
        model(tiny("cogvideox-rope"))
    assert model(tiny("cogvideox-rope"), 64, 96, 9).tokens > 0
    assert model(tiny("wan2.1"), 64, 96, 9).batch == 1


def test_explain():
    text = explain("all_reduce", 17776, 3072, 6144, profile="h200-x2-no-p2p")
    for word in (
        "slabs",
        "SMs free",
        "predicted",
        "serial",
        "bound",
        "because",
        "communication takes longer",
        "shipped",
    ):
        assert word in text
    profile = tiny_profile()
    assert "measured    6.000 ms" in explain(
        "all_reduce", 1000, 640, 64, planner=Planner(profile, plans=make_plans(profile))
    )
    with pytest.raises(ValueError, match="neither a file, nor one of h200-x2-consumer"):
        explain("all_reduce", 1, 1, 1, profile="none")


def test_explain_takes_the_newest_stored_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("FODIT_CACHE", str(tmp_path))
    assert "shipped" in explain("all_reduce", 1024, 640, 64)
    tiny_profile().save(store.profile_path(tiny_profile().machine))
    assert "made up" in explain("all_reduce", 1024, 640, 64)
