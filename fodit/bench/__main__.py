"""python -m fodit.bench kernels|ops|step --profile no-p2p ...   (under torchrun for several GPUs)"""

import sys

import torch.distributed as dist

from fodit.bench import kernels, ops, step
from fodit.commandline import Parser, refuse
from fodit.tune.setting import PROFILE_HELP, PROFILES, Setting


def main(arguments: list[str] | None = None) -> None:
    """Exits with status 1 and a line on stderr where there is nothing to measure."""
    parser = Parser(prog="fodit bench", description="Benchmarks; run under torchrun.")
    commands = parser.add_subparsers(dest="command", required=True)
    for module, name, summary in (
        (kernels, "kernels", "signaling kernels alone, next to cuBLAS"),
        (ops, "ops", "products with a collective, next to cuBLAS and NCCL"),
        (step, "step", "time per denoising step of a whole model, next to diffusers"),
    ):
        command = commands.add_parser(name, help=summary)
        command.set_defaults(check=module.check, run=module.run)
        module.add_arguments(command)
        command.add_argument("--profile", choices=PROFILES, default="nvlink", help=PROFILE_HELP)
        command.add_argument("--sms", type=int, help="SMs of the compute stream (default: the profile's)")
        command.add_argument("--max-ctas", type=int, help="most thread blocks of a collective (default: NCCL's)")
        command.add_argument("--save", help="write the results to this JSON file")
    given = parser.parse_args(arguments)
    try:
        for name in ("sms", "max_ctas"):
            if (number := getattr(given, name)) is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: at least 1")
        given.check(given)
    except (ValueError, RuntimeError) as error:
        sys.exit(refuse(parser.prog, error))
    setting = Setting(given.profile, given.sms, given.max_ctas)
    given.run(setting, given)
    setting.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
