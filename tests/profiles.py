"""Machine profiles to predict with: a tiny one, and the recorded ones with what was measured by them."""

import json
from dataclasses import replace
from pathlib import Path

from fodit.tune.predict import overlapped_ms
from fodit.tune.profile import CUBLAS, Beside, Curve, Machine, Product, Profile, shipped
from fodit.tune.search import Shape

NCCL = ("nvlink-nccl", "no-p2p-nccl", "consumer-nccl")  # recorded with NCCL doing everything
COPIES = ("nvlink", "no-p2p", "consumer")
LINKS = (*COPIES, *NCCL)


def tiny_profile(**changes):
    """Ten SMs; a tile takes 1 ms, a collective 1 ms a MB and 0.5 ms more."""
    line = Curve(((1e6, 1.5), (101e6, 101.5)))
    machine = Machine(("Tiny", "Tiny"), 2, "host memory", "2.0", "13000", 10, 10)
    both = {"0": Beside(line, 1.0), "2": Beside(line, 1.0), CUBLAS: Beside(line, 1.0), "attention": Beside(line, 1.0)}
    ops = ("all_reduce", "reduce_scatter", "all_to_all", "all_gather")
    kernels = {name: Product(128, 128, 1, 0.0, 1.0, 0.0) for name in (CUBLAS, "ampere_128x128x32")}
    made = Profile(
        machine, "made up", dict.fromkeys(ops, line), dict.fromkeys(ops[:3], both), kernels, {0: 1.0, 2: 1.0},
        {128: 1.0}, 1000.0, 0.0, 0.0,
    )  # fmt: skip
    return replace(made, **changes)


def recorded(link):
    """The profile, and (shape, its measurements) of each recorded shape."""
    content = json.loads((Path(__file__).parent / "data" / f"validation-{link}.json").read_text())
    fields = Shape.__dataclass_fields__
    return shipped()[f"h200-x2-{link}"], [
        (Shape(**{name: one[name] for name in fields}), one) for one in content["shapes"]
    ]


def predictions(profile, shape, found, kinds):
    """(predicted, measured) of the recorded plans of these kinds."""
    rows = [row for row in found["rows"] if row["kind"] in kinds]
    plans = [shape.plan(tuple(row["slabs"]), profile.machine.copies) for row in rows]
    predicted = [
        overlapped_ms(profile, plan, shape.k, row["kernel"], row["free_sms"])
        for plan, row in zip(plans, rows, strict=True)
    ]
    return list(zip(predicted, (row["measured_ms"] for row in rows), strict=True))


def regret(profile, shape, found):
    """The measured time of the plan that is predicted best over the least measured one, less 1; None where only a few
    plans were measured. By the longer measurements of the fastest plans, if it is one of them."""
    tried = predictions(profile, shape, found, ("exhaustive",))
    if not tried:
        return None
    best, _ = min(tried)
    again = predictions(profile, shape, found, ("final",))
    if any(predicted == best for predicted, _ in again):
        tried = again
    return min(tried)[1] / min(measured for _, measured in tried) - 1
