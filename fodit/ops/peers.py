"""Which GPUs reach each other's memory."""

import os

import torch

Device = torch.device | int


def peer_allowed() -> bool:
    """Not with NCCL_P2P_DISABLE=1: what NCCL must not use nothing else does."""
    return os.environ.get("NCCL_P2P_DISABLE", "0") in ("", "0")


def reaches(device: Device, other: Device) -> bool:
    """Whether one GPU has peer access to another one, or is the same."""
    one, two = (torch.device("cuda", each) if isinstance(each, int) else each for each in (device, other))
    return one == two or torch.cuda.can_device_access_peer(one, two)


def uuid_of(device: Device) -> str:
    """What a GPU is known by in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)  # type: ignore[attr-defined]
