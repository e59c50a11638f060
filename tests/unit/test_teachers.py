"""DataLens, G-PATE and PATE-GAN: what a teacher may say, and what is made of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from door import records_of, some_images, without
from understudy.errors import InvalidSettings
from understudy.methods.datalens import DataLens, DataLensConfig, Levels, Signs, Vote, scaled
from understudy.methods.g_pate import BinVote, GPATEConfig
from understudy.methods.pate_gan import PATEGAN, Favourites, PATEGANConfig, Student, YesOrNo
from understudy.methods.teachers import NetworkCritic, RecordsCritic, Shown, Wishes, stacked, wish
from understudy.nets.critics import Teacher
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.ensemble import Ensemble, shards
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.privacy.releases.votes import Placed

PIXELS = 64
FACTS = PublicFacts(units=400, class_names=tuple("abc"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))
TEACHER = Teacher(FACTS.shape, FACTS.classes, 3, 6)
CRITIC = NetworkCritic(TEACHER, 0.01)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dice(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def shown(count=4):
    return Shown(dice(count, *FACTS.shape), torch.arange(count) % FACTS.classes, torch.empty(0))


def compression(name, **changes):
    config = DataLensConfig(compression=name, top=10, teachers=5, **changes)
    return DataLens(config, FACTS, seed=0)._compression


@pytest.mark.parametrize("name", ["signs", "levels"])
@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1.0, 1e8])
def test_votes_are_as_short_as_declared(name, scale):
    """The release scales longer ones down; none should need it."""
    rule = compression(name)
    for seed in range(20):
        wishes = scale * drawn(7, PIXELS, seed=seed)
        said = rule(wishes, dice(7, PIXELS, seed=seed))
        assert said.shape == (7, rule.dimension)
        assert said.norm(dim=1).max() <= rule.bound + 1e-4


def test_no_gradient_at_all_is_a_vote_of_the_declared_length_too():
    said = compression("signs")(torch.zeros(2, PIXELS), dice(2, PIXELS))
    assert torch.equal(said.norm(dim=1), torch.full((2,), math.sqrt(10)))


@pytest.mark.parametrize(
    "rule",
    [Signs(PIXELS, PIXELS, 0.5, stochastic=True), Levels(PIXELS, 0.5)],
    ids=["signs", "levels"],
)
def test_chance_is_fair(rule):
    """On average a vote is the gradient, cut at the clip; the dice are one roll, turned."""
    wishes = drawn(1, PIXELS)
    roll, turns = dice(1, PIXELS), dice(4000, seed=1)
    mean = torch.stack([rule(wishes, (roll + turn) % 1) for turn in turns]).mean(0)
    assert (mean - scaled(wishes, 0.5)).abs().max() < 5 / math.sqrt(4000)


def test_certain_votes_are_the_signs_of_the_largest_entries():
    wishes = drawn(3, PIXELS)
    said = Signs(PIXELS, 10, 1e-5, stochastic=False)(wishes, dice(3, PIXELS))
    assert torch.equal(said.abs().sum(1), torch.full((3,), 10.0))
    for wished, sent in zip(wishes, said, strict=True):
        assert wished[sent == 0].abs().max() <= wished[sent != 0].abs().min()
    assert torch.equal(said[said != 0], wishes.sign()[said != 0])


def test_a_sketch_is_linear_and_finds_the_largest_entries():
    rule = compression("sketch")
    one, other = (drawn(2, PIXELS, seed=n) for n in range(2))
    total = rule(one, one) * one.norm(dim=1, keepdim=True)
    total += rule(other, other) * other.norm(dim=1, keepdim=True)
    both = rule(one + other, one) * (one + other).norm(dim=1, keepdim=True)
    assert torch.allclose(total, both, atol=1e-5)
    spike = torch.zeros(1, PIXELS)
    spike[0, 17] = -3.0
    found = rule.direction(rule(spike, spike), 0.0)
    assert found[0].abs().argmax() == 17
    assert torch.allclose(found[0, 17], torch.tensor(-1.0))
    assert rule.bound == pytest.approx(math.sqrt(5))


def test_what_teachers_count_is_bounded_by_one_bin_for_each_projection():
    params = TEACHER.init(torch.Generator().manual_seed(0))
    public = shown(), drawn(PIXELS, 6)
    said = BinVote(CRITIC, 10, 0.0)((params,), public, torch.tensor(0.5))
    assert said.shape == (4, 6, 10)
    assert torch.equal(said.sum(2), torch.ones(4, 6))
    assert said.norm() == pytest.approx(math.sqrt(4 * 6))


def test_verdicts_are_centred():
    params = TEACHER.init(torch.Generator().manual_seed(0))
    verdict = YesOrNo(TEACHER)
    said = verdict((params,), shown(9), torch.tensor(0.5))
    assert set(said.tolist()) <= {-0.5, 0.5}
    assert said.norm() == pytest.approx(verdict.bound(9))
    assert verdict.shares(torch.tensor([-30.0, 0.0, 10.0, 20.0]), 20).tolist() == [0, 0.5, 1, 1]


def changed_by_a_missing_record(critic):
    """Say which teachers know other things, by any bit, where one record is missing."""
    data, members = some_images(12), 4
    facts = replace(FACTS, units=12)
    start = stacked(critic.start(torch.Generator().manual_seed(0)), members)

    def learned(records):
        made = Ensemble(records_of(records), facts, start, members=members, at_once=members)
        for step in range(3):
            made.learn(critic, (torch.arange(2) + step) % 3, shown())
        return pytree.tree_leaves(made._state)

    gone = int(shards(12, members)[2, 0])
    changed = torch.zeros(members, dtype=torch.bool)
    for one, other in zip(learned(data), learned(without(data, gone)), strict=True):
        changed |= (one != other).view(members, -1).any(1)
    return changed.tolist()


def test_a_missing_record_changes_one_teacher_and_what_its_adam_remembers():
    assert changed_by_a_missing_record(CRITIC) == [False, False, True, False]


def test_a_missing_record_is_missed_by_the_teacher_that_would_remember_it():
    critic = RecordsCritic(PIXELS, 2, 0.1)
    assert changed_by_a_missing_record(critic) == [False, False, True, False]


def test_a_wish_makes_images_look_more_real():
    params = TEACHER.init(torch.Generator().manual_seed(0))
    before = shown()
    moved = before.images + 1e-2 * wish(TEACHER, params, before).view_as(before.images)
    scores = [TEACHER(params, images, before.labels) for images in (before.images, moved)]
    assert (scores[1] > scores[0]).all()


def remembered(images, labels, reach):
    critic = RecordsCritic(PIXELS, len(labels), reach)
    nothing = critic.start(torch.Generator())
    exist = torch.ones(len(labels))
    return critic, critic(nothing, images, torch.tensor(labels), exist, shown())


def written_out(said, images):
    """Return a vote with its zeros: a block for each image."""
    if not isinstance(said, Placed):
        return said
    blocks = torch.zeros(images, *said.said.shape)
    blocks[said.place] = said.said
    return blocks


def pulled(critic, state, seen, turn=0.5):
    """Return where images would be, were all wishes fulfilled."""
    wishes = critic.wish(state, seen, torch.tensor(turn))
    told = wishes.told(wishes.ways, len(seen.labels))
    return seen.images.flatten(1) + written_out(told, len(seen.labels))


def test_each_record_pulls_the_nearest_image_of_its_class_all_the_way():
    images = dice(4, *FACTS.shape, seed=1)
    critic, state = remembered(images, [0, 1, 1, 1], reach=1e-3)
    near = Shown(images[[0, 1, 2, 3]] + 0.01, torch.tensor([0, 1, 1, 0]), torch.empty(0))
    reached = pulled(critic, state, near)
    assert torch.allclose(reached[0], images[0].flatten(), atol=1e-5)
    # Two are of a class, and the fourth record is near one of another: it goes to one of the two.
    assert torch.equal(reached[3], near.images[3].flatten())
    ways = critic.wish(state, near, torch.tensor(0.5))
    assert ways.places[:3].tolist() == [0, 1, 2]
    assert ways.places[3] in (1, 2)


def test_from_afar_chance_decides_which_image_is_pulled():
    images = dice(1, *FACTS.shape, seed=1)
    critic, state = remembered(images, [1], reach=1e3)
    seen = Shown(dice(4, *FACTS.shape, seed=2), torch.tensor([1, 0, 1, 1]), torch.empty(0))
    places = [int(critic.wish(state, seen, torch.tensor(turn)).places) for turn in (0, 0.5, 0.99)]
    assert places == [0, 2, 3]  # the same for all three of its class, none of another


def test_without_an_image_of_its_class_or_without_a_record_nothing_is_said():
    images = dice(1, *FACTS.shape, seed=1)
    critic, state = remembered(images, [1], reach=0.1)
    rule = Signs(PIXELS, 5, 0.0, True)
    others = Shown(dice(3, *FACTS.shape, seed=2), torch.tensor([0, 0, 2]), torch.empty(0))
    gone = critic(state, images, torch.tensor([1]), torch.zeros(1), others)
    own = Shown(others.images, torch.tensor([1, 1, 1]), torch.empty(0))
    turn = torch.tensor([0.3, 0.6])
    for known, seen in ((state, others), (gone, own), (critic.start(torch.Generator()), own)):
        said = Vote(critic, rule)(known, (seen, dice(3, PIXELS)), turn)
        assert torch.equal(written_out(said, 3), torch.zeros(3, PIXELS))
        counted = BinVote(critic, 4, 0.0)(known, (seen, drawn(PIXELS, 6)), turn[0])
        assert torch.equal(written_out(counted, 3), torch.zeros(3, 6, 4))


def test_a_record_votes_on_one_image_alone():
    images = dice(1, *FACTS.shape, seed=1)
    critic, state = remembered(images, [1], reach=0.1)
    seen = Shown(dice(4, *FACTS.shape, seed=2), torch.tensor([1, 0, 1, 1]), torch.empty(0))
    rule = Signs(PIXELS, 5, 0.0, True)
    said = Vote(critic, rule)(state, (seen, dice(4, PIXELS)), torch.tensor([0.3, 0.6]))
    assert written_out(said, 4).abs().sum(1).sort().values.tolist() == [0, 0, 0, 5]
    assert said.said.norm() == pytest.approx(math.sqrt(critic.voices(4)) * rule.bound)
    counted = BinVote(critic, 4, 0.0)(state, (seen, drawn(PIXELS, 6)), torch.tensor(0.3))
    assert counted.said.norm() == pytest.approx(math.sqrt(critic.voices(4) * 6))


class Largest(TorchDispatchMode):
    """Note the most values of any tensor that is made meanwhile."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.values = max(self.values, made.numel())
        return made


