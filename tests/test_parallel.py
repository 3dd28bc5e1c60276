"""Degrees and devices: what is chosen, and what is refused in which words."""

import math

import pytest
import torch

from fodit import ParallelConfig
from fodit.parallel import ProcessGroups, rank_device


@pytest.mark.parametrize(
    "given, world, heads, wanted",
    [
        ({}, 1, 48, (1, 1)),
        ({}, 2, 48, (2, 1)),
        ({}, 3, 48, (1, 3)),
        ({}, 4, 48, (2, 2)),
        ({}, 8, 48, (2, 4)),
        ({}, 8, 4, (2, 4)),
        ({"cfg": 1}, 8, 30, (1, 8)),
        ({"ulysses": 2}, 4, 30, (2, 2)),
        ({"ulysses": 4}, 4, 30, (1, 4)),
        ({"ulysses": 1}, 2, 30, (2, 1)),
        ({"cfg": 2, "ulysses": 3, "ring": 1, "tp": 1}, 6, 12, (2, 3)),
    ],
)
def test_chosen_degrees(given, world, heads, wanted):
    chosen = ParallelConfig(**given).resolve(world, heads)
    assert (chosen.cfg, chosen.ulysses, chosen.ring, chosen.tp) == (*wanted, 1, 1)


def test_one_pass_needs_no_cfg():
    assert ParallelConfig().resolve(2, 12, guided=False).ulysses == 2


@pytest.mark.parametrize(
    "given, world, heads, words",
    [
        ({"cfg": 2, "ulysses": 2}, 2, 48, "2 x 2 = 4 ranks, but there are 2 ranks. What fits: cfg=1, ulysses=2 or"),
        ({"ulysses": 2}, 1, 48, "but there is 1 rank. What fits: cfg=1, ulysses=1$"),
        ({"ulysses": 3}, 4, 48, "1 x 3 = 3 ranks, but there are 4"),
        ({"ulysses": 4}, 4, 3, "divides 3 attention heads by 4 ranks. What fits: cfg=2, ulysses=2"),
        ({}, 9, 3, "a world size of at most 6, for 3 heads"),
        ({"cfg": 2}, 3, 48, "but there are 3 ranks. What fits: cfg=1, ulysses=3$"),
    ],
)
def test_degrees_that_do_not_fit(given, world, heads, words):
    with pytest.raises(ValueError, match=words):
        ParallelConfig(**given).resolve(world, heads)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"cfg": 3}, "cfg is 1 or 2"),
        ({"ulysses": 0}, "ulysses must be a whole number >= 1 or None, got 0"),
        ({"ulysses": 2.0}, "whole number"),
        ({"tp": 2}, "tp=2: tensor parallelism is not available yet"),
        ({"ring": 2}, "ring=2: ring attention is not available yet"),
        ({"timeout_s": 0}, "timeout_s must be seconds above 0"),
        ({"timeout_s": math.inf}, "timeout_s must be seconds above 0"),
        ({"timeout_s": math.nan}, "timeout_s must be seconds above 0"),
        ({"timeout_s": "10"}, "timeout_s must be seconds above 0, .* got '10'"),
        ({"max_ctas": 1.5}, "max_ctas must be a whole number >= 1 or None, got 1.5"),
        ({"max_ctas": "4"}, "max_ctas must be a whole number >= 1 or None, got '4'"),
        ({"speeds": 2}, "speeds must be whole numbers >= 1, .* got 2"),
        ({"speeds": ()}, r"speeds must be whole numbers >= 1, .* got \(\)"),
        ({"speeds": (True, 1)}, "speeds must be whole numbers"),
    ],
)
def test_degrees_that_are_none(given, words):
    with pytest.raises(ValueError, match=words):
        ParallelConfig(**given)


def test_speeds():
    config = ParallelConfig(cfg=2, ulysses=2, speeds=(3, 1), max_ctas=4)
    assert config.resolve(4, 8).speeds == (3, 1)
    with pytest.raises(ValueError, match=r"3 speeds \(3, 1, 1\) for ulysses=2: give one for each rank"):
        ParallelConfig(speeds=(3, 1, 1), cfg=1, ulysses=2).resolve(2, 8)
    for ranks, cfg in ((2, 1), (4, 2)):  # as many ranks to a sequence as speeds, where nothing else is said
        chosen = ParallelConfig(speeds=(2, 1)).resolve(ranks, 8)
        assert (chosen.cfg, chosen.ulysses) == (cfg, 2)
    with pytest.raises(ValueError, match=r"speeds must be whole numbers >= 1.* got \(1, 0\)"):
        ParallelConfig(speeds=(1, 0))
    with pytest.raises(ValueError, match="max_ctas must be a whole number >= 1 or None, got 0"):
        ParallelConfig(max_ctas=0)


def test_groups_of_ranks_that_never_met():
    with pytest.raises(RuntimeError, match=r"cfg=2.* needs 2 ranks .*: call initialise\(\) first"):
        ProcessGroups(ParallelConfig(cfg=2), torch.device("cpu"))


def test_device(monkeypatch):
    assert rank_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device() == torch.device("cpu")
    with pytest.raises(RuntimeError, match=r"device cuda was asked for, but torch .* sees no CUDA device"):
        rank_device("cuda")
    with pytest.raises(RuntimeError, match="device mps is not supported"):
        rank_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RuntimeError, match=r"wants cuda:2, but 2 GPU.* --nproc-per-node 2"):
        rank_device()
