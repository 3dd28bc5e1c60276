"""Measuring, tuning and recording with the GPU played by the CPU: that every step fits the next one."""

import argparse
import json
import re
import time
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_executor import played_kernels

from fodit.bench import ops
from fodit.kernels import gemm
from fodit.ops import Communicator
from fodit.parallel import initialise
from fodit.tune import measure, operation, probe, record, store, tuner, works
from fodit.tune import planner as planning
from fodit.tune.choice import Choice
from fodit.tune.clock import Clock
from fodit.tune.profile import COLLECTIVES, CUBLAS, Machine, Profile, nearest, shipped
from fodit.tune.search import Shape
from fodit.tune.shapes import Model
from fodit.tune.store import Attention, Plans

CPU = torch.device("cpu")
KB = 1 << 10


class Event:
    """Recorded when the host gets there, since the host does all the work."""

    def __init__(self, **_):
        self.time = 0.0

    def record(self, *_):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return (other.time - self.time) * 1e3


class Stream:
    cuda_stream = 0

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass


@contextmanager
def played_gpu():
    """torch.cuda by the host, kernels by torch, small sizes."""
    properties = SimpleNamespace(name="Played", multi_processor_count=24)
    stream = Stream()
    replaced = [
        *((torch.cuda, name, lambda *_, **__: None) for name in ("synchronize", "_sleep", "set_device")),
        (torch.cuda, "Event", Event),
        (torch.cuda, "Stream", lambda *_, **__: stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "can_device_access_peer", lambda *_: True),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "get_device_properties", lambda _: properties),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda.nccl, "version", lambda: (2, 28, 9)),
        (gemm, "binding", lambda: SimpleNamespace(wait=lambda *_: None)),
        (measure, "driver_version", lambda: "13000"),
        (measure, "SIZES", (KB, 4 * KB)),
        (measure, "BESIDE_SIZES", (KB, 2 * KB)),
        (measure, "CASES", ((1, 8), (2, 8), (1, 16), (2, 16))),
        (measure, "COLUMNS", 2),
        (probe, "COLUMNS", 2),
        (measure, "LONG_K", 8),
        (measure, "LONG_COLUMNS", 2),
        (measure, "LONG_MS", 1e-6),
        (measure, "ROUNDS", 2),
        (works, "ATTENTION_TOKENS", 64),
        (measure, "ATTENTION_TOKENS", 64),
        (probe, "SIZES", (KB, 4 * KB)),
        (probe, "PRODUCT_K", 8),
        (probe, "PRODUCT_ROWS", 1),
        (tuner, "TRIED", 2),
        (tuner, "TRIED_GROUPS", 2),
        (tuner, "FINAL_REPEATS", 2),
    ]
    with ExitStack() as stack:
        stack.enter_context(played_kernels())
        for where, name, value in replaced:
            stack.enter_context(patch.object(where, name, value))
        yield stream


def started(stream):
    """Clock and communicator of this rank, on a played stream."""
    control = initialise(CPU, 60)
    comm = Communicator(dist.group.WORLD, CPU)
    comm.stream = stream
    return Clock(CPU, control), comm


def measured():
    with played_gpu() as stream:
        clock, comm = started(stream)
        machine = measure.this_machine(comm, clock.control)
        said = []
        return measure.measure(machine, comm, clock, say=said.append, dtype=torch.float32), said


def test_driver_version_without_a_driver():
    version = measure.driver_version()
    assert version == "unknown" or int(version) >= 12000


def test_measure(pool):
    (profile, said), (other, _) = pool.run(2, measured)
    assert profile.machine == Machine(("Played",) * 2, 2, profile.machine.link, "2.28.9", "13000", 24, 24)
    assert set(profile.alone) == set(COLLECTIVES) and set(profile.kernels) == {CUBLAS, "wide", "small"}
    assert set(profile.beside["all_to_all"]) == {CUBLAS, "attention", "0", "2", "4"} and set(profile.pace) == {0, 2, 4}
    assert len(said) == 6
    assert profile == other, "all ranks predict alike"


