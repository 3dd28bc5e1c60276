"""The step benchmark on a CPU: small models, all else is real but the GPU's clock."""

import argparse
import copy
import json
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fodit.agreement import everyone
from fodit.bench import floor, step, ways
from fodit.parallel import initialise
from fodit.testing import dummy

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
