"""A video from a prompt, on one GPU or several.

    python demos/text_to_video.py --model zai-org/CogVideoX-2b --prompt "A boat on a lake"
    torchrun --nproc-per-node 2 demos/text_to_video.py --model Wan-AI/Wan2.1-T2V-14B-Diffusers --prompt "..."
    torchrun --nproc-per-node 2 demos/text_to_video.py --model CogVideoX-5b --dummy-weights --steps 3

With --dummy-weights nothing is downloaded: a published model's architecture gets random weights, the prompt random
embeddings. The video is noise, the latency is the real one.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from fodit import FoCogVideoXPipeline, FoWanPipeline, ParallelConfig, save_video
from fodit.commandline import Parser, refuse, speaks
from fodit.parallel import rank_device, world_size
from fodit.testing import dummy
from fodit.video import check_file, check_video

PIPELINES = {"CogVideoXPipeline": FoCogVideoXPipeline, "WanPipeline": FoWanPipeline}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def pixels(text: str) -> int:
    """A height or width: the VAEs make at least 8 pixels one, the transformers 2 of those a patch."""
    number = positive(text)
    if number % 16:
        raise argparse.ArgumentTypeError(f"must be a multiple of 16, got {text}; {(number // 16 + 1) * 16} is one")
    return number


def seed(text: str) -> int:
    """What torch's generators take: any 64 bits, signed or not."""
    number = int(text)
    if not -(2**63) <= number < 2**64:
        raise argparse.ArgumentTypeError(f"must be between -2**63 and 2**64 - 1, got {text}")
    return number


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="hub id, local folder, or with --dummy-weights a model's name")
    parser.add_argument("--prompt", help="what to show; not needed with --dummy-weights")
    parser.add_argument("--negative-prompt", help="what not to show")
    parser.add_argument("--height", type=pixels, help="pixels; by default the model's own")
    parser.add_argument("--width", type=pixels, help="pixels; by default the model's own")
    parser.add_argument("--num-frames", type=positive, help="by default the model's own")
    parser.add_argument("--steps", type=positive, default=50, help="denoising steps (default: 50)")
    parser.add_argument("--guidance-scale", type=float, help="by default the model's own")
    parser.add_argument("--seed", type=seed, default=0, help="of the noise (default: 0)")
    parser.add_argument("--fps", type=int, help="frames a second (default: 16, with --dummy-weights the model's own)")
    parser.add_argument("--output", default="out.mp4", help="the video (default: out.mp4)")
    parser.add_argument("--report", help="write the latency report to this JSON file as well")
    parser.add_argument("--cfg", type=int, choices=[1, 2], help="2: guidance's passes on two ranks (default: chosen)")
    parser.add_argument("--ulysses", type=positive, help="ranks that share one sequence (default: chosen)")
    parser.add_argument("--no-overlap", action="store_true", help="wait for every communication, for comparison")
    parser.add_argument("--offload", choices=["model", "sequential"], help="keep weights in host memory until used")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda where there is a GPU")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: bfloat16, on a CPU float32)")
    parser.add_argument("--dummy-weights", action="store_true", help=f"random weights for {', '.join(dummy.MODELS)}")
    given = parser.parse_args()
    if not given.dummy_weights and given.prompt is None:
        parser.error("--prompt is needed, unless --dummy-weights measures latency only")
    return given


def make_pipeline(given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    parallel = ParallelConfig(cfg=given.cfg, ulysses=given.ulysses)
    options = {"overlap": not given.no_overlap, "output_rank": 0, "device": given.device, "offload": given.offload}
    if given.dummy_weights:
        spec = dummy.config(given.model)
        heads = [part["num_attention_heads"] for name, part in spec["components"].items() if "transformer" in name]
        parallel.resolve(world_size(), min(heads))  # before gigabytes of weights are drawn
        pipe = dummy.pipeline(given.model, PIPELINES[spec["pipeline"]], device=device, dtype=dtype)
        return pipe.parallelize(parallel, **options)
    try:
        kind = DiffusionPipeline.load_config(given.model).get("_class_name", "nameless pipeline").removeprefix("Fo")
    except OSError as error:  # offline, diffusers' own words sound as if the model were there
        raise OSError(f"{given.model} is neither a saved pipeline's folder nor found on the Hub: {error}") from error
    if kind not in PIPELINES:
        raise ValueError(f"{given.model} is a {kind}; fodit runs {' and '.join(PIPELINES)}")
    return PIPELINES[kind].from_pretrained(given.model, parallel=parallel, dtype=dtype, **options)


def call_arguments(given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    call: dict[str, Any] = {"prompt": given.prompt, "negative_prompt": given.negative_prompt}
    if given.dummy_weights:
        call = dummy.call_arguments(given.model) | dummy.prompt_embeds(given.model, dtype=dtype)
    chosen = {
        "height": given.height,
        "width": given.width,
        "num_frames": given.num_frames,
        "guidance_scale": given.guidance_scale,
        "num_inference_steps": given.steps,
    }
    call |= {name: value for name, value in chosen.items() if value is not None}
    return call | {"generator": torch.Generator().manual_seed(given.seed)}


def check(given: argparse.Namespace) -> None:
    """Raise at once what else would end the run after minutes, or only a rank that does not speak."""
    if os.environ.get("GROUP_RANK", "0") == "0":  # other machines write nothing, and may lack the folders
        check_video(given.output, 16 if given.fps is None else given.fps)
        if given.report:
            check_file(given.report)
            if Path(given.output).resolve() == Path(given.report).resolve():
                raise ValueError(f"--report {given.report} would overwrite the video: give it another name")
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if given.device != "cpu" and 0 < gpus < ranks:
        raise ValueError(f"{ranks} processes for {gpus} GPU(s) on this machine: torchrun --nproc-per-node {gpus}")


def main() -> None:
    given = arguments()
    try:
        check(given)
        device = rank_device(given.device)
        dtype = DTYPES[given.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
        call = call_arguments(given, dtype)
        pipe = make_pipeline(given, device, dtype)
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        sys.exit(refuse("text_to_video", error))
    if given.dummy_weights and speaks() and (given.prompt or given.negative_prompt):
        print("--dummy-weights has random embeddings for a prompt: the one given is ignored")
    frames = pipe(**call).frames
    if frames is None:  # another rank holds the video
        return
    fps = given.fps or (dummy.config(given.model)["fps"] if given.dummy_weights else 16)
    print(pipe.report)
    print(f"\nvideo written to {save_video(frames[0], given.output, fps=fps)}")
    if given.report:
        print(f"report written to {pipe.report.save(given.report)}")


if __name__ == "__main__":
    main()
