"""What the predictor makes of a layer: beside what is measured, also at numbers of ranks that its profile is not of."""

from collections.abc import Sequence

from fodit.bench.floor import Attention as SelfAttention
from fodit.bench.floor import Operation, Product
from fodit.tune.planner import predicted_groups
from fodit.tune.predict import ITEMSIZE, attention_ms, copy_ms, product_ms
from fodit.tune.profile import Profile
from fodit.tune.store import Attention

SELF_ATTENTION, MLP = 3, 2  # operations of a layer: its first and its last ones
ROWS_COPIED = {True: 7.5, False: 4.5}  # times that Wan's, that CogVideoX' element-wise chains read and write the rows


def layer_ms(profile: Profile, work: Sequence[Operation], heads: int, ulysses: int) -> float:
    """Milliseconds of one call of one layer on one of the ranks that share its sequence.

    Args:
        profile: of such GPUs and links, whatever their number.
        work: the layer's operations, see `floor.layer_work`.
        heads: of the model.
    """
    profile = profile.with_ranks(ulysses)
    _, shared, out = work[:SELF_ATTENTION]
    cross, mlp = work[SELF_ATTENTION:-MLP], work[-MLP:]
    assert isinstance(shared, SelfAttention) and isinstance(out, Product)
    size = out.m * out.n * ITEMSIZE
    total = copy_ms(profile, ROWS_COPIED[bool(cross)] * size) + sum(_ms(profile, one) for one in cross)
    if ulysses == 1:
        return total + sum(_ms(profile, one) for one in [*work[:SELF_ATTENTION], *mlp]) + copy_ms(profile, 2 * size)
    # Items of a batch go one after the other, and then the attention's schedule has the MLP in it.
    attention = Attention(shared.key, 1, shared.batch, heads, shared.dim, ulysses)
    if attention.parts == 1:
        total += sum(_ms(profile, one) for one in mlp)
    return total + predicted_groups(profile, attention, None, "")[0].predicted_ms


def _ms(profile: Profile, one: Operation) -> float:
    if isinstance(one, Product):
        return product_ms(profile, one.m, one.n, one.k)
    return attention_ms(profile, one.batch, one.heads, one.query, one.dim, one.key)
