"""python -m fodit.tune.record FOLDER --link no-p2p   (under torchrun)

Records a machine's profile, and measurements of operations to check predictions by: `profile-LINK.json` and
`validation-LINK.json`. For each shape of the models at two ranks or more, milliseconds:

    gemm, comm       the product by cuBLAS, the collective
    last             the collective of a sixteenth, the last slab of the bound
    serial           product, then collective
    rows             plans: the one predicted best, the static default, and for five shapes many of the search's, of
                     which the fastest and the one predicted best again
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fodit.commandline import Parser, refuse
from fodit.ops.connect import connected
from fodit.ops.executor import choose_kernel
from fodit.parallel import nccl_options
from fodit.plan import SumPlan
from fodit.tune.clock import Clock, Work
from fodit.tune.codec import encode
from fodit.tune.measure import measure, this_machine
from fodit.tune.operation import Operation, shared_kernels
from fodit.tune.predict import SMALLEST, overlapped_ms, serial_ms
from fodit.tune.profile import CUBLAS
from fodit.tune.search import Candidate, Shape, candidates
from fodit.tune.setting import PROFILE_HELP, PROFILES, Setting, check_gpus
from fodit.tune.shapes import model
from fodit.tune.store import Plans
from fodit.tune.tuner import Tuner

MODELS = ("CogVideoX-2b", "CogVideoX-5b", "CogVideoX1.5-5b", "Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B")
LIMIT_S = 80.0
EXHAUSTIVE = 5  # shapes
BEST, OTHERS = 20, 20  # candidates measured for these: the best predicted, and others evenly spread behind them
FINALISTS = 5  # of them, measured again


class Recorder:
    def __init__(self, setting: Setting, folder: Path, repeats: int, limit_s: float) -> None:
        self.setting, self.folder, self.repeats, self.limit_s = setting, folder, repeats, limit_s
        group = dist.new_group(backend="nccl", pg_options=nccl_options())
        self.comm = connected(group, setting.device, setting.control)
        self.clock = Clock(setting.device, setting.control)
        self.machine = this_machine(self.comm, setting.control, setting.compute_sms)
        self.kernels = shared_kernels(setting.device, setting.control)
        self.shapes: list[dict[str, Any]] = []

    def run(self) -> None:
        setting = self.setting
        setting.say(str(self.machine))
        profile = measure(self.machine, self.comm, self.clock, setting.compute(), setting.say)
        if setting.rank == 0:
            profile.save(self.folder / f"profile-{setting.profile}.json")
        self.profile = profile
        self.tuner = Tuner(profile, Plans(self.machine), self.comm, self.clock, self.kernels)
        shapes = self._shapes()
        with setting.compute():
            for shape in shapes:
                if self.clock.slowest([self.clock.elapsed_s])[0] < self.limit_s:
                    self._measure(shape)
            for shape in sorted(shapes, key=lambda one: one.m * one.n * one.k)[1 :: max(len(shapes) // EXHAUSTIVE, 1)]:
                if self.clock.slowest([self.clock.elapsed_s])[0] < self.limit_s:
                    self._exhaust(shape)
        self._summary()

    def _shapes(self) -> list[Shape]:
        """Without repetition."""
        found: list[Shape] = []
        for name in MODELS:
            one = model(name)
            found += [one.attention(self.setting.ranks).projection, *one.tensor_parallel(self.setting.ranks)]
        return list(dict.fromkeys(found))

    def _measure(self, shape: Shape) -> None:
        """The parts, serial, the plan that is predicted best and the static default, in turn."""
        operation = Operation(shape, self.comm)
        (best,), static = candidates(self.profile, shape, self.kernels, 1), self._static(shape)
        last = partial(operation.collective, SMALLEST)
        parts: list[Work] = [operation.product, operation.collective, last, operation.serial]
        ways = [self.tuner.way(operation, self.tuner.plan(shape, one.slabs), one) for one in (best, static)]
        *times, chosen, default = self.clock.compare([*parts, *ways], self.repeats)
        gemm, comm, rest, serial = times
        bound = max(gemm + rest, gemm / SMALLEST + comm)
        row = encode(shape) | {"gemm": gemm, "comm": comm, "last": rest, "serial": serial, "bound": bound}
        row["serial_predicted"] = serial_ms(self.profile, shape.op, shape.m, shape.n, shape.k)
        row["rows"] = [self._row("chosen", best, chosen), self._row("static", static, default)]
        self.shapes.append(row)
        self._save()
        self.setting.say(
            f"{self.clock.elapsed_s:6.1f} s  {shape!s:70} gemm {gemm:7.3f} comm {comm:7.3f} serial {serial:7.3f} "
            f"bound {bound:7.3f} chosen {chosen:7.3f} predicted {best.predicted_ms:7.3f} static {default:7.3f} "
            f"fraction {bound / min(chosen, serial):.3f}  {best.slabs} {best.kernel} {best.free_sms}"
        )

    def _static(self, shape: Shape) -> Candidate:
        """The untuned plan of the operations, without a planner."""
        slabs = self.tuner.static(shape)
        plan = self.tuner.plan(shape, slabs)
        product = plan.others if isinstance(plan, SumPlan) else plan
        kernel = choose_kernel(product, self.setting.device, torch.bfloat16)[0] if self.kernels else None
        name = CUBLAS if kernel is None else kernel.name
        sms = min(self.comm.gemm_sms(product.op) or self.machine.compute_sms, self.machine.compute_sms)
        free = self.machine.compute_sms - sms
        return Candidate(overlapped_ms(self.profile, plan, shape.k, name, free), slabs, name, free)

    def _exhaust(self, shape: Shape) -> None:
        """Many candidates in turn, to see what the predicted best one misses.

        It and the fastest ones are measured once more, longer: of many short measurements the least one is that of a
        good plan which happened to be disturbed least.
        """
        operation, found = Operation(shape, self.comm), candidates(self.profile, shape, self.kernels)
        others = found[BEST :: max(len(found[BEST:]) // OTHERS, 1)]
        tried = found[:BEST] + others
        ways = [self.tuner.way(operation, self.tuner.plan(shape, one.slabs), one) for one in tried]
        taken = self.clock.compare(ways, max(self.repeats - 3, 3), warm_up=1)
        row = next(one for one in self.shapes if all(one[key] == value for key, value in encode(shape).items()))
        row["rows"] += [self._row("exhaustive", one, ms) for one, ms in zip(tried, taken, strict=True)]
        finalists = list(dict.fromkeys([0, *sorted(range(len(tried)), key=taken.__getitem__)[:FINALISTS]]))
        again = self.clock.compare([ways[index] for index in finalists], 3 * self.repeats, warm_up=1)
        row["rows"] += [self._row("final", tried[index], ms) for index, ms in zip(finalists, again, strict=True)]
        self._save()
        self.setting.say(f"{self.clock.elapsed_s:6.1f} s  {shape!s:70} regret {again[0] / min(again) - 1:.2%}")

    @staticmethod
    def _row(kind: str, one: Candidate, measured: float) -> dict[str, Any]:
        return {
            "kind": kind,
            "slabs": list(one.slabs),
            "kernel": one.kernel,
            "free_sms": one.free_sms,
            "predicted_ms": one.predicted_ms,
            "measured_ms": measured,
        }

    def _save(self) -> None:
        if self.setting.rank == 0:
            content = {**self.setting.describe(), "machine": encode(self.machine), "shapes": self.shapes}
            path = self.folder / f"validation-{self.setting.profile}.json"
            path.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def _summary(self) -> None:
        rows = [row for shape in self.shapes for row in shape["rows"]]
        errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows]
        serial = [abs(shape["serial_predicted"] / shape["serial"] - 1) for shape in self.shapes]
        self.setting.say(
            f"{self.clock.elapsed_s:6.1f} s  {len(rows)} plans: mean error {sum(errors) / len(errors):.2%}, worst "
            f"{max(errors):.2%}; serial: mean error {sum(serial) / len(serial):.2%}"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m fodit.tune.record", description="Records; run under torchrun.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--link", choices=PROFILES, default="nvlink", help=PROFILE_HELP)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="start nothing new after so many seconds")
    given = parser.parse_args(arguments)
    try:
        if given.repeats < 1:
            raise ValueError(f"--repeats {given.repeats}: at least 1")
        check_gpus(2)
    except (ValueError, RuntimeError) as error:
        sys.exit(refuse(parser.prog, error))
    given.folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(given.link)
    Recorder(setting, given.folder, given.repeats, given.limit).run()
    setting.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
