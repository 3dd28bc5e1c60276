"""Which ranks exchange by copy engines, and how they agree on it. The GPUs are played."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fodit import agreement
from fodit.kernels.binding import Library
from fodit.ops import connect, copies
from fodit.parallel import initialise

DEVICE = torch.device("cuda", 0)


class Played:
    """Copy engines that pass their test, but for the kinds in `wrong`."""

    def __init__(self, library, device, rank, outward, inward, direct, timeout_s):
        self.rank, self.direct, self.timeout_s = rank, direct, timeout_s
        self.partners = sorted(outward), sorted(inward)

    def __str__(self):
        return "direct" if self.direct else "staged"


def meet(case):
    """What `connect` gives this rank: kind, partners and time-out, or None; and the notes."""
    rank = dist.get_rank(control) if (control := initialise(torch.device("cpu"), 60)) else 0
    parts = case.get("groups", [list(range(dist.get_world_size()))])
    groups = [dist.new_group(part, backend="gloo") for part in parts]
    group = next(one for part, one in zip(parts, groups, strict=True) if rank in part)
    wrong = case.get("wrong", {}).get(rank, ())

    def test(made, *_):
        if str(made) in wrong:
            raise RuntimeError("came out wrong")

    def mapping(library, place, offset, size):
        if "mapping" in wrong:
            raise OSError("no such file")
        return SimpleNamespace(address=0, device_address=0)

    library = Library.__new__(Library) if case.get("library", True) else "no library"
    hosts = case.get("hosts", {})
    replaced = [
        (connect, "load", lambda: library),
        (connect, "Copies", Played),
        (connect, "_test", test),
        (connect, "PinnedMapping", mapping),
        (connect, "Direction", lambda memory, shape: memory),
        (connect, "uuid_of", lambda device: device if isinstance(device, int) else rank),
        (connect, "reaches", lambda device, other: {rank, other} not in case.get("apart", [])),
        (connect.socket, "gethostname", lambda: hosts.get(rank, "here")),
        (torch.cuda, "device_count", lambda: 4),
        (torch.cuda, "device", lambda _: nullcontext()),
    ]
    with ExitStack() as stack:
        for where, name, value in replaced:
            stack.enter_context(patch.object(where, name, value))
        stack.enter_context(patch.dict("os.environ", case.get("environment", {}).get(rank, {})))
        found, notes = connect.connect(group, DEVICE, control, timeout_s=100.0)
    return None if found is None else (str(found), found.partners, found.timeout_s), notes


def test_all_in_one_host(pool):
    for rank, (found, notes) in enumerate(pool.run(4, meet, {})):
        others = [other for other in range(4) if other != rank]
        assert found == ("direct", (others, others), 100.0) and notes == []


def test_gpus_that_do_not_reach_each_other(pool):
    """Only the group's own count: two pairs of linked cards exchange within the pairs."""
    apart = [{0, 2}, {0, 3}, {1, 2}, {1, 3}]
    pairs = {"groups": [[0, 1], [2, 3]], "apart": apart}
    assert [found[0] for found, _ in pool.run(4, meet, pairs)] == ["direct"] * 4
    assert [found[0] for found, _ in pool.run(4, meet, {"apart": [{0, 3}]})] == ["staged"] * 4
    mixed = {"groups": [[0, 1], [2, 3]], "apart": [{0, 1}]}
    assert [found[0] for found, _ in pool.run(4, meet, mixed)] == ["staged"] * 2 + ["direct"] * 2


@pytest.mark.parametrize("variables", [{"FODIT_EXCHANGE": "staged"}, {"NCCL_P2P_DISABLE": "1"}])
def test_peer_access_that_must_not_be_used(pool, variables):
    for found, notes in pool.run(2, meet, {"environment": {1: variables}}):
        assert found[0] == "staged" and notes == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"hosts": {1: "there"}}, "NCCL: the ranks are on 2 hosts"),
        ({"library": False}, "NCCL: no library"),
        ({"environment": {1: {"FODIT_EXCHANGE": "nccl"}}}, "NCCL: FODIT_EXCHANGE=nccl"),
    ],
)
def test_nccl_does_it(pool, case, words):
    for found, (note,) in pool.run(2, meet, case):
        assert found is None and words in note


def test_a_kind_that_fails_on_one_rank_is_used_on_none(pool):
    for found, (note,) in pool.run(3, meet, {"wrong": {2: ("direct",)}}):
        assert found[0] == "staged" and note == "no exchanges from GPU to GPU: RuntimeError: came out wrong"
    for found, notes in pool.run(2, meet, {"wrong": {0: ("direct",), 1: ("staged",)}}):
        assert found is None and len(notes) == 2 and "through host memory" in notes[1]
    for found, notes in pool.run(2, meet, {"wrong": {1: ("mapping",)}}):
        assert found is None and len(notes) == 2 and all("no such file" in note for note in notes)


def test_one_group_may_fail_alone(pool):
    case = {"groups": [[0, 1], [2, 3]], "wrong": {3: ("direct", "staged")}}
    found = [made for made, _ in pool.run(4, meet, case)]
    assert [made and made[0] for made in found] == ["direct", "direct", None, None]


def test_a_wrong_variable_is_an_error_on_all_ranks(pool):
    for text in pool.errors(2, meet, {"environment": {1: {"FODIT_EXCHANGE": "fast"}}}):
        assert "FODIT_EXCHANGE=fast is none of direct, staged, nccl" in text


class Numbers:
    """Exchanges of one rank with another that sends what it should, something else, or nothing."""

    device = torch.device("cpu")

    def __init__(self, sends):
        self.sends, self.given_up = sends, False

    def empty(self, count, like):
        return like.new_empty(count)

    def start(self, received, sent, ready, timeline):
        numbers = torch.arange(received[1].numel(), dtype=torch.int32)
        received[1].copy_(numbers + 100 + (self.sends == "others"))
        return lambda: None

    def check(self):
        pass

    def give_up(self):
        self.given_up = True


@pytest.mark.parametrize(("sends", "words"), [("numbers", None), ("others", "came out wrong"), ("none", "end in time")])
def test_the_test(sends, words):
    made = Numbers(sends)
    event = SimpleNamespace(record=lambda *_: None, query=lambda: sends != "none")
    with (
        patch.object(torch.cuda, "Event", lambda: event),
        patch.object(torch.cuda, "current_stream", lambda _: None),
        patch.object(connect, "TEST_SIZES", (1, 100)),
        pytest.raises(RuntimeError, match=words) if words else nullcontext(),
    ):
        connect._test(made, 0, 2, test_s=0.05)
    assert made.given_up == (words is not None), "the other ranks must not wait for this one"


def test_a_lost_rank_is_recognised():
    """Its reason is looked for, instead of taking this rank's own error for it."""
    broken = copies.Copies.__new__(copies.Copies)
    broken._directions = [SimpleNamespace(released=True)]
    with pytest.raises(ConnectionError) as caught:
        broken.check()
    assert agreement._lost_a_peer(caught.value)
    assert agreement._lost_a_peer(TimeoutError("another rank did not start exchange 3"))
    assert not agreement._lost_a_peer(FileNotFoundError("weights.safetensors"))
