"""The curator: the vault opened for one plan. All that a method ever sees of the private data.

Each call checks the plan before a record is read, counts the release, and returns an answer that is
already noisy and already paid for. What a method does with it is post-processing, and free.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from understudy.errors import Interrupted, InvalidSettings, PlanExhausted, PlanViolation
from understudy.nets.params import Params
from understudy.nets.released import Artefact
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.blocks import Blocks
from understudy.privacy.briefing import FollowingBlocks
from understudy.privacy.calibration import Calibration
from understudy.privacy.ensemble import Ensemble
from understudy.privacy.ensemble import State as MemberState
from understudy.privacy.gradients import Loss
from understudy.privacy.group import Group
from understudy.privacy.plan import OF_ENSEMBLES, Kind, Plan, PublicFacts, joint_bound
from understudy.privacy.randomness import Randomness
from understudy.privacy.records import Records, View
from understudy.privacy.releases.batch_gradient import BatchLoss, batch_gradient
from understudy.privacy.releases.class_sums import Embedding, class_sums
from understudy.privacy.releases.gradient import gradient
from understudy.privacy.releases.histogram import histogram
from understudy.privacy.releases.sample_gradient import SampleLoss, sample_gradient
from understudy.privacy.releases.votes import Placed, votes
from understudy.privacy.sampling import Access
from understudy.privacy.sealed import Sealed
from understudy.training.engine import Engine

State = Mapping[str, Tensor | Mapping[str, Tensor]]
"""What a method needs to go on: tensors by name, or one level of groups of them."""

MEMBERS = "ensemble."
"""What groups of tensors in a checkpoint are called that hold what members learned."""
GO_ON = "run the same command with --resume to continue"
FORGOTTEN = (
    "what its ensemble had learned is gone with the process; start a new run (this one's whole "
    "budget stays charged), with --keep-private-state if it may be cut off again"
)
SPENT_STEPS = 10
"""Epsilon spent so far is computed at tenths of the plan, rounded up."""


@dataclass(frozen=True)
class Pace:
    """When to commit, whether to stop, and how often to keep the set as it is so far."""

    seconds: float = 5.0
    seconds_between: float = 60.0
    """The same where no releases were made: only work would be lost."""
    should_stop: Callable[[], bool] = lambda: False
    snapshots: int = 0
    """Over the whole plan."""
    keep: Callable[[Mapping[str, int], Artefact], None] = lambda made, so_far: None
    """Gets the releases made until then, and what they have led to."""
    keeps_members: bool = False
    """Whether checkpoints hold what ensembles learned, without noise; deleted at the run's end."""


