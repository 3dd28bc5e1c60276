"""What fodit finds on this machine, and what of it will not run as fast as it could."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fodit.environment import EXCHANGE, KERNEL, Variable
from fodit.kernels.binding import Kernel, load
from fodit.kernels.gemm import DTYPES, kernels_for
from fodit.kernels.selftest import failure
from fodit.ops.connect import direct_allowed, refusal
from fodit.ops.peers import peer_allowed, reaches
from fodit.report import versions
from fodit.tune.profile import Profile
from fodit.tune.store import folder

# Variables that take the overlap away, and how.
HARMFUL = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "puts all streams into one queue: a collective starts only when the product beside it has ended",
    ),
    "TORCH_NCCL_ENABLE_TIMING": (
        "1",
        "makes every collective record events that serialise it with the compute stream",
    ),
    "CUDA_LAUNCH_BLOCKING": ("1", "lets the host wait for every kernel: nothing overlaps"),
    "NCCL_BLOCKING_WAIT": ("1", "lets the host wait for every collective"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "lets the host wait for every collective"),
}
CONSEQUENCES = {EXCHANGE: "ranks refuse to connect", KERNEL: "products run in torch"}  # of a wrong word


def harmful_environment() -> list[str]:
    """A sentence for each environment variable that takes the overlap away."""
    return [
        f"{name}={value} {consequence}; unset it"
        for name, (value, consequence) in HARMFUL.items()
        if os.environ.get(name) == value
    ]


def _wrong_word(variable: Variable) -> str | None:
    """What is wrong with the variable's word, and what it leads to; None if nothing is."""
    wrong = variable.wrong(variable.value)
    return None if wrong is None else f"{wrong}: {CONSEQUENCES[variable]}"


def _wrong_kernels(kernels: Sequence[Kernel], device: torch.device) -> list[str]:
    """Of the kernels that fail their test on the device, what is wrong. They are not used."""
    with torch.cuda.device(device):
        found = [(one.name, dtype, failure(one, device, dtype)) for one in kernels for dtype in DTYPES]
    return [f"warning: {name} in {dtype}: {reason}" for name, dtype, reason in found if reason is not None]


def _measured_machines(gpus: Sequence[str]) -> list[str]:
    """What `fodit tune` has stored, and whether any of it was measured on GPUs of these names alone."""
    machines, broken = [], []
    for path in sorted(folder().glob("*.profile.json")):
        try:
            machines.append(Profile.load(path).machine)
        except ValueError as error:
            broken.append(f"warning: {error}")
    measured = any(set(machine.gpus) <= set(gpus) for machine in machines)
    advice = "" if measured else ": plans are predicted from a short probe until `fodit tune` has measured this one"
    found = f"plans: {len(machines)} measured machines in {folder()}{advice}"
    return [found, *broken, *(f"measured: {machine}" for machine in machines)]


def _exchanges(gpus: int) -> str:
    """How ranks on this host will send each other what is exchanged."""
    linked = peer_allowed() and all(reaches(one, other) for one in range(gpus) for other in range(gpus))
    peers = "peer access between the GPUs" if linked else "no peer access between the GPUs"
    if (wrong := _wrong_word(EXCHANGE)) is not None:
        return f"{peers}; no exchanges, because {wrong}"
    if (reason := refusal()) is not None:
        return f"{peers}; exchanges go through NCCL, because {reason}"
    way = "GPU to GPU" if linked and direct_allowed() else "through host memory"
    return f"{peers}; exchanges go by copy engines, {way}"


def doctor() -> str:
    """Devices, versions, the package that runs, kernels, and every reason why something would fall back, as text.

    >>> print(fodit.doctor())
    """
    lines = [", ".join(f"{name} {version}" for name, version in versions().items() if version)]
    lines.append(f"package: {Path(__file__).parent}")  # in a checkout's folder its copy runs, not the installed one
    count = torch.cuda.device_count()
    found = load()
    lines.append(f"kernels: {found if isinstance(found, str) else f'{found.path} ({found.build_info})'}")
    if not count:
        lines.append("no CUDA device: products and collectives run in torch with gloo, for tests")
    for index in range(count):
        kernels = kernels_for(torch.device("cuda", index))
        name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
        if isinstance(kernels, str):
            lines.append(f"{name}: products run in torch, slab by slab, because {kernels}")
        else:
            lines.append(f"{name}: {kernels[0].family.name.lower()} kernels {', '.join(k.name for k in kernels)}")
            lines += _wrong_kernels(kernels, torch.device("cuda", index))
    if count > 1:
        lines += _measured_machines([torch.cuda.get_device_name(index) for index in range(count)])
        lines.append(_exchanges(count))
    wrong = [text for variable in CONSEQUENCES if (text := _wrong_word(variable)) is not None]
    lines += [f"warning: {text}" for text in (*wrong, *harmful_environment())]
    return "\n".join(lines)
