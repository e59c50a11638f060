"""An ensemble: many networks behind the door, each fitted to a shard of units of its own.

Members learn from records without noise, so what they know is as private as the records: it is
sealed, and only the releases `votes` and `sample_gradient` read it. Their proofs rest on isolation.
A unit is in one shard; which one follows from its slot alone, so emptying a slot changes no other
unit's shard. A member's state is a function of its own shard and of what is public: the functions
that a method hands over are written for one member, and are applied to all of them under `vmap`,
where none sees another. All members learn whenever one does, so no state tells who was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from understudy.data.reading import RECORD
from understudy.errors import InvalidSettings
from understudy.privacy.gradients import OneByOne
from understudy.privacy.plan import PublicFacts
from understudy.privacy.records import Records
from understudy.privacy.sealed import Sealed
from understudy.seeds import public_generator
from understudy.training.engine import Engine

ROOM = {"cpu": 2**26, "cuda": 2**31}
"""Bytes of members' states that are worked on at a time."""
State = Any
"""What a member is: tensors, nested; of an ensemble, with the members in front."""
Learn = Callable[[State, Tensor, Tensor, Tensor, Any], State]
"""Map a member's state, its images (b, c, h, w) in [0, 1], their labels (b,), whether they exist
(b,), and what is public, to its next state. A record that does not exist is black, of class 0."""


class Ensemble(Sealed):
    """The members' shards and states. Nothing here leaves but through a release."""

    __slots__ = (
        "_at_once", "_counts", "_engine", "_places", "_records", "_state", "members", "shard",
        "units_each",
    )  # fmt: skip

    def __init__(
        self,
        records: Records,
        facts: PublicFacts,
        state: State,
        *,
        members: int,
        at_once: int | None = None,
        answer: int = 0,
        engine: Engine | None = None,
    ) -> None:
        if not 1 <= members <= facts.units:
            raise InvalidSettings(
                f"an ensemble of {members} members was asked for, expected 1 to {facts.units}, the "
                "number of units: each member needs some of its own"
            )
        wrong = {leaf.shape[:1] for leaf in pytree.tree_leaves(state)} - {(members,)}
        if wrong:
            raise InvalidSettings(f"a state of {members} members has tensors with {wrong} in front")
        self.members, self._at_once = members, at_once or _fitting(state, members, answer)
        self._engine = engine or Engine()
        self.shard = shard_size(facts, members)
        """Places in a shard: a public number. Those of units without a record do not count."""
        slots = shards(facts.units, members)
        self.units_each = slots.shape[1]
        """Units in a shard, their slots empty or not: a public number."""
        self._places, self._counts = records.places_of(slots, check_shards(facts))
        # Copied, for members learn in place, and the method still holds what it gave.
        self._records, self._state = records, pytree.tree_map(torch.clone, state)

    def holds(self, records: Records) -> bool:
        """Whether the shards are of these records."""
        return self._records is records

    def learn(self, learn: Learn, positions: Tensor, public: Any = None) -> None:
        """Let every member learn once from the records at `positions` of its shard: public."""
        apply = OneByOne(learn, in_dims=(0, 0, 0, 0, None))
        for chunk in self._chunks():
            places, counts = (part[chunk][:, positions] for part in (self._places, self._counts))
            images, labels, counts = self._records.at(places, counts)
            before = _of(self._state, chunk)
            after = self._engine.run(apply, before, images, labels, counts, public)
            pytree.tree_map(_write, before, after)

    def answers(
        self,
        ask: Callable[..., Any],
        public: Any,
        own: Any = None,
        *,
        chosen: Tensor | None = None,
        if_any_record: bool = False,
    ) -> Iterator[Any]:
        """Yield what members answer, chunk by chunk: tensors, nested. Only releases may call it.

        Args:
            ask: maps a member's state, what is public, and its part of `own`, to its answer.
            public: the same for all members.
            own: public too, another for each: tensors with the members in front.
            chosen: which members to ask, by number; all by default.
            if_any_record: whether zeros stand for the answer of a member without a record; where
                all are asked.
        """
        apply = OneByOne(ask, in_dims=(0, None) if own is None else (0, None, 0))
        chunks = self._chunks() if chosen is None else self._parts(chosen)
        # How many are chosen changes from call to call: too many shapes to compile.
        run = self._engine.run if chosen is None else _plainly
        for chunk in chunks:
            its_own = () if own is None else (_of(own, chunk),)
            said = run(apply, _of(self._state, chunk), public, *its_own)
            if if_any_record:
                said = pytree.tree_map(partial(_if, self._counts[chunk].any(1)), said)
            yield said

    def kept(self) -> dict[str, Tensor]:
        """Return what members know, for a checkpoint that stays private. Only for the curator."""
        return {str(n): leaf for n, leaf in enumerate(pytree.tree_leaves(self._state))}

    def take(self, kept: dict[str, Tensor]) -> None:
        """Take up what was kept. Only for the curator."""
        leaves = pytree.tree_leaves(self._state)
        for leaf, tensor in zip(leaves, (kept[str(n)] for n in range(len(kept))), strict=True):
            leaf.copy_(tensor)

    def _chunks(self) -> Iterator[slice]:
        for start in range(0, self.members, self._at_once):
            yield slice(start, min(self.members, start + self._at_once))

    def _parts(self, chosen: Tensor) -> Iterator[Tensor]:
        return (part for part in torch.split(chosen, self._at_once) if len(part))


def shard_size(facts: PublicFacts, members: int) -> int:
    """Return the places in a shard of one of so many members."""
    return facts.units // members * check_shards(facts)


def check_shards(facts: PublicFacts) -> int:
    """Return the most records of a unit; refuses a set that fixed none when it was registered."""
    if facts.unit == RECORD:
        return 1
    if facts.max_per_unit is None:
        raise InvalidSettings(
            f"a {facts.unit} may have any number of records, but the shards of an ensemble have a "
            "fixed size; pass --max-per-unit when the set is first named, for it is fixed then; a "
            "set that is registered without it needs another --method"
        )
    return facts.max_per_unit


def shards(units: int, members: int) -> Tensor:
    """Return the slots of each member (members, slots): every slot at most once.

    By a fixed permutation, for sources are often sorted; the same for all data sets of one size.
    """
    order = torch.randperm(units, generator=public_generator(0, "shards", units))
    return order[: units // members * members].view(members, -1)


def _fitting(state: State, members: int, answer: int) -> int:
    """Return how many members to work on at a time: as many as a cache, or a GPU, has room for.

    `answer`: values of what a member is asked for.
    """
    leaves = pytree.tree_leaves(state)
    each: int = sum(leaf[0].nbytes for leaf in leaves) + 4 * answer
    room: int = max((ROOM[leaf.device.type] for leaf in leaves), default=members)
    most = max(1, min(members, room // max(1, each)))
    equal = max(size for size in range(1, most + 1) if members % size == 0)
    return equal if 2 * equal >= most else most  # each size of chunk is compiled by itself


def _plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _if(exist: Tensor, said: Tensor) -> Tensor:
    """Return what members say (n, ...), zeros for those that do not count (n,)."""
    return torch.where(exist.to(said.device).view(-1, *[1] * (said.ndim - 1)), said, 0)


def _of(tree: Any, chunk: slice | Tensor) -> Any:
    """Return some members' part of what is stacked."""
    return pytree.tree_map(lambda leaf: leaf[chunk], tree)


def _write(before: Tensor, after: Tensor) -> None:
    """Put a chunk's next state where its last one was: there is no room for two of all."""
    before.copy_(after)