class Curator(Sealed):
    """Answer the releases of one plan, each at most as often as planned."""

    __slots__ = (
        "_answered", "_blocks", "_bounds", "_committed_at", "_engine", "_ensembles", "_group",
        "_has_voted_before", "_offered",
        "_pace", "_part_kept", "_randomness", "_records", "_spent", "calibration", "engine",
        "facts", "plan",
    )  # fmt: skip

    def __init__(
        self,
        records: Records,
        randomness: Randomness,
        *,
        facts: PublicFacts,
        plan: Plan,
        calibration: Calibration,
        blocks: Blocks | FollowingBlocks,
        pace: Pace,
        engine: Engine,
        group: Group,
    ) -> None:
        self.facts, self.plan, self.calibration = facts, plan, calibration
        # Programs of releases hold records and bare sums: the method gets an engine without them.
        self._engine, self.engine = engine, engine.beside()
        randomness.take()
        self._records, self._randomness = records, randomness
        self._blocks, self._pace, self._group = blocks, pace, group
        self._answered: Counter[str] = Counter()
        self._offered: tuple[int, State] | None = None
        remembered = blocks.latest.notes["bounds"] if blocks.latest else {}
        self._bounds = {line.name: set(remembered.get(line.name, ())) for line in plan}
        self._spent: dict[tuple[int, ...], float] = {}
        self._committed_at = time.monotonic()
        self._part_kept = self._part()
        self._ensembles: list[Ensemble] = []
        self._has_voted_before = any(
            blocks.committed[line.name] for line in plan if line.kind in OF_ENSEMBLES
        )

    # Releases

    def gradient(
        self,
        loss: Loss,
        params: Params,
        public: Params | None = None,
        *,
        clip_norm: float,
        at_once: int | None = None,
        view: View | None = None,
        release: str = "gradient",
    ) -> Params:
        """Return the noisy mean over the expected batch of clipped per-unit gradients of `loss`.

        Work since the last commit is lost in a crash, and the release is then made again with fresh
        sampling and noise; call `checkpoint` often.

        Args:
            loss: of one record.
            params: what it is differentiated by.
            public: what else it gets, among `params` by names of their own, and no gradient of:
                what changes from call to call and is the same for all records.
            clip_norm: L2 norm that a unit's gradient is scaled to, at most.
            at_once: records whose gradients are computed at once, at most, for a loss that needs
                much memory; the answer is the same but for rounding.
            view: what the loss gets in place of each image; give the same one at every call.
            release: its name in the plan.
        """
        dimension = sum(tensor.numel() for tensor in params.values())
        access = self._open(release, "gradient", dimension=dimension, bound=clip_norm)
        if at_once is not None:
            access = replace(access, at_once=min(at_once, access.at_once))
        return gradient(access, loss, params, public, clip_norm=clip_norm, view=view)

    def batch_gradient(
        self,
        loss: BatchLoss,
        params: Params,
        public: Params | None = None,
        *,
        bound: float,
        release: str = "batch_gradient",
    ) -> Params:
        """Return the noisy gradient of a loss that sees all sampled records together.

        Args:
            loss: of the whole batch.
            params: what it is differentiated by.
            public: what else it gets, among `params` by names of their own, and no gradient of.
            bound: L2 norm that the gradient by all parameters is scaled to, at most.
            release: its name in the plan.
        """
        dimension = sum(tensor.numel() for tensor in params.values())
        access = self._open(release, "batch_gradient", dimension=dimension, bound=bound)
        return batch_gradient(access, loss, params, public, bound=bound)

    def class_sums(self, embedding: Embedding, *, release: str = "class_sums") -> dict[str, Tensor]:
        """Return the noisy sums of each block of `embedding`, by its name.

        Tensors are (classes, dimension), or (dimension,) for a block over all classes.
        """
        classes = self.facts.classes

        def answer() -> Tensor:
            if embedding.blocks != self.plan[release].blocks:
                raise PlanViolation(
                    f"release '{release}' is planned with blocks {self.plan[release].blocks} but "
                    f"was asked for with {embedding.blocks}; correct the method's plan"
                )
            bound = joint_bound(embedding.blocks)
            access = self._open(
                release, "class_sums", dimension=embedding.dimension(classes), bound=bound
            )
            return class_sums(access, embedding)

        return embedding.split(self._answer(release, answer), classes)

    def ensemble(self, state: MemberState, *, members: int, answer: int = 0) -> Ensemble:
        """Make an ensemble whose members each hold a disjoint shard of the units.

        What members learn is kept only if the run was told to keep it: otherwise one that asked
        them and was killed cannot be resumed.

        Args:
            state: what the members start as, public: tensors, nested, with the members in front.
            members: how many.
            answer: values of what each will be asked for: so that there is room for it.
        """
        made = Ensemble(
            self._records, self.facts, state, members=members, answer=answer, engine=self._engine
        )
        if self._has_voted_before and not self.is_exhausted:  # or nobody will be asked any more
            tensors = self._blocks.checkpoint.tensors if self._blocks.checkpoint else {}
            kept = _tensors_of(tensors, f"{MEMBERS}{len(self._ensembles)}")
            if not kept:
                raise InvalidSettings(f"this run was cut off, and {FORGOTTEN}")
            made.take(kept)
        self._ensembles.append(made)
        return made

    def votes(
        self,
        ensemble: Ensemble,
        ask: Callable[..., Tensor | Placed],
        public: Any = None,
        own: Any = None,
        *,
        dimension: int,
        bound: float,
        is_non_negative: bool = False,
        release: str = "votes",
    ) -> Tensor:
        """Return the noisy sum of what all members say (dimension,), float64.

        Args:
            ensemble: the members.
            ask: maps a member's state, `public`, and its part of `own` if given, to its vote: a
                tensor, or `Placed` if it is zero but for one block.
            public: what is the same for all.
            own: what is another for each, public too: tensors with the members in front.
            dimension: number of values in a vote.
            bound: L2 norm that a vote is scaled to, at most.
            is_non_negative: whether votes are, which allows less noise.
            release: its name in the plan.
        """
        self._check_own(ensemble)
        access = self._open(release, "votes", dimension=dimension, bound=bound)
        return votes(
            access, ensemble, ask, public, own,
            dimension=dimension, bound=bound, is_non_negative=is_non_negative,
        )  # fmt: skip

    def sample_gradient(
        self,
        ensemble: Ensemble,
        loss: SampleLoss,
        images: Tensor,
        labels: Tensor,
        *,
        bound: float,
        release: str = "sample_gradient",
    ) -> Tensor:
        """Return the noisy mean of members' gradients by generated images, shaped like these.

        A few members are asked, chosen in secret at the planned rate. The mean is over the expected
        number of them. The release stays sound only as long as members learn on a public schedule,
        asked or not; `Ensemble.learn` knows no other.

        Args:
            ensemble: the members.
            loss: maps a member's state, all images and all labels to a number.
            images: generated, the same for all members.
            labels: of the images.
            bound: L2 norm that a member's gradient by all images is scaled to, at most.
            release: its name in the plan.
        """
        self._check_own(ensemble)
        access = self._open(release, "sample_gradient", dimension=images.numel(), bound=bound)
        return sample_gradient(access, ensemble, loss, images, labels, bound=bound)

    def _check_own(self, ensemble: Ensemble) -> None:
        if not ensemble.holds(self._records):
            raise PlanViolation(
                "an ensemble was asked that holds other records than this run is charged for; make "
                "it with the same curator"
            )

    def histogram(self, *, release: str = "histogram") -> Tensor:
        """Return the noisy number of records of each class (classes,)."""
        return self._answer(
            release,
            lambda: histogram(
                self._open(release, "histogram", dimension=self.facts.classes, bound=1.0)
            ),
        )

    def _open(self, release: str, kind: Kind, *, dimension: int, bound: float) -> Access:
        """Check a release against the plan, count it, and open the records for it."""
        line = self.plan[release]
        if line.kind != kind:
            raise PlanViolation(
                f"release '{release}' is planned as {line.kind} but was asked for as {kind}"
            )
        if dimension > line.dimension:
            raise PlanViolation(
                f"release '{release}' is planned with {line.dimension} coordinates but was asked "
                f"for with {dimension}; correct the method's plan"
            )
        if not (bound > 0 and math.isfinite(bound)):
            raise PlanViolation(
                f"release '{release}' was asked for with bound {bound:g}, expected a positive "
                "finite number"
            )
        if self._blocks.released[release] >= line.count:
            raise PlanExhausted(
                f"release '{release}' was planned {line.count} times and all are used; correct the "
                "method's plan"
            )
        self._blocks.count(release)
        self._offered = None
        self._bounds[release].add(bound)
        return Access(
            records=self._records,
            randomness=self._randomness,
            units=self.facts.units,
            classes=self.facts.classes,
            sampling_rate=line.sampling_rate,
            noise_multiplier=self.calibration.noise_multiplier * line.noise_ratio,
            engine=self._engine,
            group=self._group,
        )

    def _answer(self, release: str, compute: Callable[[], Tensor]) -> Tensor:
        """Make a one-shot release, committed before the method sees it, or replay it."""
        call = self._answered[release]
        if (committed := self._blocks.answers.get((release, call))) is None:
            self._commit_offered()
            answer = compute()
            answered = self._answered + Counter({release: 1})
            notes = {"answered": answered, "bounds": self.bounds}
            committed = self._blocks.commit(release, call, {"answer": answer}, notes)
        self._answered[release] += 1
        return self._here(committed.tensors["answer"])

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.engine.device)

    # Checkpoints

    def restore(self) -> tuple[int, dict[str, Tensor | dict[str, Tensor]]]:
        """Return (steps done, state) of the last committed checkpoint; (0, {}) for a fresh run."""
        if (saved := self._blocks.checkpoint) is None:
            return 0, {}
        self._answered = Counter(saved.notes["answered"])
        state: dict[str, Tensor | dict[str, Tensor]] = {}
        for name, tensor in saved.tensors.items():
            group, _, key = name.rpartition("/")
            if group.startswith(MEMBERS):
                continue  # not for methods
            if group:
                state.setdefault(group, {})[key] = self._here(tensor)  # type: ignore[index]
            else:
                state[name] = self._here(tensor)
        return saved.step, state

    def checkpoint(
        self, step: int, state: State, so_far: Callable[[], Artefact] | None = None
    ) -> None:
        """Offer a point to continue from: committed every few seconds, at a stop, and at the end.

        Args:
            step: steps done.
            state: what to continue with.
            so_far: makes what would be released if the run ended here, for a snapshot.

        Raises:
            Interrupted: a signal asked to stop; everything up to here is committed.
        """
        should_stop = self._group.agrees(self._pace.should_stop())
        has_releases = self._blocks.is_open
        wait = self._pace.seconds if has_releases else self._pace.seconds_between
        is_due = time.monotonic() - self._committed_at >= wait
        is_worth_a_snapshot = so_far is not None and self._part() > self._part_kept
        self._offered = (step, state)
        is_complete = has_releases and self.is_exhausted
        if should_stop or is_due or is_worth_a_snapshot or is_complete:
            self._commit(step, state)
        if so_far and is_worth_a_snapshot:  # committed, so it may be kept
            self._part_kept = self._part()
            self._pace.keep(self.made(), so_far())
        if should_stop:
            raise Interrupted(
                f"stopped after {self.released} of {self.plan.total} releases, all committed; "
                f"{FORGOTTEN if self._forgets else GO_ON}"
            )

    @property
    def _forgets(self) -> bool:
        """Whether an ensemble that was asked, and has more to say, ends with the process."""
        is_asked = bool(self._ensembles) and self.released > 0 and not self.is_exhausted
        return is_asked and not self._pace.keeps_members

    def _part(self) -> int:
        """Return how many of the parts between snapshots are done."""
        return self._pace.snapshots * self._blocks.released.total() // self.plan.total

    def _commit_offered(self) -> None:
        """Commit the open block, if there is one, with the state that was offered after it."""
        if not self._blocks.is_open:
            return
        if self._offered is None:
            raise PlanViolation(
                "a method went on, or ended, with uncommitted releases; call checkpoint after them"
            )
        self._commit(*self._offered)

    def _commit(self, step: int, state: State) -> None:
        flat: dict[str, Tensor] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                flat[name] = value
            else:
                flat |= {f"{name}/{key}": tensor for key, tensor in value.items()}
        if self._pace.keeps_members:
            for number, ensemble in enumerate(self._ensembles):
                flat |= {f"{MEMBERS}{number}/{key}": t for key, t in ensemble.kept().items()}
        notes = {"answered": self._answered, "bounds": self.bounds}
        self._blocks.commit("checkpoint", step, flat, notes)
        self._committed_at = time.monotonic()

    # What may be shown

    @property
    def released(self) -> int:
        """Number of committed releases."""
        return self._blocks.committed.total()

    @property
    def is_exhausted(self) -> bool:
        """Whether every planned release was made."""
        return self._blocks.released.total() >= self.plan.total

    def made(self) -> dict[str, int]:
        """Return the number of committed releases by name."""
        self._commit_offered()
        return {line.name: self._blocks.committed[line.name] for line in self.plan}

    @property
    def extra_attempts(self) -> int:
        """Number of block attempts beyond the first of each."""
        return self._blocks.extra_attempts

    @property
    def bounds(self) -> dict[str, list[float]]:
        """Contribution bounds used, by release."""
        return {name: sorted(values) for name, values in self._bounds.items()}

    @property
    def has_guarantee(self) -> bool:
        """Whether the answers are private: noise was added, from a secret source."""
        return self.calibration.noise_multiplier > 0 and self._randomness.is_secret

    @property
    def generator(self) -> str:
        """What draws batches and noise."""
        return self._randomness.generator

    def epsilon_spent(self) -> float:
        """Bound the epsilon of the committed releases (the whole plan is reserved all the same)."""
        if self.calibration.noise_multiplier == 0:
            return math.inf if self.released else 0.0
        tenths = tuple(
            math.ceil(SPENT_STEPS * self._blocks.committed[line.name] / line.count)
            for line in self.plan
        )
        if tenths not in self._spent:
            lines = tuple(
                replace(line, count=math.ceil(line.count * part / SPENT_STEPS))
                for line, part in zip(self.plan, tenths, strict=True)
                if part
            )
            self._spent[tenths] = (
                epsilon_of(
                    Plan(lines),
                    self.calibration.noise_multiplier,
                    self.calibration.delta_accounted,
                    self.calibration.accountant,
                )
                if lines
                else 0.0
            )
        return self._spent[tenths]


def _tensors_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of one group, by their names in it."""
    return {n.removeprefix(f"{name}/"): t for n, t in tensors.items() if n.startswith(f"{name}/")}