def tuned(folder):
    with played_gpu() as stream, patch.dict("os.environ", FODIT_CACHE=folder):
        clock, comm = started(stream)
        machine = measure.this_machine(comm, clock.control)
        profile = measure.measure(machine, comm, clock, dtype=torch.float32)
        kernels = operation.shared_kernels(CPU, clock.control, torch.float32)
        said = []
        one = tuner.Tuner(profile, Plans(machine), comm, clock, kernels, said.append)
        with patch.object(Shape, "__init__", _float(Shape.__init__)):
            one.model(Model("tiny", 6, 8, 96, 50, 2, 2), 2, 2)
        if clock.rank == 0:
            profile.save(store.profile_path(machine))
        dist.barrier(clock.control)
        with patch.object(planning, "shared_kernels", lambda *_: kernels):
            planner = planning.planner_for(comm, clock.control)
        return said, one.plans, store.stored_plans(machine), planner.plans


def _float(init):
    def changed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        object.__setattr__(self, "dtype", "float32")

    return changed


def test_tuner(pool, tmp_path):
    (said, plans, stored, planned), (_, other, *_) = pool.run(2, tuned, str(tmp_path))
    assert plans == other == stored == planned
    assert len(said) == 1 + 2 + 4
    assert {one.shape.op for one in plans.tuned} == {"all_to_all", "all_reduce", "reduce_scatter"}
    assert all(one.choice.measured_ms for one in plans.tuned) and plans.groups[0].measured_ms


def recorded(folder):
    with played_gpu() as stream, patch.object(record, "model", lambda _: Model("tiny", 4, 8, 8, 24, 1)):
        clock, comm = started(stream)
        setting = SimpleNamespace(
            device=CPU,
            control=clock.control,
            rank=clock.rank,
            ranks=comm.size,
            compute_sms=24,
            sms=0,
            profile="nvlink",
            say=lambda _: None,
            compute=nullcontext,
            describe=dict,
        )
        with (
            patch.multiple(record, BEST=2, OTHERS=2, EXHAUSTIVE=2, nccl_options=lambda: None),
            patch.object(dist, "new_group", lambda **_: dist.group.WORLD),
            patch.object(record, "connected", lambda *_: comm),
            patch.object(comm, "gemm_sms", lambda _: 20),
        ):
            record.Recorder(setting, folder, 2, record.LIMIT_S).run()


def test_record(pool, tmp_path):
    pool.run(2, recorded, tmp_path)
    profile = Profile.load(tmp_path / "profile-nvlink.json")
    assert profile.machine.gpus == ("Played", "Played")
    content = json.loads((tmp_path / "validation-nvlink.json").read_text())
    kinds = {row["kind"] for shape in content["shapes"] for row in shape["rows"]}
    assert kinds == {"chosen", "static", "exhaustive", "final"}


@contextmanager
def ops_bench(stream, seen):
    """`fodit.bench.ops` with everything played; yields the setting."""
    clock, comm = started(stream)
    setting = SimpleNamespace(
        device=CPU, control=clock.control, rank=clock.rank, ranks=comm.size, compute_sms=24, sms=0, max_ctas=None,
        profile="no-p2p", say=seen.append, compute=nullcontext, save=lambda path, results: seen.append(results),
    )  # fmt: skip
    with (
        patch.multiple(ops, nccl_options=lambda _: None, Communicator=lambda group, _: comm if group else Alone()),
        patch.object(dist, "new_group", lambda **_: dist.group.WORLD),
        patch.object(Shape, "__init__", _float(Shape.__init__)),
        patch.object(ops, "measure", partial(measure.measure, dtype=torch.float32)),
        patch.object(ops, "untuned", partial(planning.untuned, dtype=torch.float32)),
        patch.object(ops, "shared_kernels", partial(operation.shared_kernels, dtype=torch.float32)),
    ):
        yield setting


def benched():
    seen = []
    with played_gpu() as stream, ops_bench(stream, seen) as setting:
        parser = argparse.ArgumentParser()
        ops.add_arguments(parser)
        parser.add_argument("--save")
        ops.run(setting, parser.parse_args(["--shapes", "64,512,16", "--repeats", "2"]))
        return seen


def checked():
    """Right results count, whatever the plan; others do not."""
    with played_gpu() as stream, ops_bench(stream, []) as setting:
        bench = ops.Bench(setting, 1)
        for op in ops.OPERATIONS:
            plain = operation.Operation(Shape(op, 1024, 512, 16, 2), bench.plain)
            for slabs, kernel in (((1, 1), "small"), ((1,), "wide"), ((1, 1), None)):
                choice = Choice(op, True, slabs, kernel, 2, 1.0, 1.0, None, None, "")
                twice = 2 * bench._checked(plain, choice)()
                wrong = patch.object(operation.Operation, "overlapped", lambda *_, twice=twice: twice)
                with wrong, pytest.raises(RuntimeError, match="differs from the serial result"):
                    bench._checked(plain, choice)


