"""The ways of running a step that are measured side by side: fodit's, and its peers'."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from fodit.bench import xdit
from fodit.bench.model import Model, transformers, twin
from fodit.models.sequence import HeadGroups
from fodit.parallel import ParallelConfig
from fodit.tune.setting import Setting

COMPILE = {"fullgraph": False}  # arguments of torch.compile


@dataclass(frozen=True)
class Way:
    """How a step is run.

    Attributes:
        name: in the table.
        ulysses: ranks that share one sequence.
        cfg: 2 where each pass of guidance has its own ranks.
        compiled: blocks compile in their first call, which is not measured.
    """

    name: str
    ulysses: int = 1
    cfg: int = 1
    compiled: bool = False

    @property
    def required(self) -> bool:
        """Whether the run ends when this way fails: fodit's own, and what they are compared with."""
        return False

    def unfit(self, ranks: int, model: Model) -> str | None:
        """Why the way cannot run this model, None if it can."""
        if model.heads % self.ulysses:
            return f"{model.heads} heads do not divide by {self.ulysses} ranks"
        return None

    @contextmanager
    def pipeline(self, setting: Setting, model: Model, head_groups: HeadGroups) -> Iterator[Any]:
        """The pipeline that runs this way, to be used inside. Afterwards the model is as it was."""
        raise NotImplementedError
        yield


@dataclass(frozen=True)
class Fodit(Way):
    """
    Attributes:
        overlap: False waits for every communication at once.
        timed: keep the timeline of the report.
    """

    overlap: bool = True
    timed: bool = True

    @property
    def required(self) -> bool:
        return True

    @property
    def degrees(self) -> ParallelConfig:
        return ParallelConfig(cfg=self.cfg, ulysses=self.ulysses)

    def unfit(self, ranks: int, model: Model) -> str | None:
        if self.cfg == 2 and not model.guided:
            return "guidance makes one pass: both halves of the ranks would compute the same"
        try:
            self.degrees.resolve(ranks, model.heads)
        except ValueError as error:
            return str(error)
        return None

    @contextmanager
    def pipeline(self, setting: Setting, model: Model, head_groups: HeadGroups) -> Iterator[Any]:
        pipe = model.fodit
        pipe.parallelize(
            replace(self.degrees, max_ctas=setting.max_ctas),
            overlap=self.overlap,
            device=setting.device,
            head_groups=head_groups if self.overlap else None,
        )
        pipe._session.timeline.enabled = self.timed
        if setting.sms:
            pipe._session.plan(setting.sms)
        try:
            yield pipe
        finally:
            pipe._session.detach()


@dataclass(frozen=True)
class Diffusers(Way):
    """On one GPU, or with its context parallelism, which it cannot undo: on a twin of the model."""

    @property
    def required(self) -> bool:
        return self.ulysses == 1 and not self.compiled

    @contextmanager
    def pipeline(self, setting: Setting, model: Model, head_groups: HeadGroups) -> Iterator[Any]:
        pipe = twin(model.plain)
        for transformer in transformers(pipe):
            if self.ulysses > 1:
                from diffusers import ContextParallelConfig

                transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=self.ulysses))
            if self.compiled:
                compile_blocks(transformer)
        if not self.compiled:
            yield pipe
            return
        try:  # blocks that are run uncompiled after too many recompilations are an error, not a slow peer
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                yield pipe
        finally:
            torch._dynamo.reset()  # its caches hold the twin


@dataclass(frozen=True)
class XDiT(Way):
    """xDiT's Ulysses, as its own examples set it up: on a twin of the model."""

    @contextmanager
    def pipeline(self, setting: Setting, model: Model, head_groups: HeadGroups) -> Iterator[Any]:
        with xdit.pipeline(model, self.ulysses) as pipe:
            yield pipe


def compile_blocks(transformer: Any) -> None:
    """Compile what repeats, as diffusers does for the models that say what that is."""
    if getattr(transformer, "_repeated_blocks", None):
        transformer.compile_repeated_blocks(**COMPILE)
        return
    for block in transformer.transformer_blocks:
        block.compile(**COMPILE)


def all_ways(ranks: int, wan: bool, with_xdit: bool) -> list[Way]:
    """The first one is what the others are compared with."""
    found: list[Way] = [Diffusers("diffusers, one GPU"), Diffusers("diffusers, one GPU, compiled", compiled=True)]
    if ranks == 1:
        return [*found, Fodit("fodit, one GPU")]
    found += [
        Fodit(f"fodit, ulysses {ranks}, no overlap", ranks, overlap=False),
        Fodit(f"fodit, ulysses {ranks}", ranks),
        Fodit(f"fodit, ulysses {ranks}, untimed", ranks, timed=False),  # what the report costs
        Fodit(f"fodit, cfg 2 x ulysses {ranks // 2}", ranks // 2, 2),
    ]
    if wan:  # diffusers has none for CogVideoX
        name = f"diffusers, context parallel {ranks}"
        found += [Diffusers(name, ranks), Diffusers(f"{name}, compiled", ranks, compiled=True)]
    return [*found, XDiT(f"xDiT, ulysses {ranks}", ranks)] if with_xdit else found


def chosen_ways(names: str, ranks: int, wan: bool, numerics: bool = False) -> list[Way]:
    """Those whose name contains one of the texts a|b|c; with `numerics` also the first, the yardstick of errors.

    xDiT is among them where it is installed, or where it is asked for by name.
    """
    with_xdit = find_spec("xfuser") is not None or "xdit" in names.lower()
    first, *others = all_ways(ranks, wan, with_xdit)
    wanted = [way for way in others if _named(way, names)]
    return [first, *wanted] if numerics or _named(first, names) else wanted


def _named(way: Way, names: str) -> bool:
    return any(text.lower() in way.name.lower() for text in names.split("|"))