def test_what_several_records_say_takes_no_room_for_each_pair_with_an_image():
    images, records = 20, 7
    places = torch.tensor([3, 0, 3, 19, 4, 4, 3])
    ways = dice(records, PIXELS)
    ways[5] = 0  # no wish after all
    expected = torch.zeros(images, PIXELS)
    for place, way in zip(places, ways, strict=True):
        expected[place] += way
    with Largest() as largest:
        told = Wishes(ways, places).told(ways, images)
    assert torch.allclose(told, expected)
    assert largest.values == images * PIXELS


def test_each_record_has_one_favourite_and_all_may_have_the_same():
    images = dice(3, *FACTS.shape, seed=1)
    critic, state = remembered(images, [1, 1, 0], reach=1e-3)
    verdict = Favourites(critic)
    seen = Shown(images[[0, 1, 2, 2]] + 0.01, torch.tensor([1, 1, 1, 0]), torch.empty(0))
    assert verdict(state, seen, torch.tensor(0.5)).tolist() == [1, 1, 0, 1]
    alike = [images[:1].expand(3, *FACTS.shape), torch.tensor([1, 1, 1]), torch.ones(3)]
    said = verdict(critic(state, *alike, seen), seen, torch.tensor(0.5))
    assert said.tolist() == [3, 0, 0, 0]
    assert said.norm() == verdict.bound(4)
    gone = critic(state, images, torch.tensor([1, 1, 0]), torch.zeros(3), seen)
    assert not verdict(gone, seen, torch.tensor(0.5)).any()


