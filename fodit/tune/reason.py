"""Why a plan was chosen, in a sentence."""

from collections.abc import Iterable

from fodit.tune.choice import Choice, shares_text
from fodit.tune.predict import ITEMSIZE, communication_ms, product_ms
from fodit.tune.profile import Profile
from fodit.tune.search import LEAST_GAIN, UNSURE, Shape, candidates


def reason(profile: Profile, shape: Shape, choice: Choice, kernels: Iterable[str] | None = None) -> str:
    """What decided between this plan and others."""
    if not choice.overlap and choice.measured_ms is not None:
        return f"measured, no overlapped plan was faster by {LEAST_GAIN:.0%}"
    if not choice.overlap:
        (best,) = candidates(profile, shape, kernels, 1)
        plan = f"slabs {shares_text(best.slabs)} with {best.free_sms} SMs free"
        gain = choice.serial_ms / best.predicted_ms - 1
        return f"the best overlapped plan ({plan}) is predicted to gain {gain:.1%}, and {UNSURE:.1%} is the least"
    product = product_ms(profile, shape.m, shape.n, shape.k)
    if communication_ms(profile, shape.op, shape.m * shape.n * ITEMSIZE) > product:
        small = ", so the first slab is small" if choice.slabs[0] < max(choice.slabs) else ""
        return f"communication takes longer than the product and should start early{small}"
    small = ", so the last slab is small" if choice.slabs[-1] < max(choice.slabs) else ""
    return f"the product takes longer than the communication, little of which should be left behind it{small}"
