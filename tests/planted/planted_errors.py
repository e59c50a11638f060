"""Known privacy errors, most of them made by somebody before, and the test that catches each."""

from __future__ import annotations

from planting import Planted

UNIT, DRAWS = "tests/unit", "tests/statistical/test_randomness.py"
GRADIENT = f"{UNIT}/test_gradient_release.py"
COMPILED = f"{UNIT}/test_compiled_release.py"
SUM_OF_ROWS = "total += _whole(clipped_sum(rows, bound), dimension)"

ERRORS = [
    Planted(
        name="noise halved by a release",
        at="privacy.bounded:noisy_bounded_sum",
        old="noise_std = access.noise_multiplier * bound",
        new="noise_std = access.noise_multiplier * bound / 2",
        caught_by=f"{GRADIENT}::test_empty_batch_is_noise",
        shows="torch.full_like(released, 2.0 * 0.1 * 1.5 / 6)",
    ),
    Planted(
        name="noise halved by the sampler",
        at="privacy.randomness:SecretRandomness.normal",
        old="self._noise.standard_normal(count)",
        new="self._noise.standard_normal(count) / 2",
        caught_by=f"{DRAWS}::test_the_sampler_reaches_far_into_the_tail[Philox]",
        shows="ks(draws[:100_000], 1.0) > ALPHA",
        false_alarm=1e-6,
    ),
    Planted(
        name="noise drawn in float32",
        at="privacy.randomness:SecretRandomness.normal",
        old="self._noise.standard_normal(count)",
        new="self._noise.standard_normal(count, np.float32).astype(np.float64)",
        caught_by=f"{DRAWS}::test_the_sampler_reaches_far_into_the_tail[Philox]",
        shows="0x1FFFFFFF",
        false_alarm=1e-6,
    ),
    Planted(
        name="the sampler's tail not charged",
        at="privacy.randomness:_tail_of",
        old="    whole = _tail_per_release(line.dimension, 1 / noise_multiplier)",
        new="    whole = 0.0",
        caught_by=f"{UNIT}/test_accounting.py::"
        "test_tail_bound_covers_the_worst_shift_found_by_search",
        shows="max(found) <= bound",
    ),
    Planted(
        name="noise of a size that follows the data",
        at="privacy.bounded:noisy_bounded_sum",
        old="noise_std = access.noise_multiplier * bound",
        new="noise_std = access.noise_multiplier * min(bound, float(total.norm()))",
        caught_by=f"{GRADIENT}::test_empty_batch_is_noise",
        shows="torch.full_like(released, 2.0 * 0.1 * 1.5 / 6)",
    ),
    Planted(
        name="rows bounded as a compiler computed them, summed as it rounded them",
        at="privacy.bounded:clipped_sum",
        old="    for block in rows:\n        settle(block)\n",
        new="",
        caught_by=f"{COMPILED}::test_compiled_the_row_that_is_summed_is_the_one_that_was_bounded",
        shows="(one - none).norm() <= 0.1",
    ),
    Planted(
        name="when it is compiled decided by a unit",
        at="privacy.records:Records.padded_places",
        old="            yield self._filled(*self._slots(chunk), size)",
        new="            places, exist = self._slots(chunk)\n"
        "            if exist.any():\n"
        "                yield self._filled(places, exist, size)",
        caught_by=f"{COMPILED}::test_which_call_is_compiled_first_does_not_depend_on_a_unit",
        shows="counts == [2, 2]",
    ),
    Planted(
        name="last bits of the sum shown",
        at="privacy.bounded:snapped",
        old="    return torch.round(values / grid) * grid",
        new="    return values",
        caught_by=f"{GRADIENT}::test_answers_lie_on_a_public_grid",
        shows="torch.round(total / step)",
    ),
    Planted(
        name="clipped after averaging",
        at="privacy.bounded:noisy_bounded_sum",
        old=SUM_OF_ROWS,
        new="mean = [block.mean(0, keepdim=True) for block in rows]\n"
        "            total += access.expected_batch * clipped_sum(mean, bound)",
        caught_by=f"{GRADIENT}::test_clips_before_summing",
        shows="pytest.approx(12e-3",
    ),
    Planted(
        name="clipped tensor by tensor",
        at="privacy.bounded:noisy_bounded_sum",
        old=SUM_OF_ROWS,
        new="total += torch.cat([clipped_sum([block], bound) for block in rows])",
        caught_by=f"{GRADIENT}::test_clips_the_whole_vector_of_a_unit",
        shows="pytest.approx(1e-3",
    ),
    Planted(
        name="a unit's records clipped one by one",
        at="privacy.records:Records.unit_rows",
        old="            if self.one_each:\n                places, exist = self._slots(chunk)",
        new="            if True:\n                places, exist = self._all_places(chunk)[0], "
        "torch.ones(1, dtype=torch.bool)",
        caught_by=f"{GRADIENT}::test_clips_the_whole_vector_of_a_unit",
        shows="pytest.approx(1e-3",
    ),
    Planted(
        name="the sum of a unit's records rounded where a batch of them ends",
        at="privacy.records:_sums_like",
        old="return rows.new_zeros((units, *rows.shape[1:]), dtype=torch.float64)",
        new="return rows.new_zeros((units, *rows.shape[1:]))",
        caught_by=f"{UNIT}/test_records.py::"
        "test_where_a_batch_ends_within_a_unit_does_not_round_its_sum",
        shows="sums[1:].tolist() == [1.0] * 11",
    ),
    Planted(
        name="a row of NaN passes the clip",
        at="privacy.bounded:clipped_sum",
        old="is_kept = norms < LARGEST_RATIO * limit",
        new="is_kept = ~(norms > LARGEST_RATIO * limit)",
        caught_by=f"{GRADIENT}::test_a_gradient_that_is_not_finite_counts_zero[nan]",
        shows="torch.allclose(released, expected",
    ),
    Planted(
        name="the realised batch as denominator",
        at="privacy.bounded:noisy_bounded_sum",
        old="return snapped(access.group.add_up(total), noise_std)",
        new="total = total * access.expected_batch / max(1, len(units))\n"
        "    return snapped(access.group.add_up(total), noise_std)",
        caught_by=f"{GRADIENT}::test_denominator_is_public",
        shows="pytest.approx(1e-3",
    ),
    Planted(
        name="filled slots as denominator",
        at="privacy.sampling:Access.expected_batch",
        old="return self.sampling_rate * self.units",
        new="return self.sampling_rate * len(self.records._places)",
        caught_by=f"{GRADIENT}::test_an_empty_slot_counts_in_the_denominator",
        shows="torch.equal(*released)",
    ),
    Planted(
        name="realised class counts as denominators",
        at="privacy.releases.class_sums:class_sums",
        old="    parts = zip(torch.split(total, sizes), blocks, strict=True)",
        new="    counts = access.records._labels.bincount(minlength=classes)[:, None]\n"
        "    total = total.view(classes, -1) / counts * access.units / classes\n"
        "    parts = zip(torch.split(total.flatten(), sizes), blocks, strict=True)",
        caught_by=f"{UNIT}/test_class_releases.py::"
        "test_a_missing_record_takes_away_its_own_row_and_no_more",
        shows="torch.allclose(before - after, expected",
    ),
    Planted(
        name="batch norm mixes records",
        at="privacy.records:Records._contributions",
        old="return contribution(inputs, seen(self._images[there]), self._labels[there])",
        new="images = seen(self._images[there])\n"
        "        images = (images - images.mean(0)) / (images.std(0) + 1e-5)\n"
        "        return contribution(inputs, images, self._labels[there])",
        caught_by=f"{GRADIENT}::test_equals_a_plain_loop[0.1-records]",
        shows="torch.allclose(flat(released), expected",
    ),
    Planted(
        name="random numbers of a loss let through",
        at="privacy.gradients:OneByOne.__call__",
        old='randomness="error"',
        new='randomness="different"',
        caught_by=f"{GRADIENT}::test_public_randomness_inside_a_loss_is_refused",
        shows="pytest.raises(PlanViolation",
    ),
    Planted(
        name="batches that follow the seed",
        at="privacy.randomness:SecretRandomness.__init__",
        old="self._sampling = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))",
        new="self._sampling = np.random.Generator(np.random.Philox(key=torch.initial_seed()))",
        caught_by=f"{DRAWS}::test_global_seeds_change_neither_batches_nor_noise[Philox]",
        shows="assert seen[0][0] != seen[1][0]",
    ),
    Planted(
        name="batches of a fixed size charged as Poisson's",
        at="privacy.randomness:SecretSource.choose",
        old="        if rate == 1:\n            return torch.arange(count)",
        new="        if rate < 1:\n"
        "            drawn = self._sampling.choice(count, round(count * rate), replace=False)\n"
        "            return torch.from_numpy(np.sort(drawn))",
        caught_by=f"{DRAWS}::test_units_are_sampled_independently_at_the_stated_rate[Philox-0.1]",
        shows="stats.chi2.cdf(spread, 199) > ALPHA",
        false_alarm=1e-6,
    ),
    Planted(
        name="the same noise in runs side by side",
        at="privacy.randomness:SecretRandomness.__init__",
        old="self._noise = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))",
        new="self._noise = np.random.Generator(np.random.Philox(key=1))",
        caught_by=f"{DRAWS}::"
        "test_noise_and_batches_are_independent_across[Philox-runs side by side]",
        shows="FAR * np.sqrt(count)",
        false_alarm=1e-6,
    ),
    Planted(
        name="two runs draw from one generator",
        at="privacy.randomness:SecretSource.take",
        old="self._is_taken = True",
        new="pass",
        caught_by="tests/e2e/test_side_by_side.py::test_sharing_batches_or_noise_is_refused",
        shows="pytest.raises(PlanViolation",
    ),
    Planted(
        name="one key for all draws of the cipher",
        at="privacy.secure:SecureRandomness._words",
        old="secrets.token_bytes(KEY_BYTES)",
        new="bytes(KEY_BYTES)",
        caught_by=f"{DRAWS}::test_noise_and_batches_are_independent_across[AES-256-CTR-steps]",
        shows="FAR * np.sqrt(count)",
        false_alarm=1e-6,
    ),
    Planted(
        name="noise added by each of two processes",
        at="privacy.bounded:noisy_bounded_sum",
        old="if access.group.leads:",
        new="if True:",
        caught_by=f"{UNIT}/test_group.py::test_of_two_processes_one_adds_the_noise",
        shows="torch.equal(sum(sent)",
    ),
    Planted(
        name="noise added by none of two processes",
        at="privacy.bounded:noisy_bounded_sum",
        old="if access.group.leads:",
        new="if access.group.size == 1:",
        caught_by=f"{UNIT}/test_group.py::test_of_two_processes_one_adds_the_noise",
        shows="torch.equal(sum(sent)",
    ),
    Planted(
        name="one release too many answered",
        at="privacy.curator:Curator._open",
        old="if self._blocks.released[release] >= line.count:",
        new="if self._blocks.released[release] > line.count:",
        caught_by=f"{UNIT}/test_boundary.py::"
        "test_a_release_outside_the_plan_is_refused_before_a_read",
        shows="pytest.raises(PlanExhausted)",
    ),
    Planted(
        name="one round too many asked for",
        at="methods.psg:PSG.run",
        old="range(done, config.steps)",
        new="range(done, config.steps + config.batches)",
        caught_by="tests/contracts/test_methods.py::"
        "test_makes_what_is_valid_with_exactly_the_planned_releases[psg]",
        shows="world.method().run(curator, Progress())",
        raises="PlanExhausted",
    ),
    Planted(
        name="noise drawn anew where an answer is used again",
        at="privacy.curator:Curator._answer",
        old="if (committed := self._blocks.answers.get((release, call))) is None:",
        new="if (committed := self._blocks.answers.get((release, -1))) is None:",
        caught_by=f"{UNIT}/test_blocks.py::"
        "test_a_one_shot_answer_is_committed_before_it_is_seen_and_replayed",
        shows="torch.equal(curator.histogram(), first)",
        raises="PlanExhausted",
    ),
    Planted(
        name="an answer used before it is committed",
        at="privacy.curator:Curator._answer",
        old='            committed = self._blocks.commit(release, call, {"answer": answer}, notes)',
        new="            return self._here(answer)",
        caught_by=f"{UNIT}/test_blocks.py::test_a_killed_one_shot_release_never_shows_its_answer",
        shows="pytest.raises(Killed)",
    ),
    Planted(
        name="records read before the ledger knows",
        at="privacy.curator:Curator._open",
        old="        self._blocks.count(release)\n",
        new="",
        caught_by=f"{UNIT}/test_boundary.py::test_every_release_is_charged_before_it_is_returned",
        shows='states[0] == ["started"]',
    ),
    Planted(
        name="early stopping without noise",
        at="methods.dp_mepf:DPMEPF.run",
        old='        known: Known = {"weights": weights, **targets}',
        new="        seen = perception.glance(weights, curator._records._images.float() / 255)\n"
        '        targets["glance"] = by_class(seen, curator._records._labels, self._classes)\n'
        '        known: Known = {"weights": weights, **targets}',
        caught_by=f"{UNIT}/test_boundary.py::test_what_decides_on_the_way_was_released",
        shows='is_under(stack, "understudy", "privacy", "releases")',
    ),
    Planted(
        name="a unit in two shards",
        at="privacy.ensemble:shards",
        old='torch.randperm(units, generator=public_generator(0, "shards", units))',
        new='torch.randint(units, (units,), generator=public_generator(0, "shards", units))',
        caught_by=f"{UNIT}/test_ensemble.py::test_every_slot_is_in_at_most_one_shard[12-4]",
        shows="len(slots.unique()) == slots.numel()",
    ),
    Planted(
        name="teachers share Adam's moments",
        at="privacy.ensemble:Ensemble.learn",
        old="            pytree.tree_map(_write, before, after)",
        new="            params, moments = after\n"
        "            moments = pytree.tree_map(lambda m: m.mean(0).expand_as(m), moments)\n"
        "            pytree.tree_map(_write, before, (params, moments))",
        caught_by=f"{UNIT}/test_teachers.py::"
        "test_a_missing_record_changes_one_teacher_and_what_its_adam_remembers",
        shows="[False, False, True, False]",
    ),
    Planted(
        name="votes of sensitivity C instead of 2 C",
        at="privacy.releases.votes:votes",
        old="(math.sqrt(2) if is_non_negative else 2) * bound",
        new="(math.sqrt(2) if is_non_negative else 1) * bound",
        caught_by=f"{UNIT}/test_ensemble.py::test_noise_goes_by_the_sensitivity",
        shows="torch.full((7,), 3 * sensitivity",
    ),
    Planted(
        name="members without a record vote, at the price of one vote",
        at="privacy.releases.votes:votes",
        old="if_any_record=is_alone",
        new="if_any_record=False",
        caught_by=f"{UNIT}/test_ensemble.py::test_without_its_only_unit_a_member_has_no_vote",
        shows="pytest.approx(0.5, rel=1e-5)",
    ),
    Planted(
        name="replaced answers charged as removed ones",
        at="privacy.accounting:_gaussians",
        old="replaces = line.kind in REPLACING",
        new="replaces = False\n        multiplier *= 2 if line.kind in REPLACING else 1",
        caught_by=f"{UNIT}/test_sample_gradient.py::"
        "test_replacement_costs_more_than_removal_and_less_than_no_sampling[1-renyi]",
        shows="removal * 1.1 < replacement",
    ),
    Planted(
        name="a client of one unit adds the noise of one vote",
        at="privacy.client:Client.answer",
        old="is_replaced=True",
        new="is_replaced=False",
        caught_by=f"{UNIT}/test_client.py::"
        "test_noise_is_of_one_size_however_few_units_a_client_has[1]",
        shows="answer == pytest.approx(client.noise_std",
    ),
]