def test_an_image_with_its_due_of_votes_looks_half_real():
    critic, _ = remembered(dice(1, *FACTS.shape), [1], reach=0.1)
    counts = torch.tensor([10.0, 20.0, -3.0, 0.0])
    shares = Favourites(critic).shares(counts, teachers=40)
    assert torch.allclose(shares, torch.tensor([1 / 2, 2 / 3, 0, 0]))


class Desk:
    """What a student needs of a classroom, without teachers."""

    def __init__(self):
        self.public, self.device = {}, torch.device("cpu")


def a_student(**settings):
    config = PATEGANConfig(batch=4, width=2, hidden=3, **settings)
    return Student(PATEGAN(config, FACTS, seed=0), Desk())


def test_a_student_learns_from_the_last_round_and_some_that_it_remembers():
    student = a_student(memory=3)
    for at in range(5):
        seen = shown(4)._replace(images=torch.full((4, *FACTS.shape), at / 10))
        student._remember(seen, torch.full((4,), at / 10), at)
    past = student.room.public["past"]
    assert torch.allclose(past["shares"][:, 0], torch.tensor([0.3, 0.4, 0.2]))
    assert torch.equal(past["images"].flatten(1).amax(1), past["shares"].amax(1))
    last, *others = student._recalled(4, 0)
    assert last == 1
    assert {place for step in range(9) for place in student._recalled(4, step)[1:]} == {0, 2}
    assert len(others) == 4
    assert student._recalled(0, 0) == [0]
    assert set(student._recalled(1, 0)[1:]) == {0}
    assert a_student()._recalled(7, 0) == [0]