class Alone(Communicator):
    def __init__(self):
        super().__init__(None, CPU)


def test_bench_ops(pool):
    pool.run(2, checked)
    for seen in pool.run(2, benched):
        (*_, rows) = [one["rows"] for one in seen if isinstance(one, dict)]
        assert [row["op"] for row in rows] == list(ops.OPERATIONS)
        for row in rows:
            assert all(row[name] > 0 for name in ops.COLUMNS if name != "async_tp") and row["async_tp"] is None
            assert row["fraction"] == row["bound"] / row["fodit"] and row["plan"] and row["untuned_plan"]
        assert sum("of cuBLAS (means)" in one for one in seen if isinstance(one, str)) == 3


def test_shapes_of_benchmarks():
    assert ops.parse_shapes("1,2,3/4,5,6") == [(1, 2, 3), (4, 5, 6)]
    for wrong in ("1,2", "1,2,0", "1,2,3,4"):
        with pytest.raises(ValueError, match="give M,N,K"):
            ops.parse_shapes(wrong)


def untuned(folder, variables):
    """The planner of a machine that nobody measured, and its answers."""
    with played_gpu() as stream, patch.dict("os.environ", FODIT_CACHE=folder, **variables):
        clock, comm = started(stream)
        assert planning.planner_for(Communicator(None, CPU), None) is None
        planner = planning.planner_for(comm, clock.control, dtype=torch.float32)
        choice = planner.choice("all_reduce", 4096, 1024, 1024, torch.float32)
        return planner.profile, planner.source, choice, planner.head_groups(4000, 1, 12, 64), planner.asked


def test_a_kernel_that_is_wrong_is_noted():
    with played_gpu():
        assert operation.distrusted(CPU, torch.float32) == ()
    with played_kernels(broken=(0,)):
        (note,) = operation.distrusted(CPU, torch.float32)
        assert note.startswith("the kernel wide is not used: its result")


def test_untuned(pool, tmp_path):
    one, other = pool.run(2, untuned, str(tmp_path), {})
    assert one == other
    profile, source, choice, groups, asked = one
    assert profile.machine.gpus == ("Played", "Played")
    said = r", probed \(times as long, of [\d., ]+ MiB: all_reduce [\d., ]+; .*; products [\d.]+\); before that 20"
    assert re.search(said, profile.taken)
    assert source.endswith("scaled by a probe") and choice.source == source and sum(groups) and len(asked) == 2
    assert {"wide", "small"} < set(profile.kernels)


def test_untuned_without_a_probe(pool, tmp_path):
    one, other = pool.run(2, untuned, str(tmp_path), {"FODIT_NO_PROBE": "1"})
    assert one == other
    known = shipped()
    name = nearest(one[0].machine, known)
    assert one[0].alone == known[name].alone and one[0].machine.gpus == ("Played", "Played")
    assert one[1] == f"predicted from the shipped profile {name}"


def symmetric(reachable, hosts):
    """What `_async_tp` says of each operation, and how often torch's symmetric memory was set up for that."""
    enabled = []
    with (
        played_gpu() as stream,
        ops_bench(stream, []) as setting,
        patch.object(torch.cuda, "can_device_access_peer", lambda *_: reachable),
        patch.object(ops.socket, "gethostname", lambda: f"host {setting.rank % hosts}"),
        patch("torch.distributed._symmetric_memory.enable_symm_mem_for_group", enabled.append),
    ):
        setting.profile = "nvlink"
        bench = ops.Bench(setting, 1)
        bench._times = lambda *_: [1.0]
        found = [bench._async_tp(operation.Operation(Shape(op, 64, 512, 16, 2), bench.plain)) for op in ops.OPERATIONS]
        return found, len(enabled)


@pytest.mark.parametrize(
    ("reachable", "hosts", "wanted"),
    [(True, 1, ([None, 1.0, None], 1)), (False, 1, ([None] * 3, 0)), (True, 2, ([None] * 3, 0))],
)
def test_symmetric_memory_where_gpus_reach_each_other(pool, reachable, hosts, wanted):
    assert pool.run(2, symmetric, reachable, hosts) == [wanted] * 2


def test_attention_of_a_model():
    assert Attention(50, 1, 2, 6, 8, 2).projection == Shape("all_to_all", 25, 144, 48, 2, "bfloat16", 3, 8, 1)