def test_what_is_shown_varies_smoothly_around_the_images():
    before = shown(4)._replace(images=torch.full((4, *FACTS.shape), 0.5))
    varied = a_student(spread=0.05, smooth=1.5)._varied(before, "vary", 0)
    noise = varied.images - before.images
    assert noise.std() == pytest.approx(0.05, rel=0.1)
    steps = noise.diff(dim=3)
    assert steps.std() < 0.7 * noise.std()  # of white noise, it is 1.4 times
    assert torch.equal(varied.labels, before.labels)
    assert a_student()._varied(before, "vary", 0) is before
    loud = a_student(spread=5.0)._varied(before, "vary", 0).images
    assert (loud.min(), loud.max()) == (0, 1)


@pytest.mark.parametrize("network", ["conv", "dense"])
def test_a_student_learns_what_teachers_say(network):
    student = a_student(student_lr=0.01, student=network)
    seen, shares = shown(4), torch.tensor([0.1, 0.9, 0.2, 0.8])
    student._remember(seen, shares, 0)
    for _ in range(300):
        student._learn([0])
    params = student.room.public["student"][0]
    found = student.network(params, seen.images, seen.labels).sigmoid()
    assert torch.allclose(found, shares, atol=0.05)


@pytest.mark.parametrize(
    ("config", "changes", "complaint"),
    [
        (DataLensConfig, {"compression": "zip"}, "expected one of signs, levels, sketch"),
        (DataLensConfig, {"threshold": 1.0}, "threshold is 1"),
        (DataLensConfig, {"top": -1}, "top is -1"),
        (DataLensConfig, {"clip": float("nan")}, "clip is nan"),
        (DataLensConfig, {"teachers": 0}, "teachers is 0"),
        (DataLensConfig, {"critic": "human"}, "expected network or records"),
        (DataLensConfig, {"generator": "x"}, "expected deconv or gallery"),
        (DataLensConfig, {"reach": 0.0}, "reach is 0"),
        (GPATEConfig, {"bins": 0}, "bins is 0"),
        (GPATEConfig, {"threshold": -0.1}, "threshold is -0.1"),
        (PATEGANConfig, {"student_steps": 0}, "student_steps is 0"),
        (PATEGANConfig, {"average": 1.0}, "average is 1"),
        (PATEGANConfig, {"memory": 0}, "memory is 0"),
        (PATEGANConfig, {"student": "tree"}, "student is 'tree', expected conv or dense"),
        (PATEGANConfig, {"spread": -1.0}, "spread is -1"),
        (PATEGANConfig, {"smooth": float("nan")}, "smooth is nan"),
    ],
)
def test_senseless_settings_are_refused(config, changes, complaint):
    with pytest.raises(InvalidSettings, match=complaint):
        config(**changes)


def test_more_entries_than_pixels_are_refused():
    with pytest.raises(InvalidSettings, match="top is 65, but an image has 64 pixels"):
        DataLens(DataLensConfig(top=65), FACTS, seed=0)


def multiplier(*, noise, bound, non_negative=False):
    """Return the noise of a published configuration in units of its sensitivity."""
    return noise / ((math.sqrt(2) if non_negative else 2) * bound)


@pytest.mark.parametrize(
    ("rounds", "noise", "bound", "non_negative", "claimed"),
    [
        (86, 5000, math.sqrt(15 * 200), False, 1.0),
        (109, 800, math.sqrt(15 * 300), False, 10.0),
        (131, 1000, math.sqrt(15 * 10), True, 1.0),
        (50, 100, math.sqrt(30 * 10), True, 10.0),
    ],
    ids=["DataLens 1", "DataLens 10", "G-PATE 1", "G-PATE 10"],
)
def test_published_noise_lasts_for_the_published_rounds(
    rounds, noise, bound, non_negative, claimed
):
    """Worst-case accounting of the published noise and rounds stays below what was claimed."""
    line = PlannedRelease(name="votes", kind="votes", count=rounds, dimension=1)
    z = multiplier(noise=noise, bound=bound, non_negative=non_negative)
    assert 0.5 * claimed < epsilon_of(Plan((line,)), z, 1e-5, "pld") < claimed
